"""Config schemas of workloads and arrivals, for Hydra and for plain mappings.

The dataclasses are not frozen because OmegaConf makes frozen ones read-only, which would refuse every override.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from workloads.arrivals import ARRIVALS, Arrival, arrival_class
from workloads.lengths import Lengths, length_class
from workloads.names import unknown_name


@dataclass
class LengthConfig:
    """A length distribution: ``kind`` and the settings of that kind (``workloads.lengths``), all others null.

    Attributes:
        kind: fixed, uniform, loguniform, lognormal, empirical or table.
        value: tokens, always (fixed).
        low, high: fewest and most tokens, both included (uniform, loguniform, lognormal).
        median: of the tokens (lognormal).
        sigma: deviation of their logarithm (lognormal).
        values: numbers of tokens to draw from (empirical).
        weights: how often each of ``values`` comes; null = equally often (empirical).
        path: csv file (table).
        column: its column of tokens (table).
        weight_column: its column of how often; null = every row once (table).
    """

    kind: str = "fixed"
    value: int | None = None
    low: int | None = None
    high: int | None = None
    median: float | None = None
    sigma: float | None = None
    values: list[int] | None = None
    weights: list[float] | None = None
    path: str | None = None
    column: str | None = None
    weight_column: str | None = None


@dataclass
class PrefixConfig:
    """Shared prefixes: ``fraction`` of the requests begin with one of ``groups`` prefixes of ``tokens`` ids.

    Attributes:
        fraction: share of the requests, 0 to 1.
        tokens: length of a prefix.
        groups: how many different prefixes.
    """

    fraction: float = 0.0
    tokens: int = 0
    groups: int = 1


@dataclass
class SyntheticWorkload:
    """Random prompts with lengths from distributions.

    Attributes:
        kind: which of the workload's programs makes the requests.
        name: what the tables call it.
        seed: of prompts, lengths and arrivals; null = the seed of the run.
        requests: how many.
        prompt_tokens, output_tokens: distributions of lengths.
        prefix: what prompts have in common.
    """

    kind: str = "synthetic"
    name: str = "synthetic"
    seed: int | None = None
    requests: int = 24
    prompt_tokens: LengthConfig = field(default_factory=LengthConfig)
    output_tokens: LengthConfig = field(default_factory=LengthConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)


@dataclass
class NanoWorkload:
    """Anchor ``nano``: uniform lengths in [low, high], ids below ``vocab`` (modulo the model's vocabulary).

    Attributes:
        kind, name, seed, requests: as of ``synthetic``.
        low, high: fewest and most tokens of a prompt and of an answer.
        vocab: token ids are below this.
    """

    kind: str = "nano"
    name: str = "nano"
    seed: int | None = 0
    requests: int = 256
    low: int = 100
    high: int = 1024
    vocab: int = 100000


@dataclass
class StagedWorkload:
    """Anchor ``staged``: log-uniform lengths, meant for Poisson arrivals.

    Attributes:
        kind, name, seed, requests: as of ``synthetic``.
        low, high: fewest and most tokens of a prompt and of an answer.
        vocab: token ids are below this.
    """

    kind: str = "staged"
    name: str = "staged"
    seed: int | None = 1
    requests: int = 256
    low: int = 64
    high: int = 1024
    vocab: int = 100000


@dataclass
class ReplaySettings:
    """Which part of a recording is replayed, and on what scale.

    Attributes:
        path: the file or folder.
        window_start_s, window_end_s: part to use, in seconds after its first row; end null = all.
        max_requests: at most this many.
        sampling: which of more requests: ``first`` takes the first ones, ``spread`` takes them evenly over the window,
            which keeps its duration and lowers its rate.
        time_scale: recorded gaps are multiplied by it: 0.5 replays twice as fast.
        length_scale: prompt and output lengths are multiplied by it.
        length_cap: no prompt and no output is longer than this.
        output_cap: further cap on outputs alone.
    """

    path: str | None = None
    window_start_s: float = 0.0
    window_end_s: float | None = None
    max_requests: int | None = None
    sampling: str = "first"
    time_scale: float = 1.0
    length_scale: float = 1.0
    length_cap: int | None = None
    output_cap: int | None = None


@dataclass
class TraceWorkload(ReplaySettings):
    """Requests of a recorded trace.

    Attributes:
        kind, name, seed: as of ``synthetic``.
        format: who can read it, a name of ``workloads.traces.READERS``.
    """

    kind: str = "trace"
    name: str = "trace"
    seed: int | None = None
    format: str = "azure"


@dataclass
class ServeGenWorkload(ReplaySettings):
    """Requests drawn from a ServeGen pool.

    Attributes:
        kind, name, seed: as of ``synthetic``.
        rate: all clients are scaled to that many requests a second together; null = as recorded.
    """

    kind: str = "servegen"
    name: str = "servegen"
    seed: int | None = None
    rate: float | None = None


@dataclass
class LengthTableWorkload:
    """Pairs of prompt and output length from a table (``workloads.length_table``), drawn together.

    Attributes:
        kind, name, seed: as of ``synthetic``.
        path: the csv.
        requests: how many are drawn, with repetition.
        prompt_column, output_column, weight_column: of the csv; weight null = every row is equally likely.
        length_scale, length_cap, output_cap: as in a replay.
    """

    kind: str = "length_table"
    name: str = "length_table"
    seed: int | None = None
    path: str | None = None
    requests: int = 24
    prompt_column: str = "prompt_tokens"
    output_column: str = "output_tokens"
    weight_column: str | None = None
    length_scale: float = 1.0
    length_cap: int | None = None
    output_cap: int | None = None


@dataclass
class SessionsWorkload:
    """Conversations of several turns (``workloads.sessions``); each arrival starts one.

    Attributes:
        kind, name, seed: as of ``synthetic``.
        sessions: number of conversations.
        turns: of a conversation: a distribution, as of lengths.
        new_tokens: what a turn adds to the prompt.
        output_tokens: what a turn asks for.
        system_tokens: ids with which every conversation begins, all with the same.
        think_s: seconds on average between an answer's end and the next turn (``loop: closed``), or between the due
            times of two turns (``loop: open``).
        think_cv: their coefficient of variation, gamma distributed.
        loop: ``closed`` sends a turn after the answer before it; ``open`` at a time fixed beforehand.
        history: what stands in a prompt for the answers before it: ``answered`` (the ids that were answered, for
            ``loop: closed``) or ``planned`` (random ids as many as were asked for, the same for every engine).
        context_cap: a conversation ends before a turn whose prompt and answer together are longer; null = none.
    """

    kind: str = "sessions"
    name: str = "sessions"
    seed: int | None = None
    sessions: int = 8
    turns: LengthConfig = field(default_factory=LengthConfig)
    new_tokens: LengthConfig = field(default_factory=LengthConfig)
    output_tokens: LengthConfig = field(default_factory=LengthConfig)
    system_tokens: int = 0
    think_s: float = 1.0
    think_cv: float = 1.0
    loop: str = "closed"
    history: str = "answered"
    context_cap: int | None = None


@dataclass
class PromptsFileWorkload:
    """Prompts of a jsonl file (``workloads.prompts_file``).

    Attributes:
        kind, name, seed: as of ``synthetic``.
        path: the file.
        max_requests: the first ones in order of ``due_s``, or of the file where a line has none.
        max_new_tokens: for lines that give none.
        window_start_s, window_end_s, time_scale: of ``due_s`` as it stands; the window's start becomes 0.
        length_cap: longer prompts are cut to their first ids.
        output_cap: no answer is longer.
    """

    kind: str = "prompts_file"
    name: str = "prompts_file"
    seed: int | None = None
    path: str | None = None
    max_requests: int | None = None
    max_new_tokens: int = 64
    window_start_s: float = 0.0
    window_end_s: float | None = None
    time_scale: float = 1.0
    length_cap: int | None = None
    output_cap: int | None = None


@dataclass
class BurstsWorkload:
    """Bursts of equal requests, each begun when the one before has ended (``workloads.bursts``).

    Attributes:
        kind, name, seed: as of ``synthetic``.
        sizes: requests in each burst, which is a phase of the workload.
        prompt_tokens, output_tokens: of every request; the ids of all prompts differ.
        pause_s: seconds between a burst's last end and the next one.
        measured_gaps: first and last token index (from 0) of the gaps that the table ``phases`` is about; null = all.
    """

    kind: str = "bursts"
    name: str = "bursts"
    seed: int | None = None
    sizes: list[int] = field(default_factory=lambda: [1, 8])
    prompt_tokens: int = 64
    output_tokens: int = 64
    pause_s: float = 0.0
    measured_gaps: list[int] | None = None


MANDATORY = "???"  # OmegaConf's mark of a value that must be given

WorkloadConfig = (
    SyntheticWorkload
    | NanoWorkload
    | StagedWorkload
    | TraceWorkload
    | ServeGenWorkload
    | LengthTableWorkload
    | SessionsWorkload
    | PromptsFileWorkload
    | BurstsWorkload
)

WORKLOADS: dict[str, type] = {
    "synthetic": SyntheticWorkload,
    "nano": NanoWorkload,
    "staged": StagedWorkload,
    "trace": TraceWorkload,
    "servegen": ServeGenWorkload,
    "length_table": LengthTableWorkload,
    "sessions": SessionsWorkload,
    "prompts_file": PromptsFileWorkload,
    "bursts": BurstsWorkload,
}


def arrival_schema(kind: str) -> type:
    """Schema of an arrival process: ``kind`` and its own fields, mandatory where the process has no default."""
    cls = arrival_class(kind)
    types = get_type_hints(cls)
    columns: list[tuple[str, Any, Any]] = [("kind", str, field(default=kind))]
    for f in dataclasses.fields(cls):
        default = MANDATORY if f.default is dataclasses.MISSING else f.default
        columns.append((f.name, types[f.name], field(default=default)))
    return dataclasses.make_dataclass(f"{cls.__name__}Config", columns)


def hydra_schemas() -> dict[tuple[str, str], type]:
    """(config group, name) -> schema to store in Hydra's ConfigStore; the yaml files begin with these names."""
    schemas = {("workload", f"{kind}_schema"): cls for kind, cls in WORKLOADS.items()}
    schemas |= {("arrival", f"{kind}_schema"): arrival_schema(kind) for kind in ARRIVALS}
    return schemas


def make_lengths(cfg: LengthConfig, where: str) -> Lengths:
    """The distribution ``cfg`` describes. ValueError if a setting is missing or does not belong to its kind."""
    cls = length_class(cfg.kind, where)
    given = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.name != "kind"}
    given = {name: value for name, value in given.items() if value is not None}
    known = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(cls)}
    if extra := sorted(set(given) - set(known)):
        null = " ".join(f"{where}.{name}=null" for name in extra)
        raise ValueError(f"{where}: kind {cfg.kind} has no setting {', '.join(extra)}: add {null}")
    if missing := [name for name, required in known.items() if required and name not in given]:
        raise ValueError(f"{where}: kind {cfg.kind} needs {', '.join(missing)}")
    try:
        lengths: Lengths = cls(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return lengths


def workload_config(cfg: WorkloadConfig | Mapping[str, Any]) -> WorkloadConfig:
    """A typed workload config from a schema object or any mapping with ``kind`` (a DictConfig is one)."""
    if not isinstance(cfg, Mapping):
        return cfg
    kind = cfg.get("kind")
    if kind not in WORKLOADS:
        raise unknown_name("workload.kind", kind, WORKLOADS)
    typed: WorkloadConfig = _typed(WORKLOADS[kind], cfg, "workload")
    return typed


def make_arrival(cfg: Any) -> Arrival:
    """The arrival process from its schema object or any mapping with ``kind``; a ready process is returned as it is."""
    if any(isinstance(cfg, cls) for cls in ARRIVALS.values()):
        process: Arrival = cfg
        return process
    values = dict(cfg) if isinstance(cfg, Mapping) else {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    cls = arrival_class(str(values.pop("kind", None)))
    made: Arrival = _typed(cls, values, "arrival")
    return made


_Schema = TypeVar("_Schema")


def _typed(schema: type[_Schema], values: Mapping[str, Any], where: str) -> _Schema:
    """``schema`` filled from ``values``; unknown and missing settings are named with the nearest right name."""
    fields = {f.name: f for f in dataclasses.fields(schema)}  # type: ignore[arg-type]
    filled: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise unknown_name(f"setting of {where}", name, fields)
        nested = {"LengthConfig": LengthConfig, "PrefixConfig": PrefixConfig}.get(str(fields[name].type))
        if nested is not None and isinstance(value, Mapping):
            value = _typed(nested, value, f"{where}.{name}")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            value = list(value)
        if value != MANDATORY:
            filled[name] = value
    for name, f in fields.items():
        if name not in filled and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} {values.get('kind', schema.__name__)} needs {name}: set {where}.{name}=…")
    return schema(**filled)
