"""Capacity: the largest rate under an SLO, what binds it, how many GPUs a target needs, and which settings to use.

Rests on :mod:`harness.simulate`; the command is ``cb-plan``.
"""
