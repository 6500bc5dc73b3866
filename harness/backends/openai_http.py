"""Any OpenAI-compatible server, over HTTP with streamed answers.

What is measured is what a client of that server sees: network, HTTP, its queue and its admission are in the latencies.
The server's own settings cannot be seen. Requests run in an event loop of their own thread; the sender hands them over
and never waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import aiohttp

from harness.backends.base import TokenSink
from harness.backends.generation import GenerationSettings
from harness.backends.http.answer import AnswerReader, Delivered
from harness.backends.http.exchange import Ended, exchange
from harness.backends.http.probe import PROBED_TOKENS, Abilities, as_json, probe
from harness.backends.http.prompt_text import text_of
from harness.backends.http.settings import HttpSettings, needed_extensions, sampling_fields
from harness.backends.loop_thread import LoopThread
from harness.backends.settings import check_settings
from harness.errors import one_line
from harness.record import ConfigValue, Outcome
from workloads.workload import ScheduledRequest

_FALLBACK_PROMPT = (11, 12, 13, 14, 15, 16, 17, 18)  # for the probe where there is no warm-up request
_HIDDEN = "hidden: a setting of the server"
_HIDDEN_FIELDS = (
    "page_size", "num_blocks", "max_batch_tokens", "max_memory_percent", "max_requests_per_batch", "scheduler_type",
    "safety_margin", "use_cuda_graph", "use_async_batching", "allow_block_sharing", "cpu_offload_space",
)  # fmt: skip

KEEP_ALIVE_S = 4.0
"""How long an idle connection is kept: less than common servers do (5 s), so that none is closed in mid-request."""


class OpenAiHttpBackend:
    """Sends requests to a server; see :class:`HttpSettings`.

    Args:
        tokenizer: the model's, to make text where the server takes no ids; None if there is none.
    """

    name = "openai_http"
    needs_weights = False

    def __init__(
        self,
        settings: HttpSettings,
        generation: GenerationSettings,
        tokenizer: Any | None,
        given: Mapping[str, Any] | None = None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._settings = settings
        self._generation = generation
        self._tokenizer = tokenizer
        self._given = given or {}
        self._now_ns = now_ns
        self._model = settings.server_model
        self._server: str | None = None
        self._abilities: Abilities | None = None
        self._bodies: dict[str, bytes] = {}
        self._sink: TokenSink | None = None
        self._requests = self._answers = 0
        self._session: aiohttp.ClientSession | None = None
        self._loop = LoopThread("http-client")

    @classmethod
    def create(
        cls, settings: Mapping[str, Any], generation: GenerationSettings, tokenizer: Any | None
    ) -> OpenAiHttpBackend:
        """Raises ValueError for a setting it does not have or cannot use."""
        return cls(cls.configure(settings, generation), generation, tokenizer, settings)

    @classmethod
    def configure(cls, settings: Mapping[str, Any], generation: GenerationSettings) -> HttpSettings:
        """Its settings; raises ValueError as :meth:`create`."""
        check_settings(cls.name, settings, HttpSettings.__dataclass_fields__)
        if "base_url" not in settings:
            raise ValueError("engine.base_url is not set: give the server's URL, for example http://localhost:8000/v1")
        return HttpSettings(**settings)

    # -- Backend -------------------------------------------------------------------------------------------------

    def warm_up(self, requests: Sequence[ScheduledRequest]) -> None:
        """Find out what the server can do, then send ``requests``.

        Raises:
            RuntimeError: the server cannot be reached or does not answer; nothing could be measured then.
        """
        prompt = requests[0].prompt_ids if requests else _FALLBACK_PROMPT
        self._loop.wait(self._find_out(prompt))
        self.prepare(requests)
        for ended in self._loop.wait(self._run_together(requests)):
            if not ended.outcome.ok:
                raise RuntimeError(f"warm-up failed ({ended.outcome}): {ended.error}")

    def prepare(self, requests: Sequence[ScheduledRequest]) -> None:
        """Encode ``requests``, so that nothing is left to compute when they are due."""
        for request in requests:
            self._bodies[request.request_id] = self._body(request)

    def start(self, sink: TokenSink) -> None:
        self._sink = sink
        self._requests = self._answers = 0

    def submit(self, request: ScheduledRequest) -> None:
        body = self._bodies.pop(request.request_id, None) or self._body(request)
        self._loop.begin(request.request_id, lambda: self._serve(request, body))

    def close_input(self) -> None:
        """Nothing waits for more input."""

    def stop(self) -> None:
        """End every request that is open (as UNFINISHED), the connections and the event loop. Safe to call again."""
        self._loop.stop(self._close)

    def config(self) -> list[ConfigValue]:
        """How the server is asked and what it turned out to do; its own settings are null: they cannot be seen."""
        rows = []
        for f in fields(self._settings):
            source = "user" if f.name in self._given else "default"
            rows.append(ConfigValue(f.name, _plain(getattr(self._settings, f.name)), source))
        derived: dict[str, Any] = {"server_model_in_use": self._model, "server": self._server}
        if (able := self._abilities) is not None:
            derived |= {
                "prompts_in_use": "ids" if able.prompt_ids else "text",
                "prompt_tokens_counted_by": "server" if able.usage else "client",
                "token_ids_returned": able.token_ids,
                "usage_in_every_chunk": able.running_usage,
                "optional_fields": dict(able.fields),
                "optional_fields_refused": list(able.refused),
            }
        rows += [ConfigValue(name, value, "derived: what the server answered") for name, value in derived.items()]
        return rows + [ConfigValue(name, None, _HIDDEN) for name in _HIDDEN_FIELDS]

    def steps(self) -> list[dict[str, Any]]:
        """None: a server's steps cannot be seen."""
        return []

    def counters(self) -> dict[str, float | int | None]:
        return {"http_requests": self._requests, "http_answers": self._answers}

    def memory(self) -> dict[str, int | None]:
        """None: it is the server's."""
        return {}

    # -- what a request looks like -------------------------------------------------------------------------------

    def _body(self, request: ScheduledRequest) -> bytes:
        able = self._abilities
        if able is None:
            raise RuntimeError("warm_up comes before the first request: it finds out what the server takes")
        return as_json(
            {
                **self._prompt(request.prompt_ids, able.prompt_ids),
                **self._common(request.max_new_tokens),
                **able.fields,
                **self._settings.extra_body,
            }
        )

    def _prompt(self, prompt_ids: Sequence[int], by_ids: bool) -> dict[str, Any]:
        if by_ids:
            return {"prompt": list(prompt_ids)}
        text = text_of(self._tokenizer, prompt_ids)
        return (
            {"messages": [{"role": "user", "content": text}]} if self._settings.endpoint == "chat" else {"prompt": text}
        )

    def _common(self, max_new_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "max_tokens": max_new_tokens,
            "stream": True,
            **sampling_fields(self._generation),
        }

    # -- in the event loop ---------------------------------------------------------------------------------------

    async def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s)
            # No limit: the schedule decides how many requests are open, not the client.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(
                timeout=timeout, connector=connector, headers=self._settings.headers(), read_bufsize=2**20
            )
        return self._session

    async def _find_out(self, prompt: Sequence[int]) -> None:
        session = await self._open()
        if self._model is None:
            self._model = await _only_model(session, self._settings.base_url)
        self._server = await _server_version(session, self._settings.base_url)
        choice, prompts = self._settings.prompts, []
        if choice != "text" and self._settings.endpoint == "completions":
            prompts.append((True, self._prompt(prompt, True)))
        if self._tokenizer is not None and choice != "ids":
            prompts.append((False, self._prompt(prompt, False)))
        if not prompts:
            raise RuntimeError("text prompts need a tokenizer, and this model has none: choose a model that has one")

        async def ask(asked: Mapping[str, Any]) -> tuple[Ended, AnswerReader]:
            reader = AnswerReader(PROBED_TOKENS, running_usage=False)
            body = as_json({**self._common(PROBED_TOKENS), **self._settings.extra_body, **asked})
            return await self._exchange(body, reader, _ignore), reader

        self._abilities = await probe(ask, prompts, len(prompt), needed_extensions(self._generation))
        for name in self._abilities.refused:
            print(f"the server refuses the field {name!r}; it is left out", flush=True)

    async def _run_together(self, requests: Sequence[ScheduledRequest]) -> list[Ended]:
        bodies = [self._bodies.pop(r.request_id) for r in requests]
        return await asyncio.gather(
            *(self._exchange(body, self._reader(r), _ignore) for r, body in zip(requests, bodies, strict=True))
        )

    async def _exchange(self, body: bytes, reader: AnswerReader, deliver: Callable[[Delivered, int], None]) -> Ended:
        session, limit_s = await self._open(), self._settings.request_timeout_s
        return await exchange(session, self._settings.url, body, reader, deliver, limit_s, self._now_ns)

    def _reader(self, request: ScheduledRequest) -> AnswerReader:
        assert self._abilities is not None
        return AnswerReader(request.max_new_tokens, self._abilities.running_usage)

    async def _serve(self, request: ScheduledRequest, body: bytes) -> None:
        sink, request_id, reader = self._sink, request.request_id, self._reader(request)
        assert sink is not None

        def deliver(found: Delivered, time_ns: int) -> None:
            if found.token_ids is None:
                sink.on_hidden_tokens(request_id, found.count, time_ns)
            else:
                sink.on_tokens(request_id, found.token_ids, time_ns)

        self._requests += 1
        try:
            ended = await self._exchange(body, reader, deliver)
        except asyncio.CancelledError:  # by stop
            ended = Ended(Outcome.UNFINISHED, self._now_ns(), None, None)
        except Exception as error:  # this request fails, the run goes on
            ended = Ended(Outcome.ENGINE_ERROR, self._now_ns(), one_line(error), None)
        self._answers += ended.status == 200
        sink.on_end(
            request_id,
            ended.outcome,
            ended.time_ns,
            ended.error,
            prompt_tokens=reader.prompt_tokens,
            cached_tokens=reader.cached_tokens,
            output_tokens=reader.output_tokens,
            output_counted_by=reader.counted_by,
        )

    async def _close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _only_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The one model that the server lists."""
    url = base_url.rstrip("/") + "/models"
    try:
        async with session.get(url) as response:
            listed = (await response.json(content_type=None)) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise RuntimeError(f"cannot ask {url} for its models: {one_line(error)}") from error
    names = [str(m["id"]) for m in listed.get("data") or []]
    if len(names) != 1:
        shown = ", ".join(names) or f"none (status {response.status})"
        raise RuntimeError(f"set engine.server_model: {url} lists {shown}")
    return names[0]


async def _server_version(session: aiohttp.ClientSession, base_url: str) -> str | None:
    """What the server says it is; None if it does not."""
    root = base_url.rstrip("/").removesuffix("/v1")
    try:
        async with session.get(f"{root}/version") as response:
            said = (await response.json(content_type=None)) if response.status == 200 else {}
            header = response.headers.get("Server")
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    version = said.get("version") if isinstance(said, Mapping) else None
    return " ".join(str(part) for part in (header, version) if part) or None


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _ignore(found: Delivered, time_ns: int) -> None:
    """Tokens of a probe or a warm-up are not measured."""
