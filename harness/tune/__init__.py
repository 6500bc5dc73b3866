"""Tuning: the settings with the highest rate under an SLO, found on the simulator and confirmed on the engine.

The command is ``cb-tune``; it needs Optuna (``pip install "cb-bench[tune]"``).
"""
