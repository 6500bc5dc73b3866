"""How a server is reached and asked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from harness.backends.generation import GenerationSettings

ENDPOINTS = {"completions": "/completions", "chat": "/chat/completions"}
PROMPTS = ("auto", "ids", "text")
_OURS = frozenset(("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream", "n"))


@dataclass(frozen=True)
class HttpSettings:
    """Where the server is and how it is asked.

    Attributes:
        base_url: up to the version, for example ``http://localhost:8000/v1``.
        server_model: as the server calls it; None = the only one it lists.
        api_key_env: environment variable that holds the key; unset or None = no key is sent.
        endpoint: ``completions``, or ``chat``, which takes text only.
        prompts: ``ids``, ``text``, or ``auto``: ids where the server takes them.
        request_timeout_s: longest time for one request, end to end; None = the run's own limit.
        connect_timeout_s: longest time to connect.
        extra_body: further fields of every request, as the server understands them.
    """

    base_url: str
    server_model: str | None = None
    api_key_env: str | None = "OPENAI_API_KEY"
    endpoint: str = "completions"
    prompts: str = "auto"
    request_timeout_s: float | None = None
    connect_timeout_s: float = 10.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ValueError(f"engine.base_url is {self.base_url!r}: give a URL like http://localhost:8000/v1")
        for name, allowed in (("endpoint", tuple(ENDPOINTS)), ("prompts", PROMPTS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"engine.{name} is {getattr(self, name)!r}: use one of {', '.join(allowed)}")
        if self.endpoint == "chat" and self.prompts == "ids":
            raise ValueError("engine.prompts=ids does not go with engine.endpoint=chat, which takes text only")
        for name in ("request_timeout_s", "connect_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"engine.{name} is {value}: give more than 0 seconds")
        if taken := sorted(_OURS & self.extra_body.keys()):
            raise ValueError(
                f"engine.extra_body sets {', '.join(taken)}, which the benchmark sets itself: leave it out"
            )

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.base_url.rstrip("/") + ENDPOINTS[self.endpoint]

    def headers(self) -> dict[str, str]:
        """Of every request. Nothing is compressed: a compressor may hold tokens back."""
        key = os.environ.get(self.api_key_env) if self.api_key_env else None
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        return headers | ({"Authorization": f"Bearer {key}"} if key else {})


def sampling_fields(generation: GenerationSettings) -> dict[str, Any]:
    """Fields of OpenAI's own schema that state how tokens are chosen."""
    if not generation.do_sample:
        return {"temperature": 0}
    chosen: dict[str, Any] = {"temperature": 1.0 if generation.temperature is None else generation.temperature}
    if generation.top_p is not None:
        chosen["top_p"] = generation.top_p
    if generation.seed is not None:
        chosen["seed"] = generation.seed
    return chosen


def needed_extensions(generation: GenerationSettings) -> dict[str, Any]:
    """Fields beyond OpenAI's schema without which the run would not be what the configuration says."""
    fields: dict[str, Any] = {}
    if generation.ignore_eos:
        fields["ignore_eos"] = True
    if generation.top_k is not None:
        fields["top_k"] = generation.top_k
    return fields
