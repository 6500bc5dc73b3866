"""A backend on any engine with the API of transformers' ContinuousBatchingManager.

Requests are added with ``streaming=True``; one consumer thread takes every output and stamps it at that moment, so the
time of a token is when a client could have used it.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.backends.base import TokenSink
from harness.backends.failures import classify_failure
from harness.errors import one_line
from harness.record import ConfigValue, Outcome
from workloads.workload import ScheduledRequest

POLL_S = 0.05
"""How long the consumer waits for an output before it looks whether the engine still lives."""


@dataclass(slots=True)
class _Open:
    """A request that has not ended: tokens passed on so far, and whether its admission has been reported."""

    max_new_tokens: int
    tokens: int = 0
    admitted: bool = False


class ManagerBackend(ABC):
    """Drives a continuous-batching manager; subclasses say how it is made and read.

    Args:
        model: loaded transformers causal LM.
        manager: the engine's manager, not started.
        eos_ids: ids that end a request; empty = none does.
    """

    name: str
    needs_weights = True
    queue_full: type[Exception] = queue.Full  # what add_request raises when too many requests wait

    def __init__(self, model: Any, manager: Any, eos_ids: frozenset[int]) -> None:
        self._model = model
        self._manager = manager
        self._eos_ids = eos_ids
        self._sink: TokenSink | None = None
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._consumer: threading.Thread | None = None

    # -- what differs between engines ----------------------------------------------------------------------------

    @abstractmethod
    def config(self) -> list[ConfigValue]: ...

    @abstractmethod
    def steps(self) -> list[dict[str, Any]]: ...

    @abstractmethod
    def counters(self) -> dict[str, float | int | None]: ...

    @abstractmethod
    def memory(self) -> dict[str, int | None]: ...

    @abstractmethod
    def _cause_of_death(self) -> str | None:
        """Why the engine's loop ended by itself; None if it does not say."""

    def _prepare(self) -> None:  # noqa: B027 - an engine may have nothing to prepare
        """Compile and capture before the engine's loop runs."""

    @abstractmethod
    def _mark_start(self) -> None:
        """From here on count steps and events; what the warm-up did is not part of the run."""

    def _new_tokens(self, output: Any, seen: int) -> list[int]:
        """Tokens of an output beyond the first ``seen``."""
        tokens: list[int] = output.generated_tokens[seen:]
        return tokens

    def _facts(self, output: Any) -> dict[str, int | str | None]:
        """What a terminal output tells beyond its tokens: fields of RequestRecord."""
        names = ("cached_tokens", "recomputed_tokens")
        return {name: value for name in names if (value := getattr(output, name, None)) is not None}

    # -- Backend -------------------------------------------------------------------------------------------------

    def warm_up(self, requests: Sequence[ScheduledRequest]) -> None:
        """Capture, start the engine's loop, and run ``requests`` to their end.

        Raises:
            RuntimeError: one of them did not end ok; nothing could be measured then.
        """
        self._run_engine()
        outcomes = _Outcomes(len(requests))
        self._sink = outcomes
        for request in requests:
            self.submit(request)
        outcomes.done.wait()
        self._sink = None
        if outcomes.failures:
            raise RuntimeError(f"warm-up failed: {outcomes.failures[0]}")

    def prepare(self, requests: Sequence[ScheduledRequest]) -> None:  # noqa: B027
        """Nothing to do: the engine takes requests as they are."""

    def start(self, sink: TokenSink) -> None:
        self._run_engine()
        self._mark_start()
        self._sink = sink

    def submit(self, request: ScheduledRequest) -> None:
        request_id = request.request_id
        # Known before the engine hears of it: its first output may come before add_request returns.
        with self._lock:
            self._open[request_id] = _Open(request.max_new_tokens)
        try:
            accepted = self._manager.add_request(
                list(request.prompt_ids),
                request_id=request_id,
                max_new_tokens=request.max_new_tokens,
                streaming=True,
            )
        except ValueError as error:
            self._end(request_id, Outcome.REJECTED, one_line(error))
        except self.queue_full:
            self._end(request_id, Outcome.REJECTED, "the engine's queue is full (max_queue_size)")
        except Exception as error:  # the engine's own trouble: this request fails, the run goes on
            self._end(request_id, None, one_line(error))
        else:
            if accepted is None:
                self._end(request_id, None, self._death_message())

    def close_input(self) -> None:  # noqa: B027
        """Nothing to do: a continuous engine does not wait for more requests."""

    def stop(self) -> None:
        """Stop the engine hard; requests still open end as UNFINISHED. Safe to call again."""
        if self._manager is None:
            return
        self._stopping = True
        if self._consumer is not None:
            self._manager.stop(block=True, hard_stop=True)
            self._consumer.join()
            self._consumer = None
        for request_id in self._open_ids():
            self._end(request_id, Outcome.UNFINISHED, None)
        self._manager.destroy()
        self._manager = self._model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # -- the engine's loop and the consumer ----------------------------------------------------------------------

    def _run_engine(self) -> None:
        if self._consumer is not None:
            return
        # Inference mode is a thread's own: managers run their loop in the mode of the thread that starts them.
        with torch.inference_mode():
            self._prepare()
            self._manager.start()
        self._consumer = threading.Thread(target=self._consume, name=f"{self.name}-consumer", daemon=True)
        self._consumer.start()

    def _consume(self) -> None:
        while True:
            output = self._manager.get_result(timeout=POLL_S)
            if output is not None:
                self._deliver(output, time.perf_counter_ns())
                continue
            if self._stopping:
                return
            if not self._manager.is_running():
                # An output may have come between the empty look and the end of the loop.
                while (output := self._manager.get_result(timeout=0)) is not None:
                    self._deliver(output, time.perf_counter_ns())
                message = self._death_message()
                for request_id in self._open_ids():
                    self._end(request_id, None, message)
                time.sleep(POLL_S)  # a dead manager answers at once; requests still to come are refused in submit

    def _deliver(self, output: Any, time_ns: int) -> None:
        request_id = output.request_id
        with self._lock:
            state = self._open.get(request_id)
        sink = self._sink
        if state is None or sink is None:
            return
        if not state.admitted and output.lifespan[0] > 0:
            state.admitted = True
            sink.on_admit(request_id, round(output.lifespan[0] * 1e9))
        new = self._new_tokens(output, state.tokens)
        if new:
            state.tokens += len(new)
            sink.on_tokens(request_id, new, time_ns)
        if output.is_finished():
            last = new[-1] if new else None
            self._end(request_id, self._outcome(output, state, last), output.error, time_ns, output)

    def _outcome(self, output: Any, state: _Open, last: int | None) -> Outcome | None:
        """The end of a finished output; None = to be told from its error text."""
        if "cancel" in getattr(output.status, "name", str(output.status)).lower():
            return Outcome.UNFINISHED if self._stopping else Outcome.CANCELLED
        if output.error is not None or getattr(output.status, "name", "").upper() == "FAILED":
            return Outcome.UNFINISHED if self._stopping else None
        if state.tokens == 0:
            return Outcome.EMPTY
        reason = getattr(output, "finish_reason", None)
        if reason == "stop" or (last is not None and last in self._eos_ids):
            return Outcome.OK_EOS
        if state.tokens >= state.max_new_tokens:
            return Outcome.OK_LENGTH
        return Outcome.STREAM_TRUNCATED

    def _end(
        self,
        request_id: str,
        outcome: Outcome | None,
        error: str | None,
        time_ns: int | None = None,
        output: Any = None,
    ) -> None:
        """Report the one end of a request; later ones (a race with the engine's death) are ignored."""
        with self._lock:
            state = self._open.pop(request_id, None)
        if state is None or self._sink is None:
            return
        if outcome is None:
            outcome = classify_failure(error, "decode" if state.tokens else "prefill")
            error = error or "the engine gave no reason"
        facts = {} if output is None else self._facts(output)
        self._sink.on_end(request_id, outcome, time.perf_counter_ns() if time_ns is None else time_ns, error, **facts)

    def _open_ids(self) -> list[str]:
        with self._lock:
            return list(self._open)

    def _death_message(self) -> str:
        return f"the engine's loop ended: {self._cause_of_death() or 'it gave no reason'}"


class _Outcomes:
    """Sink of the warm-up: counts ends and keeps what went wrong."""

    def __init__(self, n: int) -> None:
        self._left = n
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.failures: list[str] = []
        if n == 0:
            self.done.set()

    def on_admit(self, request_id: str, time_ns: int) -> None: ...

    def on_tokens(self, request_id: str, token_ids: Sequence[int], time_ns: int) -> None: ...

    def on_hidden_tokens(self, request_id: str, count: int | None, time_ns: int) -> None: ...

    def on_end(
        self, request_id: str, outcome: Outcome, time_ns: int, error: str | None = None, **facts: int | str | None
    ) -> None:
        with self._lock:
            if not outcome.ok:
                self.failures.append(f"{request_id} ended {outcome.value}: {error}")
            self._left -= 1
            if self._left == 0:
                self.done.set()
