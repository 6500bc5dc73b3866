"""What client threads do with an engine: ask for requests, cancel them, take what comes."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from engine.admission import Admission, prefix_order
from engine.intake import QUEUE_PATIENCE_S, Intake
from engine.output_router import OutputRouter
from engine.requests import GenerationOutput, Request
from engine.step_outputs import Outputs

logger = logging.getLogger(__name__)


class EngineClient(ABC):
    """The client's side of a manager; its methods may be called from any thread. When the loop runs, and how it ended,
    is the subclass's matter.

    Args:
        admission: what a request must be.
        intake: where the loop finds it.
        shares_prefixes: whether requests with a common beginning gain from standing beside each other.
    """

    def __init__(self, admission: Admission, intake: Intake, shares_prefixes: bool) -> None:
        self._admission, self._intake, self._shares_prefixes = admission, intake, shares_prefixes
        self._router = OutputRouter()

    @abstractmethod
    def _is_over(self) -> bool:
        """Whether no output will come any more."""

    @abstractmethod
    def _refuse_if_failed(self) -> None:
        """Raise RuntimeError if requests can no longer be taken because the loop has failed or is gone for good."""

    # --- requests ---------------------------------------------------------------------------------------------------

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Iterable[int] | None = None,
        num_return_sequences: int | None = None,
        queue_timeout: float | None = QUEUE_PATIENCE_S,
        **sampling: Any,
    ) -> str | None:
        """Queue one request.

        Args:
            input_ids: token ids of the prompt.
            request_id: any string not in use by a live request; generated if None.
            max_new_tokens: cap on generated tokens; None = the GenerationConfig's.
            streaming: deliver an output after every token.
            record_timestamps: note when each token reached the host.
            eos_token_id: id or ids that end it; None = the GenerationConfig's, -1 = none.
            num_return_sequences: generate so many sequences of the prompt (at most 16,384), each a request of its
                own with its own outputs: this one and its children ``<id>__child#0`` …; None = the GenerationConfig's.
            queue_timeout: seconds to wait for room while ``max_queue_size`` requests wait; None = as long as it takes.
            sampling: fields of `engine.sampling.SamplingParams` for this request. What changes logits (temperature,
                filters, penalties, bias) needs ``per_request_processors``; seed, stop_sequences, top_logprobs and
                logprobs_mode do not.

        Returns:
            Its id, or None with a warning if the manager has been stopped.

        Raises:
            ValueError: the request can never be run, or its id is in use.
            QueueFull: ``max_queue_size`` requests already wait and too few left the queue in time.
            RuntimeError: the loop has failed; the message says why.
        """
        self._refuse_if_failed()
        if not self._intake.accepting:
            logger.warning("the manager has been stopped: the request is refused; call start() first")
            return None
        number = self._intake.number()
        request = self._admission.admit(
            self._intake.free_id(number) if request_id is None else request_id,
            number,
            input_ids,
            max_new_tokens,
            streaming,
            record_timestamps,
            eos_token_id,
            sampling,
            num_return_sequences,
        )
        if not self._intake.submit(request, number if request_id is None else None, queue_timeout):
            self._refuse_if_failed()
            logger.warning("the manager has been stopped: request %r is refused", request.request_id)
            return None
        return request.request_id

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **sampling: Any,
    ) -> list[str]:
        """Queue several requests; arguments as in `add_request`. Where prefixes are shared they are queued in sorted
        order, so that neighbours have most in common.

        Returns:
            Their ids in the order of ``inputs``, without those of children; empty, with a warning, if the manager has
            been stopped.

        Raises:
            ValueError: naming the first request that can never be run; those queued before it stay.
        """
        order = list(range(len(inputs)))
        if self._shares_prefixes:
            order = prefix_order(inputs)
        ids: dict[int, str] = {}
        for i in order:
            request_id = self.add_request(
                inputs[i],
                max_new_tokens=max_new_tokens,
                streaming=streaming,
                record_timestamps=record_timestamps,
                **sampling,
            )
            if request_id is not None:
                ids[i] = request_id
        return [ids[i] for i in sorted(ids)]

    def cancel_request(self, request_id: str) -> None:
        """End a request wherever it is; it gets a terminal output with the tokens it has. Unknown or ended ids are
        ignored."""
        self._intake.cancel(request_id)

    # --- results ----------------------------------------------------------------------------------------------------

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next output.

        Args:
            request_id: only if the next output is this request's; otherwise None at once, and nothing is lost.
            timeout: seconds to wait; None = as long as the loop lives.
        """
        if request_id is None:
            return self._router.take(timeout, self._is_over)
        return self._router.take_head(request_id, timeout, self._is_over)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, until every request submitted so far has had its last one. To wait for requests of
        other threads as well, loop over `get_result`."""
        while True:
            output = self._router.take(None, lambda: not self._intake.live or self._is_over())
            if output is None:
                return
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """One request's outputs as they come, up to its last one; others' stay where they are."""

        def is_gone() -> bool:
            return request_id not in self._intake.live or self._is_over()

        while True:
            output = self._router.take_of(request_id, None, is_gone)
            if output is None:
                return
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Call ``callback`` on the running asyncio loop with each of the request's outputs; it is dropped after the
        last one."""
        self._router.handle(request_id, callback)

    def discard_results(self) -> int:
        """Drop outputs that nobody took; returns how many."""
        return self._router.clear()

    # --- the loop's side --------------------------------------------------------------------------------------------

    def _deliver(self, outputs: Outputs, ended: Sequence[Request]) -> None:
        self._router.deliver(outputs)
        if ended:
            self._intake.ended([request.request_id for request in ended])
            self._router.wake()
