"""The clients' side of a simulation: the harness's own agenda of who sends what when, before simulated replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.agenda import Agenda
from harness.simulate.replica import Replica
from workloads.workload import ScheduledRequest, Workload

FOREVER = float("inf")

Choose = Callable[[ScheduledRequest, Sequence[Replica]], int]


@dataclass
class Sent:
    """What the clients did, by number of the request.

    Attributes:
        due_ns: when it fell due (of a request that waits for another's end, some time after that).
        prompt_tokens: length of the prompt that was sent.
        given_up: why it was not sent: its session had ended before.
    """

    due_ns: dict[int, int] = field(default_factory=dict)
    prompt_tokens: dict[int, int] = field(default_factory=dict)
    given_up: dict[int, str] = field(default_factory=dict)


def serve(
    workload: Workload,
    replicas: Sequence[Replica],
    choose: Choose,
    output_tokens: Mapping[str, int],
    send_s: float = 0.0,
) -> Sent:
    """Send every request when it falls due, each to the replica chosen for it, and run until all have ended.

    Args:
        output_tokens: by request id, tokens until its end where that is not its cap.
        send_s: what sending takes: nobody is sent sooner than so long after the one before.
    """
    agenda, sent = Agenda(workload), Sent()
    numbers = {r.request_id: k for k, r in enumerate(workload.requests)}
    waits = workload.waits
    prompts = _Prompts(workload, output_tokens)
    known, sent_s = [0] * len(replicas), -FOREVER

    def tell_ends() -> bool:
        """Tell the agenda of requests that have ended; whether there were any."""
        news = False
        for i, replica in enumerate(replicas):
            for number in replica.ended[known[i] :]:
                news, served = True, replica.served[number]
                name, at = served.request.request_id, served.ended_s or 0.0
                for given_up in agenda.ended(name, served.outcome.ok, round(at * 1e9)):
                    sent.given_up[numbers[given_up]] = f"not sent: {name}, before it in its session, ended otherwise"
            known[i] = len(replica.ended)
        return news

    while not agenda.exhausted:
        due_ns = agenda.next_due_ns()
        until = FOREVER if due_ns is None else due_ns / 1e9
        if not waits:
            for replica in replicas:
                replica.advance(until)
        elif tell_ends() or _one_turn(replicas, until):
            continue  # somebody may fall due earlier now
        at_ns, wanted = agenda.take()
        wanted = prompts.as_sent(wanted)
        number = numbers[wanted.request_id]
        sent.due_ns[number], sent.prompt_tokens[number] = at_ns, len(wanted.prompt_ids)
        sent_s = max(at_ns / 1e9, sent_s + send_s)
        replicas[choose(wanted, replicas)].send(number, wanted, sent_s, output_tokens.get(wanted.request_id))
    for replica in replicas:
        replica.advance(FOREVER)
    return sent


def _one_turn(replicas: Sequence[Replica], until_s: float) -> bool:
    """A turn of the replica that is furthest behind; False if none has work before ``until_s``."""
    busy = [r for r in replicas if r.has_work and r.begins_s < until_s]
    if not busy:
        return False
    min(busy, key=lambda r: r.begins_s).turn(until_s)
    return True


class _Prompts:
    """Prompts as they are sent: with the answers of the turns before where a session takes them in."""

    def __init__(self, workload: Workload, output_tokens: Mapping[str, int]) -> None:
        followed = {r.follows for r in workload.requests if r.takes_answer}
        self._planned = {r.request_id: r for r in workload.requests if r.request_id in followed}
        self._sent: dict[str, tuple[int, ...]] = {}
        self._output_tokens = output_tokens

    def as_sent(self, request: ScheduledRequest) -> ScheduledRequest:
        """The request with the prompt that its client sends now."""
        if request.takes_answer:
            before = self._planned[str(request.follows)]
            tokens = self._output_tokens.get(before.request_id, before.max_new_tokens)
            # Simulated tokens have the id 0: the pages that the cache keeps of them are found again.
            request = request.answering(before, self._sent[before.request_id], (0,) * tokens)
        if request.request_id in self._planned:
            self._sent[request.request_id] = request.prompt_ids
        return request
