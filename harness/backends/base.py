"""The contract between the driver and whatever is being measured.

The driver calls :meth:`Backend.submit` from its sender thread at each due time; the backend reports tokens and ends
through the :class:`TokenSink` it was started with, from any thread, stamped with ``time.perf_counter_ns`` at the moment
the consumer could use them. Every submitted request ends with exactly one ``on_end``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from harness.record import ConfigValue, Outcome
from workloads.workload import ScheduledRequest


class TokenSink(Protocol):
    """Where a backend reports what happened. All methods are thread-safe and cheap (no computation, no I/O)."""

    def on_admit(self, request_id: str, time_ns: int) -> None: ...

    def on_tokens(self, request_id: str, token_ids: Sequence[int], time_ns: int) -> None:
        """Tokens that became usable at one moment; an empty delivery is ignored."""

    def on_hidden_tokens(self, request_id: str, count: int | None, time_ns: int) -> None:
        """As ``on_tokens`` where the ids cannot be seen; ``count`` None = it is not known how many there were."""

    def on_end(
        self, request_id: str, outcome: Outcome, time_ns: int, error: str | None = None, **facts: int | str | None
    ) -> None:
        """``facts`` are RequestRecord fields: cached_tokens, recomputed_tokens, padding_prompt_tokens …"""


class Backend(Protocol):
    """One engine under measurement. Built with a loaded model and its own config; used in one process, for its runs."""

    name: str

    def warm_up(self, requests: Sequence[ScheduledRequest]) -> None:
        """Compile, capture graphs and run ``requests`` (never measured prompts) to the end."""

    def prepare(self, requests: Sequence[ScheduledRequest]) -> None:
        """Do beforehand, after the warm-up, what ``requests`` need that the engine is not to be measured by."""

    def start(self, sink: TokenSink) -> None:
        """Reset counters and begin to accept requests; from here on ends and tokens go to ``sink``.

        May be called again once every request of the run before has ended: the engine then serves another run.
        """

    def submit(self, request: ScheduledRequest) -> None:
        """Hand over one request and return at once. A refusal is reported as an ``on_end`` with REJECTED."""

    def close_input(self) -> None:
        """No more requests will come (lets a wave-forming backend run its last, smaller wave)."""

    def stop(self) -> None:
        """End everything and release the model; requests still open end as UNFINISHED."""

    def config(self) -> list[ConfigValue]:
        """Resolved settings with their sources, read back from the engine."""

    def steps(self) -> list[dict[str, Any]]:
        """Step log since ``start`` (columns of the ``steps`` table, times as ``t_ns``); [] if there is none."""

    def counters(self) -> dict[str, float | int | None]:
        """Counts since ``start``, named as in the ``runs`` table; what the engine hides is absent."""

    def memory(self) -> dict[str, int | None]:
        """Ledger lines in bytes by name; {} if there are none."""
