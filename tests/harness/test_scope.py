from __future__ import annotations

import pytest

from harness.scope import NO_ENGINE, NO_GPU, OVER_HTTP, outside_scope


@pytest.mark.parametrize(
    ("engine", "device", "why"),
    [
        ("ours", "cuda:0", []),
        ("static", "cpu", [NO_GPU]),
        ("openai_http", None, [OVER_HTTP]),
        ("null", None, [NO_ENGINE]),
    ],
)
def test_what_lies_outside_the_plans_scope(engine, device, why):
    assert outside_scope(engine, device) == why
