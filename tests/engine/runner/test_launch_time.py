"""Up to which size steps with prefills are replayed."""

from __future__ import annotations

import pytest

from engine.runner.launch_time import LaunchTime, replay_limit

SIZES = (256, 1024, 1152, 1280, 1408, 1536, 1728, 1920, 2112)


@pytest.mark.parametrize(
    ("microseconds_a_token", "limit"), [(1.0, 2112), (20.0, 1920), (25.0, 1536), (34.0, 1152), (1000.0, 1024)]
)
def test_sizes_are_replayed_until_the_device_hides_the_launches(microseconds_a_token: float, limit: int) -> None:
    """Launched in 20 ms: hidden where the device needs more than 40."""
    measured: list[int] = []

    def measure(tokens: int) -> LaunchTime:
        measured.append(tokens)
        return LaunchTime(tokens, 0.020, max(0.0205, tokens * microseconds_a_token * 1e-6))

    found = replay_limit(SIZES, 1024, measure)
    assert found.tokens == limit == max(n for n in SIZES if n <= 1024 or n * microseconds_a_token <= 40_000)
    assert len(measured) <= 4
    assert len(set(measured)) == len(measured)
    assert min(measured) > 1024
    assert "launched in 20.0 ms" in found.reason


def test_what_does_not_fit_into_memory_is_not_captured() -> None:
    found = replay_limit(SIZES, 1024, lambda n: LaunchTime(n, 0.02, 0.02) if n < 1500 else None)
    assert found.tokens == 1408
    assert found.reason == (
        "derived: 1408 tokens are launched in 20.0 ms and done after 20.0 ms; 1536 tokens do not fit into memory"
    )


def test_small_sizes_are_not_measured() -> None:
    def measure(tokens: int) -> LaunchTime:
        raise AssertionError(tokens)

    found = replay_limit((64, 128), 1024, measure)
    assert (found.tokens, found.reason) == (128, "derived: the largest step")
