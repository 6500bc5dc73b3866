"""Simulation: the engine's own scheduler and cache under a virtual clock.

A step-time model is fitted to measured step logs (:mod:`harness.simulate.fit`); a workload is then served by the
engine's own scheduler in virtual time (:func:`simulate`), by one replica or several (:func:`simulate_fleet`). The
result is a :class:`harness.record.RunRecord` like that of a measured run, marked ``source = simulated``, so every
metric, table and report works on it. How far it is from runs it was not fitted to is what
:mod:`harness.simulate.validation` says.
"""

from harness.simulate.fit import fit_steps
from harness.simulate.fleet import ROUTERS, shares_pages, simulate_fleet
from harness.simulate.setup import EngineSetup, SetupError, read_setup
from harness.simulate.simulation import simulate
from harness.simulate.step_time import ModelError, StepTimeModel
from harness.simulate.validation import Validation, validate

__all__ = [
    "ROUTERS",
    "EngineSetup",
    "ModelError",
    "SetupError",
    "StepTimeModel",
    "Validation",
    "fit_steps",
    "read_setup",
    "shares_pages",
    "simulate",
    "simulate_fleet",
    "validate",
]
