"""What may be concluded from measured runs."""
