"""What ``stages.sh`` measured as committed reference: tables, one picture an experiment, a README a model.

usage: python results/reference/h200/keep_stages.py RESULTS [TARGET]      (TARGET: stages/ beside this file)
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pandas as pd
from rich.console import Console

from harness.manifest import FILE as MANIFEST
from harness.report import print_summary, write_report
from harness.report.read import facts, read_results
from harness.store import is_result

TABLES = ("runs", "config", "environment", "counters", "memory_ledger", "tails", "calibration", "requests", "steps")
LARGEST = 300_000
"""Bytes of a table that is kept; larger step logs and request tables are left out."""
PICTURES = {
    "num_blocks": "ttft_p95_ms-vs-variable",
    "max_batch_tokens": "itl_p99_ms-vs-variable",
    "graphs_vs_async": "itl-cdf",
    "scheduler": "itl-cdf",
    "safety_margin": "itl-cdf",
    "cpu_offload": "itl-cdf",
    "prefix_sharing": "ttft-cdf",
    "page_size": "ttft-cdf",
}
"""What shows the answer; of the other experiments the throughput."""


def keep(source: Path, target: Path) -> str:
    """Copy one experiment; its section of the README."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / MANIFEST, target / MANIFEST)
    for table in (source / f"{name}.parquet" for name in TABLES):
        if table.stat().st_size <= LARGEST:
            shutil.copy(table, target / table.name)
    environment = pd.read_parquet(target / "environment.parquet")
    environment["value"] = [
        without_paths(value) if key == "env" else value
        for key, value in zip(environment["key"], environment["value"], strict=True)
    ]
    environment.to_parquet(target / "environment.parquet", compression="zstd", index=False)

    write_report(source)  # of all tables, with the distributions that need each gap
    picture = f"{PICTURES.get(target.name, 'throughput')}.svg"
    shown = (source / "plots" / picture).is_file()
    if shown:
        (target / "plots").mkdir(exist_ok=True)
        shutil.copy(source / "plots" / picture, target / "plots" / picture)

    text = io.StringIO()
    print_summary(target, Console(file=text, width=1000, no_color=True))
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    question = next((str(q) for q in facts(read_results(target), "identity.question") if q), "")
    table = [line for line in lines if line.startswith("|")]
    said = [f"- {line.removeprefix('! ')}" for line in lines[1:] if line and not line.startswith(("|", "! telemetry"))]
    parts = [f"## {target.name}", question, "\n".join(table), "\n".join(said)]
    parts += [f"![{question}]({target.name}/plots/{picture})"] if shown else []
    return "\n\n".join(part for part in parts if part)


def without_paths(variables: str) -> str:
    """Recorded environment variables without those that name a folder of that machine."""
    kept = {name: value for name, value in json.loads(variables).items() if not str(value).startswith("/")}
    return json.dumps(kept)


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    target = Path(sys.argv[2]) if len(sys.argv) == 3 else Path(__file__).parent / "stages"
    for model in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
        measured = sorted(path for path in model.iterdir() if is_result(path))
        if sections := [keep(source, target / model.name / source.name) for source in measured]:
            head = f"# {model.name}: the stages of the measurement plan\n\nTimes in ms."
            (target / model.name / "README.md").write_text("\n\n".join([head, *sections]) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
