"""What may be concluded from measured runs: what caused the worst waits, and what differs between arms and how surely.

Its modules are imported by name: metrics use :mod:`.attribution`, and :mod:`.comparison` uses metrics.
"""
