"""From what the user left open to what runs: every setting with its value and where it came from.

Resolution is a list of small steps in a fixed order; each reads what was settled before it. The result is frozen.
"""

from engine.resolution.resolved import Resolved, ResolvedConfig
from engine.resolution.steps import resolve

__all__ = ["Resolved", "ResolvedConfig", "resolve"]
