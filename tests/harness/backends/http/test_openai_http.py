"""Against a real server on localhost with scripted schedules and faults; times are those of the server's own clock."""

from __future__ import annotations

import json
import socket

import pytest

from harness.backends import create
from harness.backends.generation import GenerationSettings
from harness.backends.http.settings import HttpSettings
from harness.backends.openai_http import OpenAiHttpBackend
from harness.clock import RealClock
from harness.driver import drive
from harness.metrics import compute_tables
from harness.record import Outcome, RunRecord
from harness.recorder import Recorder
from workloads.workload import ScheduledRequest, Workload

PROMPT = (5, 6, 7, 8)


@pytest.fixture
def measure(server, Answer, text):
    """Send one request a script (probe answered plainly) and return the tables and the backend."""
    backends = []

    def run(*answers, cap=64, settings=None, generation=None, probe=None, timeout_s=20.0):
        server.answer = probe or (lambda body: Answer([(0, text("x")), (0, text("y", "length"))]))
        server.in_step = True
        http = HttpSettings(server.base_url, **(settings or {}))
        backend = OpenAiHttpBackend(http, generation or GenerationSettings(), None, {}, server.clock)
        backends.append(backend)
        requests = tuple(ScheduledRequest(f"r{k}", 0.0, PROMPT, cap) for k in range(len(answers)))
        workload = Workload("scripted", requests, concurrency=1)  # one at a time: the server has one clock
        backend.warm_up(())
        backend.prepare(requests)
        left = list(answers)
        server.requests.clear()
        server.answer = lambda body: left.pop(0)
        recorder = Recorder(workload)
        drive(workload, backend, recorder, RealClock(), timeout_s)
        backend.stop()
        recorder.check()
        records = recorder.records()
        for r in records:
            r.t_sched_ns = r.t_submit_ns = 0  # sent when the server's clock stood at 0
        record = RunRecord({"run_id": "r", "engine": "openai_http"}, records, t_start_ns=0, t_end_ns=1_000_000_000)
        return compute_tables(record), backend

    yield run
    for backend in backends:
        backend.stop()


def only(tables, name="requests"):
    (row,) = tables[name].to_dict("records")
    return row


def test_b07_the_role_chunk_is_no_token(measure, Answer):
    """Role at 10 ms, tokens at 100, 150, 260: TTFT 100, gaps 50 and 110, TPOT 80."""

    def chunk(delta, finish=None):
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    tables, _ = measure(
        Answer(
            [
                (10, chunk({"role": "assistant", "content": ""})),
                (100, chunk({"content": "a"})),
                (150, chunk({"content": "b"})),
                (260, chunk({"content": "c"})),
                (261, chunk({}, "stop")),
                (262, {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}),
            ]
        )
    )
    row = only(tables)
    assert (row["outcome"], row["ttft_ms"], row["tpot_ms"], row["output_tokens"]) == ("ok_eos", 100, 80, 3)
    assert tables["itl"]["itl_ms"].tolist() == [50, 110]
    assert tables["itl"]["icl_ms"].tolist() == [50, 110]


def test_b07_one_token_has_no_gap(measure, Answer, text, usage):
    tables, _ = measure(Answer([(100, text("a", "length")), (101, {"choices": [], "usage": usage(4, 1)})]))
    assert only(tables)["ttft_ms"] == 100
    assert tables["requests"]["tpot_ms"].isna().all()
    assert tables["itl"].empty


