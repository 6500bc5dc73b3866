"""``cb-workload``: look at a workload before anything is measured with it, and make tables of lengths.

``describe`` composes the groups of ``cb-bench`` (workload, arrival, model for its vocabulary, measure for its seed),
builds the workload and prints what it is; ``lengths`` makes of a ShareGPT file a table for ``workload=length_table``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.compose import composing, load
from harness.config import group_options
from harness.config_errors import explain_config_error
from harness.errors import one_line
from harness.expand import checked, dotted_keys
from harness.streams import open_closed
from workloads.build import check_sources
from workloads.describe import Description, LengthSummary, describe
from workloads.workload import Workload

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on standard error for what is wrong."""
    open_closed()
    args = _parser().parse_args(argv)
    logging.getLogger("workloads").addHandler(logging.NullHandler())  # what is left out is in the description
    try:
        with composing("cb-workload") as loader:
            config = _composed(loader, args.overrides)
        if args.command == "lengths":
            _lengths(args, config)
        else:
            _describe(args, config)
        return 0
    except (ValueError, OSError) as error:
        print(f"cb-workload: {one_line(error)}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cb-workload", description="Look at workloads without running them.")
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser(
        "describe",
        help="counts, rate, burstiness, lengths and prefix reuse of a workload, with plots",
        epilog="example: cb-workload describe workload=mixed_staged arrival=gamma arrival.rate=4 arrival.cv=3",
    )
    shown.add_argument("--json", action="store_true", help="print JSON instead of the summary")
    shown.add_argument(
        "--out", type=Path, default=None, help="folder for the plots (default: results/workloads/NAME-HASH)"
    )
    shown.add_argument("--no-plots", action="store_true", help="draw nothing")
    table = commands.add_parser(
        "lengths",
        help="lengths of the first question and answer of each ShareGPT conversation, as a csv",
        epilog="example: cb-workload lengths ShareGPT_V3.json lengths.csv model=qwen3-4b",
    )
    table.add_argument("conversations", type=Path, help="ShareGPT file (a JSON list of conversations)")
    table.add_argument("table", type=Path, help="csv to write")
    for command in (shown, table):
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for cb-bench: workload=…, model=…")
    return parser


def _composed(loader: ConfigLoader, overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration of cb-bench under ``overrides``; ValueError in one line for a wrong one."""
    try:
        return checked(load(loader, overrides))
    except (HydraException, OmegaConfBaseException) as error:
        keys = dotted_keys(OmegaConf.to_container(load(loader, []), resolve=False))
        raise ValueError(explain_config_error(error, group_options(loader), keys)) from error


def _describe(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    check_sources(config["workload"], config["arrival"])  # before the model's tokenizer is loaded
    _say_what_is_read(config["model"])
    workload = build(config)
    described = describe(workload)
    if args.json:
        print(json.dumps(described.as_dict(), indent=2))
    else:
        print(summary(described))
    if not args.no_plots:
        from harness.report.plots.workload import workload_plots

        name = f"{workload.name}-{workload.content_hash[:8]}"
        directory = args.out or Path(config["results_dir"]) / "workloads" / name
        plots = workload_plots(workload, described, directory)
        print(
            f"plots: {directory} ({', '.join(plot.name for plot in plots)})",
            file=sys.stderr if args.json else sys.stdout,
        )


def _say_what_is_read(model: Mapping[str, Any]) -> None:
    """What the next seconds are for: what reads a tokenizer takes that long to import."""
    print(f"cb-workload: reading the vocabulary of {model['name']}, some seconds", file=sys.stderr)


def build(config: Mapping[str, Any]) -> Workload:
    """The workload that ``cb-bench`` builds of the same configuration; of its model only the outline is loaded."""
    from harness.models import ModelSpec, outline_model
    from harness.preparation import workload_of

    return workload_of(config, outline_model(ModelSpec(**config["model"])))


def summary(d: Description) -> str:
    """The description as lines of text."""
    if d.rate_request_s is not None:
        burstiness = "" if d.gap_cv is None else f", gaps with CV {d.gap_cv:.2f} (constant 0, Poisson 1)"
        rate = f"{d.rate_request_s:.4g} requests/s over {d.duration_s:.4g} s{burstiness}"
    elif d.waiting_requests:
        rate = f"set by the engine: {d.waiting_requests} requests wait for the end of another"
    else:
        rate = "all at once"
    requests = str(d.requests)
    if d.sessions != d.requests:
        requests += f" in {d.sessions} sessions"
    if d.concurrency is not None:
        requests += f", closed loop of {d.concurrency}"
    lines = [
        f"workload   {d.name}  {d.content_hash[:16]}",
        f"requests   {requests}",
        f"rate       {rate}",
        f"prompts    {_shown(d.prompt_tokens)}",
        f"answers    {_shown(d.output_tokens)}",
        "prefix     " + ", ".join(f"{share:.1%} at block size {size}" for size, share in d.prefix_reuse.items()),
        "           of prompt tokens, from a cache without limit, if each request ends before the next is sent",
    ]
    return "\n".join([*lines, *(f"note       {note}" for note in d.notes)])


def _shown(lengths: LengthSummary) -> str:
    return (
        f"p50 {_percentile(lengths.p50)}, p95 {_percentile(lengths.p95)}, max {lengths.max:,}, "
        f"mean {lengths.mean:,.1f}, {lengths.total:,} tokens in all"
    )


def _percentile(tokens: float) -> str:
    """Between two lengths a percentile is no whole number."""
    return f"{tokens:,.1f}".removesuffix(".0")


def _lengths(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    from harness.models import ModelSpec, outline_model
    from workloads.sharegpt import write_length_table

    _say_what_is_read(config["model"])
    tokenizer = outline_model(ModelSpec(**config["model"])).tokenizer
    if tokenizer is None:
        raise ValueError(f"model {config['model']['name']!r} has no tokenizer: choose one that has, model=…")
    written, left_out = write_length_table(args.conversations, tokenizer, args.table)
    print(f"{args.table}: {written} rows; {left_out} conversations without a question and an answer are left out")
    print(f"use it: cb-bench workload=length_table workload.path={args.table}")


if __name__ == "__main__":
    raise SystemExit(main())
