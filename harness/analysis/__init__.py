"""What may be concluded from measured runs: what differs between arms, and how surely. Imported by module."""
