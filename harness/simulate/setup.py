"""An engine's settings as a simulation needs them, from its resolved config in the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.cache import CacheLayout, PagedCache
from engine.runner.batch import StepShape
from engine.runner.buckets import MIXED_TOKENS, StepBuckets
from engine.scheduler import SCHEDULERS, Scheduler, SchedulerLimits, StepRows
from harness.report.read import Results, decoded

VARIABLES = ("max_batch_tokens", "max_requests_per_batch", "num_blocks", "safety_margin", "scheduler_type", "page_size")
"""Settings that :meth:`EngineSetup.changed` can change, by their names in ContinuousBatchingConfig."""


class SetupError(ValueError):
    """A run whose engine cannot be simulated; one line that says why."""


@dataclass(frozen=True)
class EngineSetup:
    """What decides which request computes how many tokens in which step.

    Attributes:
        layout: shape of the cache.
        num_blocks, num_host_blocks: of the pool on the device and of that for offloaded requests.
        overlapped: whether a step is planned while the one before it runs (async batching).
        graphs: (steps with prompt tokens, steps without) are captured.
        table_pages, q_interval, kv_interval, any_lengths: which sizes are captured (`StepBuckets.plan`).
        replayed_tokens: query tokens of the largest captured step with prompt tokens, which is measured at start.
    """

    layout: CacheLayout
    num_blocks: int
    max_batch_tokens: int
    max_requests_per_batch: int
    scheduler_type: str = "fifo"
    safety_margin: float = 0.15
    share_prefixes: bool = True
    num_host_blocks: int = 0
    overlapped: bool = False
    graphs: tuple[bool, bool] = (False, False)
    table_pages: int = 32
    q_interval: int = 0
    kv_interval: int = 0
    any_lengths: bool = True
    replayed_tokens: int = MIXED_TOKENS[-1]

    def scheduler(self) -> Scheduler:
        """The engine's own scheduler over the engine's own cache, empty."""
        cache = PagedCache(self.layout, self.num_blocks, self.share_prefixes)
        limits = SchedulerLimits(self.max_batch_tokens, self.max_requests_per_batch, self.safety_margin)
        return SCHEDULERS[self.scheduler_type](cache, limits, self.num_host_blocks)

    def buckets(self) -> StepBuckets | None:
        """Sizes of the captured steps, as the engine chooses them; None if it captures none."""
        if not any(self.graphs):
            return None
        return StepBuckets.plan(
            max_rows=self.max_requests_per_batch,
            max_tokens=self.max_batch_tokens,
            table_pages=self.table_pages,
            page_size=self.layout.page_size,
            groups=len(self.layout.groups),
            mixed=self.graphs[0],
            decode=self.graphs[1],
            any_lengths=self.any_lengths,
            q_interval=self.q_interval,
            kv_interval=self.kv_interval,
        ).up_to(self.replayed_tokens)

    def changed(self, **settings: Any) -> EngineSetup:
        """With other values of :data:`VARIABLES`; the memory of the cache stays what it is.

        A new scheduler brings its own safety margin unless one is given. A new page size keeps the bytes of the pool.

        Raises:
            ValueError: a setting that a simulation cannot change, or a value that the engine would refuse.
        """
        if unknown := sorted(set(settings) - set(VARIABLES)):
            raise ValueError(f"{', '.join(unknown)} cannot be simulated; what can: {', '.join(VARIABLES)}")
        scheduler = settings.get("scheduler_type", self.scheduler_type)
        if scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler_type must be one of {', '.join(SCHEDULERS)}, got {scheduler!r}")
        if scheduler != self.scheduler_type and "safety_margin" not in settings:
            settings["safety_margin"] = SCHEDULERS[scheduler].default_safety_margin
        page = settings.pop("page_size", None)
        made = replace(self, **settings)
        if page is not None and page != self.layout.page_size:
            layout = replace(self.layout, page_size=page)
            blocks = made.num_blocks * self.layout.block_bytes // layout.block_bytes
            made = replace(made, layout=layout, num_blocks=blocks if "num_blocks" not in settings else made.num_blocks)
        for name in ("max_batch_tokens", "max_requests_per_batch", "num_blocks"):
            if getattr(made, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(made, name)}")
        fitted = min(made.max_requests_per_batch, made.max_batch_tokens, made.num_blocks)  # as the engine resolves it
        return replace(made, max_requests_per_batch=fitted)


def step_shape(rows: StepRows, groups: int) -> StepShape:
    """Sizes of a planned step's inputs, as the engine's runner counts them."""
    single = rows.num_single
    tokens = int(rows.counts.sum()) - single
    width = int(rows.pages.max(initial=1))
    return StepShape(single, len(rows) - single, tokens, int(rows.samples.sum()), width, groups)


def read_setup(results: Results, run_id: str) -> EngineSetup:
    """The engine of a measured run.

    Raises:
        SetupError: it was another engine, or its settings were not recorded.
    """
    row = results.runs[results.runs["run_id"] == run_id].iloc[0]
    if row["engine"] != "ours":
        raise SetupError(f"run {run_id} is of engine {row['engine']}: only this project's engine (ours) is simulated")
    values = settings_of(results, run_id)
    needed = ("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch", "safety_margin")
    if missing := [name for name in needed if values.get(name) is None]:
        raise SetupError(f"run {run_id} does not state {', '.join(missing)} in its config table: measure it again")
    layout = _layout(values, run_id)
    varlen, decode = values.get("use_cuda_graph") or (False, False)
    kernel = values.get("decode_kernel")
    return EngineSetup(
        layout=layout,
        num_blocks=values["num_blocks"],
        max_batch_tokens=values["max_batch_tokens"],
        max_requests_per_batch=values["max_requests_per_batch"],
        scheduler_type=values["scheduler_type"],
        safety_margin=values["safety_margin"],
        share_prefixes=bool(values["allow_block_sharing"]),
        num_host_blocks=values.get("num_host_blocks") or 0,
        overlapped=bool(values["use_async_batching"]),
        graphs=(bool(varlen), bool(decode if kernel in (None, True) else varlen)),
        table_pages=values.get("table_pages") or values.get("max_blocks_per_request") or 32,
        q_interval=values["q_padding_interval_size"],
        kv_interval=values["kv_padding_interval_size"],
        any_lengths=not str(values.get("attention_backend")).startswith("flash_attention"),
        replayed_tokens=values.get("replayed_mixed_tokens") or max(MIXED_TOKENS[-1], values["q_padding_interval_size"]),
    )


def attention_of(results: Results, run_id: str) -> str | None:
    """What computes a run's attention: its backend, and whether rows that decode go without a kernel of their own
    (``max_blocks_per_request=0``); None if that was not recorded."""
    values = settings_of(results, run_id)
    backend = values.get("attention_backend")
    return f"{backend} without its decode kernel" if backend and values.get("decode_kernel") is False else backend


def _layout(values: Mapping[str, Any], run_id: str) -> CacheLayout:
    names = ("windows", "num_kv_heads", "head_dim", "itemsize")
    stated = [values.get(f"cache.{name}") for name in names]
    found: Sequence[Any] | None = stated
    if any(value is None for value in stated):
        found = None if values.get("model.name") is None else _preset_shape(str(values["model.name"]))
    if found is None:
        raise SetupError(f"run {run_id} does not state the shape of its cache (older version): measure it again")
    windows, heads, head_dim, itemsize = found
    return CacheLayout.build(windows, values["page_size"], heads, head_dim, itemsize)


def _preset_shape(name: str) -> tuple[list[int | None], int, int, int] | None:
    """Windows by layer, key heads, head size and bytes an element of a shipped preset; None for any other model.

    Runs of versions that did not record it were on a GPU in bfloat16, or on a CPU, where only ratios matter.
    """
    from engine.model_shape import ModelShape
    from harness.models import ModelSpec, outline_model, preset_names

    if name not in preset_names():
        return None
    shape = ModelShape.of(outline_model(ModelSpec(name=name, load_format="dummy")).model)
    return list(shape.windows), shape.num_kv_heads, shape.head_dim, 2


def settings_of(results: Results, run_id: str) -> dict[str, Any]:
    """Every setting of a run by name, decoded."""
    rows = results.of_run("config", run_id)
    return {str(f): decoded(v) for f, v in zip(rows["field"], rows["value"], strict=True) if isinstance(v, str)}


def setting(results: Results, run_id: str, name: str, otherwise: Any) -> Any:
    """One setting of a run; ``otherwise`` where it was not recorded."""
    value = settings_of(results, run_id).get(name)
    return otherwise if value is None else value
