"""What is found out about a server, and what its requests look like then."""

from __future__ import annotations

import json

import pytest

from harness.backends import create
from harness.backends.generation import GenerationSettings
from workloads.workload import ScheduledRequest

PROMPT = (5, 6, 7, 8)
KNOWN = {"model", "prompt", "messages", "max_tokens", "stream", "temperature", "top_p", "seed"}


class Words:
    """A tokenizer of one id a word, with a beginning of its own."""

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(f"w{i}" for i in ids)

    def __call__(self, text):
        return {"input_ids": [0, *(int(w[1:]) for w in text.split() if w[1:].isdigit())]}


@pytest.fixture
def made(server, Answer, text):
    backends = []

    def make(settings=None, generation=None, tokenizer=None, warm=True):
        given = {"base_url": server.base_url} | (settings or {})
        backend = create("openai_http", None, given, generation, tokenizer)
        backends.append(backend)
        if warm:
            backend.warm_up(())
            server.requests.clear()
        return backend

    yield make
    for backend in backends:
        backend.stop()


def ask(backend, server, sink, cap=3):
    request = ScheduledRequest("r0", 0.0, PROMPT, cap)
    backend.prepare([request])
    backend.start(sink)
    backend.submit(request)
    sink.wait(1)
    return server.requests[-1]


def settled(backend):
    return {row.field: row.value for row in backend.config()}


def test_a_server_that_knows_everything(server, Answer, text, usage, made, sink):
    def answer(body):
        running = body.get("stream_options", {}).get("continuous_usage_stats")
        return Answer(
            [(0, text("a", token_ids=[k], **({"usage": usage(4, k)} if running else {}))) for k in (1, 2)]
            + [(0, text("", "length"))]
        )

    server.answer = answer
    backend = made()
    sent = ask(backend, server, sink)
    assert sent["prompt"] == list(PROMPT)
    assert sent["model"] == "fake"
    assert (sent["max_tokens"], sent["stream"], sent["temperature"]) == (3, True, 0)
    assert sent["ignore_eos"] is True
    assert sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert sink.seen["r0"].tokens == [1, 2]
    found = settled(backend)
    assert (found["prompts_in_use"], found["token_ids_returned"], found["usage_in_every_chunk"]) == ("ids", True, True)
    assert (found["server"], found["optional_fields_refused"]) == ("1.2", [])
    assert found["num_blocks"] is None  # the server's own: not visible
    sources = {row.field: row.source for row in backend.config()}
    assert sources["num_blocks"].startswith("hidden")
    assert sources["base_url"] == "user"


def test_a_strict_server_gets_only_what_it_knows(server, Answer, text, made, sink):
    """It refuses unknown fields, one of them usage's running form, and prompts of ids."""

    def answer(body):
        unknown = set(body) - KNOWN - {"stream_options"}
        running = "continuous_usage_stats" in body.get("stream_options", {})
        if unknown or running or isinstance(body["prompt"], list):
            return Answer(status=400, body=b'{"error": {"message": "unknown"}}', content_type="application/json")
        tail = [(0, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})]
        return Answer([(0, text("a")), (0, text("b", "length")), *(tail if "stream_options" in body else [])])

    server.answer = answer
    backend = made(tokenizer=Words())
    sent = ask(backend, server, sink)
    assert sent["prompt"] == "w5 w6 w7"  # with the beginning the tokenizer adds: four tokens
    assert sent["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in sent
    seen = sink.seen["r0"]
    assert (seen.facts["prompt_tokens"], seen.facts["output_tokens"]) == (5, 2)  # the server's count, not the plan
    found = settled(backend)
    assert (found["prompts_in_use"], found["prompt_tokens_counted_by"]) == ("text", "server")
    assert found["optional_fields_refused"] == ["ignore_eos", "return_token_ids"]


def test_ids_taken_for_text_are_noticed(server, Answer, text, usage, made, sink):
    """A server that reads the list of ids as its characters counts another number of tokens."""

    def answer(body):
        n = 19 if isinstance(body["prompt"], list) else 4
        return Answer([(0, text("a", "length", usage=usage(n, 1)))])

    server.answer = answer
    assert settled(made(tokenizer=Words()))["prompts_in_use"] == "text"
    assert settled(made())["prompts_in_use"] == "ids"  # nothing else can be sent: the server's count is recorded
    assert settled(made({"prompts": "ids"}, tokenizer=Words()))["prompts_in_use"] == "ids"


def test_chat_takes_text(server, Answer, made, sink):
    chunk = {"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]}
    server.answer = lambda body: Answer([(0, chunk)])
    backend = made({"endpoint": "chat", "server_model": "other"}, tokenizer=Words())
    sent = ask(backend, server, sink)
    assert sent["messages"] == [{"role": "user", "content": "w5 w6 w7"}]
    assert sent["model"] == "other"
    with pytest.raises(RuntimeError, match="need a tokenizer"):
        made({"endpoint": "chat"})


def test_several_models_must_be_chosen_from(server, made):
    server.models = ["a", "b"]
    with pytest.raises(RuntimeError, match=r"set engine\.server_model: .* lists a, b"):
        made()


def test_sampling_key_and_own_fields(server, made, sink, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "s3cret")
    backend = made(
        {"api_key_env": "SOME_KEY", "extra_body": {"priority": 3}},
        GenerationSettings(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, seed=3, ignore_eos=False),
    )
    sent = ask(backend, server, sink)
    assert {k: sent[k] for k in ("temperature", "top_p", "seed", "top_k", "priority")} == {
        "temperature": 0.7, "top_p": 0.9, "seed": 3, "top_k": 5, "priority": 3,
    }  # fmt: skip
    assert "ignore_eos" not in sent
    assert server.headers[-1]["authorization"].endswith("s3cret")
    assert "s3cret" not in json.dumps([row.value for row in backend.config()])


def test_a_server_that_refuses_everything_says_why(server, Answer, made):
    server.answer = lambda body: Answer(
        status=401, body=b'{"error": {"message": "no such key"}}', content_type="application/json"
    )
    with pytest.raises(RuntimeError, match=r"http_401.*no such key"):
        made(tokenizer=Words())


def test_a_failing_warm_up_request_fails_the_run(server, Answer, text, made):
    backend = made(warm=False)
    asked = []

    def answer(body):
        asked.append(body)
        return Answer([(0, text("a", "length"))]) if body["max_tokens"] == 4 else Answer([(0, text("a"))], end="drop")

    server.answer = answer
    with pytest.raises(RuntimeError, match=r"warm-up failed \(stream_truncated"):
        backend.warm_up([ScheduledRequest("w", 0.0, PROMPT, 9)])
    assert [b["max_tokens"] for b in asked] == [4, 9]


def test_requests_before_the_probe_are_refused(made):
    with pytest.raises(RuntimeError, match="warm_up comes before"):
        made(warm=False).prepare([ScheduledRequest("r", 0.0, PROMPT, 1)])
