"""The measurement plan's scope: one CUDA GPU, one model, an engine in the measuring process (M-scope-02)."""

from __future__ import annotations

OVER_HTTP = "over HTTP: network, parsing, authentication and the server's own queue are in the latencies"
NO_ENGINE = "no engine: tokens come on a known schedule"
OTHER_PROCESS = "the engine runs in a process of its own: what passes between the two is in the latencies"
NO_GPU = "no CUDA GPU"


def outside_scope(engine: str, device: str | None) -> list[str]:
    """Why a run lies outside the plan's scope; empty if it does not. Such runs are never pooled with those inside.

    Args:
        device: that the model ran on; None = none of this machine's.
    """
    if engine == "openai_http":
        return [OVER_HTTP]
    if engine == "null":
        return [NO_ENGINE]
    apart = [OTHER_PROCESS] if engine == "vllm" else []
    return apart if device is not None and device.startswith("cuda") else [*apart, NO_GPU]
