"""What two result sets differ in besides what is compared, and whether that matters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from harness.compare.workloads import different_workloads
from harness.provenance import CODE_KEY
from harness.report.read import Results, decoded

_HARDWARE = ("gpu.name", "gpu.memory_bytes", "gpu.count", "gpu.power_limit_w", "cpu.model", "cpu.threads_usable")
_MODEL = ("model.weight_hash", "model.config_hash", "model.dtype", "model.tokenizer_hash")
_VERSIONS = (
    "python",
    "package.torch",
    "package.transformers",
    "package.flash-attn",
    "package.triton",
    "torch.cuda",
    "torch.cudnn",
    "torch.threads",
    "torch.matmul_precision",
    "gpu.driver",
)
_SOURCE = ("git.sha", "git.dirty")
_RUNS = {"workload_hash": "workload", "seed": "seed", "model": "model", "device": "hardware"}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A fact that is not the same in both sets.

    Attributes:
        kind: workload, seed, model, hardware, versions or source.
        a, b: its values in each set, as text; "unknown" if it was not recorded.
        matters: whether numbers may differ because of it. A fact that one set does not know does not refuse: it is
            neither shown to be the same nor to differ.
        because: what makes the two differ, where the fact itself does not say (a hash).
    """

    kind: str
    name: str
    a: str
    b: str
    matters: bool
    because: str | None = None

    def in_words(self) -> str:
        because = f" ({self.because})" if self.because else ""
        return f"{self.kind}: {self.name} is {self.a} in A and {self.b} in B{because}"


def mismatches(a: Results, b: Results) -> list[Mismatch]:
    """Everything the measured runs of the two sets differ in, what matters first."""
    found = []
    for name, kind in _RUNS.items():
        differing = _differing(kind, name, _column(a, name), _column(b, name), matters=True)
        found += [replace(m, because=different_workloads(a, b)) for m in differing] if kind == "workload" else differing
    noted = (*_source(a, b), "os")
    for kind, names in (("hardware", _HARDWARE), ("model", _MODEL), ("versions", _VERSIONS), ("source", noted)):
        for name in names:
            found += _differing(kind, name, _facts(a, name), _facts(b, name), matters=kind != "source")
    return sorted(found, key=lambda m: not m.matters)


def _source(a: Results, b: Results) -> tuple[str, ...]:
    """Facts that tell whether the code was the same: another commit of the same code says nothing."""
    codes = (_facts(a, CODE_KEY), _facts(b, CODE_KEY))
    if not all(codes):
        return _SOURCE
    return () if codes[0] == codes[1] else (*_SOURCE, CODE_KEY)


def _differing(kind: str, name: str, a: set[str], b: set[str], matters: bool) -> list[Mismatch]:
    if a == b:
        return []
    return [Mismatch(kind, name, _shown(a), _shown(b), matters and bool(a) and bool(b))]


def _column(results: Results, name: str) -> set[str]:
    known = results.runs.loc[results.runs["status"] == "ok", name].dropna()
    # cuda:0 and cuda:1 are the same kind of device
    return {str(v).split(":")[0] if name == "device" else str(v) for v in known}


def _facts(results: Results, key: str) -> set[str]:
    ok = set(results.runs.loc[results.runs["status"] == "ok", "run_id"])
    environment = results.tables["environment"]
    rows = environment[(environment["key"] == key) & environment["run_id"].isin(ok)]
    return {str(value) for text in rows["value"].dropna() if (value := decoded(text)) is not None}


def _shown(values: Iterable[str]) -> str:
    return ", ".join(v if len(v) <= 24 else f"{v[:12]}…" for v in sorted(values)) or "unknown"
