"""Between a backend and the recorder where requests wait for each other: sees ends, keeps answers that are sent on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.record import Outcome
from harness.recorder import Recorder
from workloads.workload import ScheduledRequest, Workload


class SessionSink:
    """A :class:`harness.backends.base.TokenSink` that hands everything on to the recorder first."""

    def __init__(self, recorder: Recorder, workload: Workload, on_end: Callable[[str, Outcome, int], None]) -> None:
        """``on_end`` is called with the request, how it ended and when, after the recorder knows."""
        self._recorder = recorder
        self._ended = on_end
        self._planned = {r.request_id: r for r in workload.requests}
        # Only these are kept; None = some of its ids cannot be seen.
        self._answers: dict[str, list[int] | None] = {str(r.follows): [] for r in workload.requests if r.takes_answer}
        self._sent: dict[str, tuple[int, ...]] = {}
        self.unseen_answers = 0
        """Prompts sent with planned ids in place of an answer, because the backend does not show its ids."""

    def as_sent(self, request: ScheduledRequest) -> ScheduledRequest:
        """``request`` with the answer that its prompt holds, if it holds one; to be called once, when it is sent."""
        if request.takes_answer:
            before = self._planned[str(request.follows)]
            sent, answer = self._sent.pop(before.request_id), self._answers.pop(before.request_id)
            if answer is None:
                self.unseen_answers += 1
                start = len(before.prompt_ids)
                answer = list(request.prompt_ids[start : start + before.max_new_tokens])
            request = request.answering(before, sent, tuple(answer))
        if request.request_id in self._answers:
            self._sent[request.request_id] = request.prompt_ids
        return request

    def on_admit(self, request_id: str, time_ns: int) -> None:
        self._recorder.on_admit(request_id, time_ns)

    def on_tokens(self, request_id: str, token_ids: Sequence[int], time_ns: int) -> None:
        self._recorder.on_tokens(request_id, token_ids, time_ns)
        answer = self._answers.get(request_id)
        if answer is not None:
            answer.extend(token_ids)

    def on_hidden_tokens(self, request_id: str, count: int | None, time_ns: int) -> None:
        self._recorder.on_hidden_tokens(request_id, count, time_ns)
        if request_id in self._answers:
            self._answers[request_id] = None

    def on_end(
        self, request_id: str, outcome: Outcome, time_ns: int, error: str | None = None, **facts: int | str | None
    ) -> None:
        self._recorder.on_end(request_id, outcome, time_ns, error, **facts)
        # Asked for, because the recorder does not take an end without tokens for an answer.
        self._ended(request_id, self._recorder.outcome(request_id), time_ns)
