"""The thread that runs the loop: start, stop, pause, and what is known of it."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine import garbage
from engine.admission import Admission
from engine.attention import attention_setting
from engine.client import EngineClient
from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.core import EngineCore
from engine.culprits import cause_of
from engine.intake import Intake, Stop
from engine.loop import HARD_STOP, fail_everything, serve
from engine.model_shape import ModelShape
from engine.models import why_not_fused
from engine.pause import PauseGate
from engine.requests import GenerationOutput
from engine.resolution import ResolvedConfig, resolve
from engine.sampling.generation import generation_defaults
from engine.stats import EngineStats, StepRecord

logger = logging.getLogger(__name__)


class ContinuousBatchingManager(EngineClient):
    """Serves requests on one model from a background thread; what clients do with it is in `EngineClient`.

    Requests may be added before `start`; they are served once it runs. Every request ends in exactly one terminal
    output, also when it is cancelled, when the manager is stopped, and when the loop fails.

    Args:
        model: a transformers causal LM on one device. It is left exactly as it is.
        generation_config: defaults of requests (transformers' GenerationConfig), copied; None = the model's own.
        continuous_batching_config: ours or transformers' ContinuousBatchingConfig; copied.
        workload_hints: what is known of the requests to come.

    Raises:
        ValueError: a model that cannot be served or settings that cannot be met; before anything is allocated.
    """

    def __init__(
        self,
        model: Any,
        generation_config: Any = None,
        continuous_batching_config: ContinuousBatchingConfig | Any | None = None,
        workload_hints: WorkloadHints | Any | None = None,
    ) -> None:
        self.shape = ModelShape.of(model)
        self.config = config = ContinuousBatchingConfig.adopt(continuous_batching_config)
        hints = WorkloadHints.adopt(workload_hints)
        base = getattr(model, "generation_config", None) if generation_config is None else generation_config
        self.generation_config = generation_defaults(base, {})
        self.resolved_config: ResolvedConfig = resolve(
            config,
            self.shape,
            hints,
            attention_setting(model),
            compile_fallback=getattr(self.generation_config, "compile_config", None),
        )
        for level, sentence in self.resolved_config.notes:
            logger.log(level, sentence)
        self._ledger = self.resolved_config.ledger
        self.model = model
        self.stats = EngineStats()
        seed = secrets.randbits(31) if config.seed is None else config.seed
        super().__init__(
            Admission(self.shape, self.resolved_config, self.generation_config, seed),
            Intake(config.max_queue_size),
            self.resolved_config.allow_block_sharing,
        )
        self._core: EngineCore | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._destroyed = False
        self._ended = False  # the loop has run and delivers nothing more
        self._lifecycle = threading.RLock()  # start, stop and destroy, one at a time
        self._pauses = PauseGate(self._intake.changed)

    # --- life cycle -------------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """One at a time. A thread that holds a `pause` does not wait for its turn: whoever has it may be waiting for
        the loop, and so for the pause."""
        if not self._lifecycle.acquire(blocking=not self._pauses.held_here):
            raise RuntimeError(f"{what}() inside a pause would wait for itself; leave the pause first")
        try:
            yield
        finally:
            self._lifecycle.release()

    def has_settings(self, generation_config: Any, continuous_batching_config: Any) -> bool:
        """Whether this manager can stand for one made with these settings (None: any will do)."""
        return (
            not self._destroyed
            and (generation_config is None or generation_defaults(generation_config, {}) == self.generation_config)
            and (
                continuous_batching_config is None
                or ContinuousBatchingConfig.adopt(continuous_batching_config) == self.config
            )
        )

    @property
    def warmed_up(self) -> bool:
        return self._core is not None

    def warmup(self) -> None:
        """Allocate the cache and capture graphs, so that the first request finds everything ready.

        On a GPU `ledger` then holds what was measured, for which torch's peak statistics are reset.
        """
        self._refuse_if_destroyed()
        with self._alone("warmup"):
            if self._core is not None:
                return
            core = EngineCore(self.model, self.shape, self.resolved_config, self.stats, self._deliver)
            try:
                core.warm_up()
            except BaseException:
                core.close()
                raise
            self._core = core
            if core.runner.footprint is not None:
                self._ledger = self.resolved_config.ledger.with_measured(core.runner.footprint)

    def _release_core(self) -> None:
        if self._core is not None:
            self._core.close()
            self._core = None

    def is_running(self) -> bool:
        """Whether the loop's thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def fatal_error(self) -> BaseException | None:
        """What ended the loop, if an exception did."""
        return self._failure

    def start(self) -> None:
        """Start the loop; again after a stop or a failure, whose end it waits for. A running manager is left alone,
        with a warning.

        Raises:
            RuntimeError: the manager was destroyed, its model has since been changed in a way that the fused forward
                pass would not see, or the calling thread holds a `pause` of a loop that is to end.
        """
        with self._alone("start"):
            self._refuse_if_destroyed()
            if self._thread is not None and (self._intake.stop is not Stop.NO or self._failure is not None):
                if self._pauses.held_here:
                    raise RuntimeError("start() inside a pause would wait for itself; leave the pause first")
                self._thread.join()  # a loop that is on its way out still counts as running
            if self.is_running():
                logger.warning("start() on a manager that is already running has no effect")
                return
            self._follow_the_model()
            self.warmup()
            self._failure, self._ended = None, False
            self._intake.open()
            self._thread = threading.Thread(
                target=self._run, args=(self._core,), name="continuous-batching", daemon=True
            )
            self._thread.start()

    def _follow_the_model(self) -> None:
        """Between two sessions a model may have been trained, loaded anew or patched: keep nothing of the old one."""
        obstacle = why_not_fused(self.model) if self.resolved_config.use_fused_forward else None
        if obstacle is not None:
            raise RuntimeError(f"the model has changed since the manager was made ({obstacle}); make a new manager")
        if self._core is None:
            return
        if self._core.runner.replaced_parameters():
            self._release_core()
        else:
            self._core.forget_prefixes()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        hard_stop: bool = False,
        keep_for_next_session: bool = False,
    ) -> None:
        """End the loop. New requests are refused from now on; results stay obtainable.

        Args:
            block: wait for the thread to end.
            timeout: at most this many seconds; None = as long as it takes.
            hard_stop: fail queued and running requests now instead of finishing them; they keep their tokens.
            keep_for_next_session: keep the cache and the graphs for the next `start`.

        Raises:
            RuntimeError: the calling thread holds a `pause`, so the loop could not end.
        """
        if self._pauses.held_here:
            raise RuntimeError("stop() inside a pause would wait for itself; leave the pause first")
        urgency = Stop.HARD if hard_stop else Stop.FLUSH
        self._intake.close(urgency)  # now: another stop may be waiting for a loop that this one is to hurry
        with self._alone("stop"):
            self._intake.close(urgency)  # again: a start that was under way has opened it meanwhile
            if block and self._thread is not None:
                self._thread.join(timeout)
                if self._thread.is_alive():
                    logger.warning("the loop did not end within %s s; it ends once its requests are done", timeout)
                    return
                self._thread = None
                if not keep_for_next_session:
                    self._release_core()
            if hard_stop and self._thread is None:
                unserved = self._intake.end_unserved(HARD_STOP)
                self._deliver([GenerationOutput(request) for request in unserved], unserved)

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Wait for a stopping loop's thread to end, at most ``timeout`` seconds (None = as long as it takes).
        ``stop_trigger_time`` is taken for the sake of code written for transformers."""
        if self._thread is not None:
            self._thread.join(timeout)

    def destroy(self) -> None:
        """Stop if running, release everything, for good. Harmless when repeated.

        Raises:
            RuntimeError: the calling thread holds a `pause`, so the loop could not end.
        """
        with self._alone("destroy"):
            if self._destroyed:
                return
            self.stop(hard_stop=True)
            self._release_core()
            self._destroyed = True
        if self.shape.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def pause(self, weights_changed: bool = True) -> Iterator[None]:
        """Hold the loop between two steps, for instance to write new weights into the model.

        The context is entered once every launched step is collected and the device is idle; requests may still be
        added and cancelled, and are served when the last thread leaves its pause. No request is lost. Requests that
        run meanwhile go on with the keys and values they have, of the old weights, and new ones of the new weights:
        such a mixture is not what either model would say alone; cancel them if that matters. What waits on the host
        after an offload is computed again.

        Args:
            weights_changed: forget every cached prefix on leaving, since it holds keys of the old weights. False only
                if the model was merely read.

        Raises:
            RuntimeError: the loop does not run, or ended before it could pause; on leaving: a parameter that captured
                or fused steps read by address was replaced instead of being written to in place.
        """
        if not self.is_running():
            raise RuntimeError("the loop does not run: there is nothing to pause; call start() first")
        if not self._pauses.enter(lambda: self._ended):
            raise RuntimeError("the loop ended before it could pause") from self._failure
        try:
            yield
            if weights_changed and self._pauses.parked and self._core is not None:
                self._core.runner.refuse_replaced_parameters()
        finally:
            self._pauses.leave(weights_changed)

    # --- what happened ----------------------------------------------------------------------------------------------

    @property
    def step_log(self) -> list[StepRecord]:
        """One record a forward pass, the last million."""
        return list(self.stats.log)

    def counters(self) -> dict[str, int | float | None]:
        """Counts since the start or the last `reset_counters`."""
        return self.stats.counters()

    def measured_settings(self) -> list[tuple[str, Any, str]]:
        """(name, value, source) of what was decided by timing at warm-up, in the form of ``resolved_config.rows()``."""
        return [] if self._core is None else self._core.runner.measured_settings()

    def reset_counters(self) -> None:
        """Count anew, for instance after a warm-up."""
        self.stats.reset()

    def ledger(self) -> dict[str, int]:
        """Use of memory in bytes by name: as planned before the warm-up; after one on a GPU, as it was measured."""
        return self._ledger.as_dict()

    def ledger_sources(self) -> dict[str, str]:
        """By line of `ledger`: "exact", "estimated" or "measured"."""
        return self._ledger.sources()

    # --- the loop's side --------------------------------------------------------------------------------------------

    def _run(self, core: EngineCore) -> None:
        garbage.set_aside()
        try:
            serve(core, self._intake, self._pauses)
        except BaseException as error:  # SystemExit from a hook as well: whatever ends the loop ends its requests
            logger.exception("the loop ends: all live requests fail")
            self._failure = error
            fail_everything(core, self._intake, cause_of(error))
            self._release_core()  # whatever state the exception left behind is not used again
        finally:
            garbage.give_back()
            with self._intake.changed:
                self._ended = True
                self._intake.changed.notify_all()
            self._router.wake()

    # --- checks -----------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        """Whether no output will come any more: the loop was started and has ended, or cannot be started."""
        return self._destroyed or self._ended or (self._intake.stop is not Stop.NO and self._thread is None)

    def _refuse_if_failed(self) -> None:
        self._refuse_if_destroyed()
        if self._failure is not None:
            error = self._failure
            raise RuntimeError(
                f"the loop ended with {type(error).__name__}: {error}; call start() to begin anew"
            ) from error

    def _refuse_if_destroyed(self) -> None:
        if self._destroyed:
            raise RuntimeError("the manager was destroyed; make a new one")