def test_b15_the_servers_count_and_not_the_cap(measure, Answer, text, usage):
    """Text at 0.1, 0.2, 0.3 s with max_tokens 64: 3 tokens, TPOT 0.1 s, 3 a second; without usage unknown."""
    words = [(100, text("a")), (200, text("b")), (300, text("c"))]
    with_empty = Answer([*words, (310, text("", "stop", usage=usage(4, 3)))])
    without_choices = Answer([*words, (305, text("", "stop")), (310, {"choices": [], "usage": usage(4, 3)})])
    for answer in (with_empty, without_choices):
        tables, _ = measure(answer)
        row = only(tables)
        assert (row["output_tokens"], row["max_new_tokens"], row["output_counted_by"]) == (3, 64, "total")
        assert row["tpot_ms"] == pytest.approx(100)
        assert only(tables, "runs")["gen_tok_s"] == 3  # over the stated wall time of 1 s
    tables, _ = measure(Answer([*words, (305, text("", "stop"))]))
    row, run = only(tables), only(tables, "runs")
    assert (row["outcome"], row["output_counted_by"], run["n_uncounted"]) == ("ok_eos", "nothing", 1)
    assert tables["requests"]["output_tokens"].isna().all()
    assert tables["runs"]["gen_tok_s"].isna().all()
    assert tables["itl"]["icl_ms"].tolist() == [100, 100]  # what was measured stays


def test_b11_the_servers_prompt_count_is_recorded_beside_the_plan(measure, Answer, text, usage):
    """A server that puts two tokens before the four that were sent: six were computed, four were meant."""
    tables, _ = measure(Answer([(100, text("a", "length", usage=usage(6, 1)))]))
    row = only(tables)
    assert (row["planned_prompt_tokens"], row["prompt_tokens"]) == (4, 6)
    assert only(tables, "runs")["prompt_tokens"] == 6


def test_b16_text_that_is_held_back_for_a_stop_string_hides_no_token(measure, Answer, text, usage):
    """ABC, then DEF, G, HI, J with stop DEFGHIJ: one piece of text, five tokens, four gaps, an end by a stop."""
    held = [(100 + 10 * k, text("", "stop" if k == 4 else None, token_ids=[k])) for k in range(1, 5)]
    tables, _ = measure(Answer([(100, text("ABC", token_ids=[0])), *held]))
    row = only(tables)
    assert (row["outcome"], row["output_tokens"], row["output_counted_by"]) == ("ok_eos", 5, "ids")
    assert (row["ttft_ms"], row["tpot_ms"]) == (100, 10)
    assert tables["itl"]["itl_ms"].tolist() == [10] * 4
    # Without ids only the server's total knows of them, and no time between tokens is made up.
    quiet = [(ms, {"choices": [{"index": 0, "text": ""}]}) for ms in (110, 120, 130)]
    last = (140, text("", "stop", usage=usage(4, 5)))
    tables, _ = measure(Answer([(100, text("ABC")), *quiet, last]))
    row = only(tables)
    assert (row["outcome"], row["output_tokens"], row["output_counted_by"]) == ("ok_eos", 5, "total")
    assert tables["itl"]["itl_ms"].isna().all()
    assert tables["requests"]["tpot_ms"].isna().all()


@pytest.mark.parametrize("with_ids", [True, False])
def test_b17_characters_of_several_tokens_are_counted_by_token(measure, Answer, text, usage, with_ids):
    """The nine bytes of é🌶日 one token each, shown when a character is whole; then a true U+FFFD, and a stream whose
    pieces end inside a character."""
    shown = {1: "é", 5: "🌶", 8: "日", 9: "\ufffd"}
    events = []
    for k in range(10):
        ids = {"token_ids": [k]} if with_ids else {}
        data = f"data: {json.dumps(text(shown.get(k, ''), **ids), ensure_ascii=False)}\n\n".encode()
        cut = len(data) // 2 if not shown.get(k) else data.index(shown[k].encode()) + 1
        events += [(100 + 10 * k, data[:cut]), (100 + 10 * k, data[cut:])]
    tables, _ = measure(Answer([*events, (191, text("", "length", usage=usage(4, 10)))]))
    row = only(tables)
    assert (row["outcome"], row["output_tokens"]) == ("ok_length", 10)
    assert row["output_counted_by"] == ("ids" if with_ids else "total")
    assert row["ttft_ms"] == (100 if with_ids else 110)
    assert tables["itl"]["icl_ms"].dropna().tolist() == ([10] * 9 if with_ids else [40, 30, 10])
    if with_ids:
        assert [list(ids) for ids in tables["tokens"]["token_ids"]] == [list(range(10))]


