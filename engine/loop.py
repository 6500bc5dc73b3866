"""The loop of the manager's thread: take what clients ask for, step, until told to end."""

from __future__ import annotations

from engine.core import EngineCore
from engine.intake import Intake, Stop
from engine.pause import PauseGate
from engine.requests import Request

HARD_STOP = "RuntimeError: the manager was stopped (hard_stop) before the request finished"
"""What requests end with that a hard stop does not let finish."""


def serve(core: EngineCore, intake: Intake, pauses: PauseGate) -> None:
    """Run until a stop has been asked for and met. What a step raises is raised here, with requests still live."""
    while _take_orders(core, intake, pauses):
        core.step()


def fail_everything(core: EngineCore, intake: Intake, reason: str) -> None:
    """End every request, those that were never taken as well."""
    for request in intake.take_requests():
        core.add(request)
    core.fail_all(reason)


def _take_orders(core: EngineCore, intake: Intake, pauses: PauseGate) -> bool:
    """Apply what clients asked for; wait if there is nothing to do. False ends the loop."""
    if not intake.has_news and not pauses.called and core.has_work:
        return True  # the usual case, without a lock
    if pauses.called:
        core.drain()
        core.runner.synchronize()
        if pauses.park(lambda: intake.stop is Stop.HARD):
            core.forget_prefixes()
    orders, stop = intake.take(lambda: pauses.called or core.has_work)
    for order in orders:
        if isinstance(order, Request):
            core.add(order)
        else:
            core.cancel(order)
    if stop is Stop.HARD:
        fail_everything(core, intake, HARD_STOP)
        return False
    return core.has_work or stop is Stop.NO or pauses.called
