"""Every field refuses what it cannot mean, by name, value and what is allowed."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.generation import ContinuousBatchingConfig as TransformersConfig
from transformers.generation.continuous_batching.utils import WorkloadHints as TransformersHints

from engine import ContinuousBatchingConfig, WorkloadHints
from engine.attention.selection import BACKENDS
from engine.config import ATTENTION_BACKENDS

BAD = [
    *[("page_size", v, "an integer >= 4") for v in (3, 0, -1, 4.0, True, "16", None)],
    *[("num_blocks", v, "an integer >= 1 or None") for v in (0, -5, 2.5, True)],
    *[("max_batch_tokens", v, "an integer >= 1 or None") for v in (0, "8192")],
    *[("max_requests_per_batch", v, "an integer >= 1 or None") for v in (0, -1)],
    *[("max_blocks_per_request", v, "an integer >= 0 or None") for v in (-1, 1.5)],
    *[("max_memory_percent", v, "a number > 0 and <= 1 or None") for v in (0, 1.5, -0.1, "0.8", True, float("nan"))],
    *[("safety_margin", v, "a number >= 0 and <= 1 or None") for v in (-0.1, 1.5, "x", float("nan"))],
    *[("q_padding_interval_size", v, "an integer >= 0") for v in (-1, 0.5)],
    ("kv_padding_interval_size", -1, "an integer >= 0"),
    ("max_queue_size", -1, "an integer >= 0"),
    *[("default_compile_level", v, "an integer from 0 to 3") for v in (-1, 4, 7, 1.0)],
    *[("seed", v, "an integer >= 0 or None") for v in (-1, 0.5)],
    ("cpu_offload_space", -1.0, "a number >= 0 or None"),
    *[("cpu_offload_space_safety_threshold", v, "a number >= 0 and <= 1") for v in (-0.1, 1.1, None)],
    *[("cpu_group_timeout", v, "a number > 0 or None") for v in (0, -3)],
    *[("scheduler_type", v, "one of fifo, prefill_first") for v in ("lifo", None, "FIFO")],
    *[("use_cuda_graph", v, "a bool, a pair of bools or None") for v in ("yes", 1, (True,), (True, 1))],
    *[
        (name, v, "True, False or None")
        for name in ("use_async_batching", "use_fused_forward")
        for v in ("yes", 1, np.array([1, 2]))
    ],
    *[
        (name, "yes", "True or False")
        for name in (
            "allow_block_sharing",
            "return_logprobs",
            "auto_switch_to_flash",
            "per_request_processors",
            "drop_unsupported_processors",
            "disable_nccl_graph_mixing",
        )
    ],
]


@pytest.mark.parametrize(("field", "value", "allowed"), BAD, ids=[f"{f}={v!r}" for f, v, _ in BAD])
def test_a_bad_value_names_field_value_and_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be ") as caught:
        ContinuousBatchingConfig(**{field: value})
    assert f"must be {allowed}, got {value!r}" in str(caught.value)


GOOD = [
    ("page_size", 4),
    ("page_size", 128),
    ("max_memory_percent", 1),
    ("safety_margin", 0),
    ("safety_margin", 1.0),
    ("max_blocks_per_request", 0),
    ("use_cuda_graph", (False, True)),
    ("use_cuda_graph", [True, False]),
    ("cpu_group_timeout", None),
    ("scheduler_type", "prefill_first"),
]


@pytest.mark.parametrize(("field", "value"), GOOD)
def test_the_ends_of_the_ranges_are_allowed(field: str, value: Any) -> None:
    assert getattr(ContinuousBatchingConfig(**{field: value}), field) == value


def test_a_name_that_does_not_exist_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        TypeError, match=r"^unknown setting of ContinuousBatchingConfig 'num_block'. Did you mean 'num_bl"
    ):
        ContinuousBatchingConfig(num_block=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^unknown setting of WorkloadHints 'xyz'$"):
        WorkloadHints(xyz=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Did you mean 'num_blocks'"):
        replace(ContinuousBatchingConfig(), num_block=3)
    assert list(inspect.signature(ContinuousBatchingConfig).parameters) == [
        f.name for f in fields(ContinuousBatchingConfig)
    ]
    assert copy.copy(pickle.loads(pickle.dumps(ContinuousBatchingConfig(num_blocks=3)))).num_blocks == 3


def test_a_deprecated_setting_is_warned_of_where_it_is_given() -> None:
    with pytest.warns(FutureWarning) as warned:
        ContinuousBatchingConfig(block_size=8)
    assert [w.filename for w in warned] == [__file__]


def test_block_size_is_deprecated_in_favour_of_page_size() -> None:
    """A-page-03."""
    with pytest.warns(FutureWarning, match="use page_size"):
        assert ContinuousBatchingConfig(block_size=8).page_size == 8
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="block_size=8 contradicts page_size=16"):
        ContinuousBatchingConfig(block_size=8, page_size=16)
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="page_size must be an integer >= 4"):
        ContinuousBatchingConfig(block_size=3)


def test_the_other_deprecated_fields_warn() -> None:
    with pytest.warns(FutureWarning, match="default_compile_level"):
        assert ContinuousBatchingConfig(use_default_compile_configs=True).default_compile_level == 3
    with pytest.warns(FutureWarning, match="no effect"):
        ContinuousBatchingConfig(max_cached_graphs=4)


def test_the_fields_are_those_of_transformers() -> None:
    ours = {f.name: f.default for f in fields(ContinuousBatchingConfig)}
    theirs = {f.name: f.default for f in fields(TransformersConfig)}
    assert set(theirs) <= set(ours)
    assert {n for n in theirs if theirs[n] != ours[n]} == set(), "the same defaults"


def test_every_attention_backend_can_be_asked_for_by_name() -> None:
    assert set(ATTENTION_BACKENDS) == set(BACKENDS)
    with pytest.raises(ValueError, match=r"attention_backend must be one of eager, .*triton or None, got 'flash'"):
        ContinuousBatchingConfig(attention_backend="flash")


def test_transformers_own_config_is_accepted_and_not_written_to() -> None:
    theirs = TransformersConfig(page_size=8, scheduler_type="prefill_first", safety_margin=0.3)
    before = dict(vars(theirs))
    adopted = ContinuousBatchingConfig.adopt(theirs)
    assert (adopted.page_size, adopted.scheduler_type, adopted.safety_margin) == (8, "prefill_first", 0.3)
    assert vars(theirs) == before


def test_a_config_of_another_version_keeps_our_defaults_for_what_it_lacks() -> None:
    old = SimpleNamespace(scheduler_type="fifo", num_blocks=7)
    assert ContinuousBatchingConfig.adopt(old) == ContinuousBatchingConfig(num_blocks=7)


def test_adopt_copies_and_checks_what_was_changed_since() -> None:
    config = ContinuousBatchingConfig(num_blocks=7)
    copy = ContinuousBatchingConfig.adopt(config)
    assert copy == config
    assert copy is not config
    config.page_size = 2
    with pytest.raises(ValueError, match="page_size"):
        ContinuousBatchingConfig.adopt(config)
    assert ContinuousBatchingConfig.adopt(None) == ContinuousBatchingConfig()


def test_something_else_is_not_a_config() -> None:
    with pytest.raises(TypeError, match="must be a ContinuousBatchingConfig, got dict"):
        ContinuousBatchingConfig.adopt({"page_size": 8})


def test_hints_are_accepted_from_transformers() -> None:
    theirs = TransformersHints(max_prompt_length=100, max_generated_length=28, num_requests=3)
    assert WorkloadHints.adopt(theirs) == WorkloadHints(100, 28, 3)
    assert WorkloadHints.adopt(None) == WorkloadHints()


@pytest.mark.parametrize("value", [-1, 2.5, "3", None, True])
@pytest.mark.parametrize("name", ["max_prompt_length", "max_generated_length", "num_requests"])
def test_a_hint_that_is_no_number_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 0, got {value!r}"):
        WorkloadHints(**{name: value})
    theirs = TransformersHints(**{name: value})
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 0"):
        WorkloadHints.adopt(theirs)


def test_something_else_is_not_hints() -> None:
    with pytest.raises(TypeError, match="workload_hints must be WorkloadHints, got dict"):
        WorkloadHints.adopt({"num_requests": 3})


def test_an_unhashable_scheduler_type_is_a_value_error():
    with pytest.raises(ValueError, match="scheduler_type"):
        ContinuousBatchingConfig(scheduler_type=["fifo"])