def test_tokens_of_one_chunk_share_its_gap(measure, Answer, text):
    tables, _ = measure(
        Answer([(100, text("a", token_ids=[1])), (160, text("bcd", token_ids=[2, 3, 4])), (161, text("", "length"))])
    )
    assert tables["itl"]["itl_ms"].tolist() == [20, 20, 20]
    assert tables["itl"]["icl_ms"].dropna().tolist() == [60]
    assert [list(ids) for ids in tables["tokens"]["token_ids"]] == [[1, 2, 3, 4]]


def test_events_of_one_read_are_one_delivery(measure, Answer, text, usage):
    both = b"".join(f"data: {t}\n\n".encode() for t in ('{"choices":[{"text":"b"}]}', '{"choices":[{"text":"c"}]}'))
    tables, _ = measure(Answer([(100, text("a")), (160, both), (161, text("", "stop", usage=usage(4, 3)))]))
    assert only(tables)["output_tokens"] == 3
    assert tables["itl"]["itl_ms"].tolist() == [30, 30]


FAULTS = {
    "dropped": ({"end": "drop"}, "stream_truncated", "without a finish_reason"),
    "closed early": ({"end": "eof"}, "stream_truncated", "without a finish_reason"),
    "error": ({"more": {"error": {"message": "no free blocks left"}}}, "cache_exhausted", "no free blocks"),
    "oom": ({"more": {"error": {"message": "CUDA out of memory"}}}, "oom_decode", "out of memory"),
    "garbage": ({"more": "<html>"}, "engine_error", "no JSON"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_in_mid_stream_keep_what_was_measured_and_harm_no_other(measure, Answer, text, usage, name):
    fault, outcome, cause = FAULTS[name]
    events = [(100, text("a", token_ids=[1])), (150, text("b", token_ids=[2]))]
    if "more" in fault:
        events.append((160, fault["more"]))
    good = Answer([(100, text("a", "length", token_ids=[1]))])
    tables, _ = measure(Answer(events, end=fault.get("end", "done")), good)
    bad, fine = tables["requests"].to_dict("records")
    assert (bad["outcome"], fine["outcome"]) == (outcome, "ok_length")
    assert cause in bad["error"]
    assert (bad["output_tokens"], bad["t_first_s"], bad["t_last_s"]) == (2, 0.1, 0.15)
    assert tables["requests"]["ttft_ms"].isna().tolist() == [True, False]
    run = only(tables, "runs")
    assert (run["n_ok"], run["n_failed"], run["ttft_p50_ms"]) == (1, 1, 100)


@pytest.mark.parametrize("status", [400, 401, 429, 500, 503])
def test_refusals_are_counted_by_status(measure, Answer, status):
    body = b'{"error": {"message": "too many\\nrequests", "type": "x"}}'
    tables, _ = measure(Answer(status=status, body=body, content_type="application/json"))
    row = only(tables)
    assert (row["outcome"], row["error"]) == (f"http_{status}", "too many requests")
    assert tables["requests"][["ttft_ms", "output_tokens"]].isna().all().tolist() == [True, False]


def test_a_drop_after_the_finish_is_none(measure, Answer, text):
    tables, _ = measure(Answer([(100, text("a", "length", token_ids=[1]))], end="drop"))
    assert only(tables)["outcome"] == "ok_length"


def test_a_stream_without_tokens_is_empty(measure, Answer, text):
    tables, _ = measure(Answer([(10, {"choices": [{"delta": {"role": "assistant"}}]}), (20, text("", "stop"))]))
    assert only(tables)["outcome"] == "empty"
    assert only(tables, "runs")["n_ok"] == 0


def test_a_request_that_takes_too_long_is_a_timeout(measure, Answer, text):
    tables, _ = measure(Answer([(100, text("a", token_ids=[1]))], end="hang"), settings={"request_timeout_s": 0.3})
    row = only(tables)
    assert (row["outcome"], row["output_tokens"]) == ("timeout", 1)
    assert "request_timeout_s=0.3" in row["error"]
    assert only(tables, "runs")["n_timed_out"] == 1


def test_requests_open_at_the_end_are_unfinished(measure, Answer, text):
    tables, _ = measure(Answer([(100, text("a", token_ids=[1]))], end="hang"), timeout_s=0.5)
    row, run = only(tables), only(tables, "runs")
    assert (row["outcome"], row["output_tokens"]) == ("unfinished", 1)
    assert (run["n_failed"], run["n_unfinished"]) == (0, 1)


def test_a_server_that_cannot_be_reached_fails_the_warm_up_with_its_url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for model in (None, "m"):
        settings = {"base_url": f"http://127.0.0.1:{port}/v1"} | ({"server_model": model} if model else {})
        backend = create("openai_http", None, settings)
        with pytest.raises(RuntimeError, match=f"127.0.0.1:{port}"):
            backend.warm_up(())
        backend.stop()


def test_a_server_that_goes_away_fails_its_requests_only(server, Answer, text, sink):
    server.answer = lambda body: Answer([(0, text("x", "length"))])
    backend = create("openai_http", None, {"base_url": server.base_url})
    backend.warm_up(())
    backend.start(sink)
    server.close()
    backend.submit(ScheduledRequest("r0", 0.0, PROMPT, 4))
    seen = sink.wait(1)["r0"]
    assert seen.outcome is Outcome.ENGINE_ERROR
    assert "no answer" in seen.error
    backend.stop()


def test_the_sender_never_waits_for_the_server(server, Answer, text):
    """All 20 are handed over while the server answers none of them."""
    server.answer = lambda body: Answer([(0, text("x", "length"))])
    backend = create("openai_http", None, {"base_url": server.base_url})
    backend.warm_up(())
    server.answer = lambda body: Answer(end="hang")
    workload = Workload("w", tuple(ScheduledRequest(f"r{k}", 0.001 * k, PROMPT, 4) for k in range(20)))
    recorder = Recorder(workload)
    result = drive(workload, backend, recorder, RealClock(), timeout_s=0.5)
    assert result.timed_out
    backend.stop()
    assert all(r.t_submit_ns is not None for r in recorder.records())
    assert {r.outcome for r in recorder.records()} == {Outcome.UNFINISHED}


def test_wrong_settings_are_refused_by_name():
    for settings, message in (
        ({}, "base_url is not set"),
        ({"base_url": "localhost:8000"}, r"http://localhost:8000/v1"),
        ({"base_url": "http://h/v1", "endpoint": "complete"}, "completions, chat"),
        ({"base_url": "http://h/v1", "prompts": "ids", "endpoint": "chat"}, "takes text only"),
        ({"base_url": "http://h/v1", "extra_body": {"stream": False}}, "extra_body sets stream"),
        ({"base_url": "http://h/v1", "request_timeout_s": 0}, "more than 0"),
        ({"base_ulr": "http://h/v1"}, "base_url"),
    ):
        with pytest.raises(ValueError, match=message):
            create("openai_http", None, settings)


def test_an_impossible_count_makes_no_rate(measure, Answer, text, usage):
    """A billion tokens for a request that asked for 64: not known how many, so no rate, and the report says it."""
    lie = Answer([(100, text("a")), (200, text("b", "stop")), (201, {"choices": [], "usage": usage(4, 10**9)})])
    tables, _ = measure(lie)
    row, run = only(tables), only(tables, "runs")
    assert (row["outcome"], row["output_counted_by"], run["n_uncounted"]) == ("ok_eos", "impossible", 1)
    assert tables["requests"]["output_tokens"].isna().all()
    assert tables["runs"]["gen_tok_s"].isna().all()
    assert not tables["requests"]["ttft_ms"].isna().any()  # what was measured stays


def test_a_count_without_any_token_is_a_failure(measure, Answer, text, usage):
    tables, _ = measure(Answer([(100, text("", "stop")), (101, {"choices": [], "usage": usage(4, 7)})]))
    row = only(tables)
    assert (row["outcome"], row["error"]) == ("empty", "the server counts 7 generated tokens and delivered none")
    assert not tables["runs"]["generated_tokens"].fillna(0).any()
