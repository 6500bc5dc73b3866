"""``cb-compare A B``: paired ratios and verdicts of two result sets, or what keeps them from being compared."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape as plain
from rich.table import Table

from harness import manifest
from harness.analysis.comparison import Finding, tests_in, write_comparison
from harness.analysis.verdict import Thresholds, Verdict
from harness.compare.compatibility import Mismatch, mismatches
from harness.compare.notes import notes_of
from harness.compare.pairing import Pair, Pairing, findings_of, pair_arms
from harness.report.config_diff import DERIVED, key_of
from harness.report.page import notes_box, page, section, text_table
from harness.report.quantity import UNKNOWN, in_unit, times
from harness.report.read import ResultsError, read_results
from harness.report.results_table import metric_name
from harness.report.verdicts import interval_in_words
from harness.streams import open_closed
from harness.tables import column

EXIT_CONFOUNDED, EXIT_REFUSED = 1, 2
_HEADERS = ("metric", "A", "B", "ratio", "95 %", "pairs", "p (Holm)", "verdict", "why")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: compared; 1: compared, but confounded; 2: refused, with the reasons on standard error."""
    open_closed()
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        a, b = read_results(args.a), read_results(args.b)
        differing = mismatches(a, b)
        refusing = [m for m in differing if m.matters]
        if refusing and not args.force:
            for mismatch in refusing:
                print(f"cb-compare: {mismatch.in_words()}", file=sys.stderr)
            n = len(refusing)
            print(
                f"cb-compare: not compared, {n} difference{'s' if n > 1 else ''} could explain any result; measure "
                "both alike, or use --force to compare all the same",
                file=sys.stderr,
            )
            return EXIT_REFUSED
        pairing = pair_arms(a, b, args.variable, args.arm_a, args.arm_b, frozenset(m.name for m in refusing))
        apart = command_of(args.a) != command_of(args.b)
        findings = findings_of(pairing)
        out = args.out or args.b / "comparisons" / default_name(args.a, args.arm_a, args.arm_b)
        write_comparison(out, findings)
        folders = _folders(args.a, args.b)
        said = remarks(differing, pairing, apart, folders)
        notes = notes_of(a, b, pairing)
        text = _page(args.a, args.b, said, notes, differing, pairing, findings)
        (out / "comparison.html").write_text(text, encoding="utf-8")
    except (ResultsError, ValueError, OSError) as error:
        print(f"cb-compare: {error}", file=sys.stderr)
        return EXIT_REFUSED
    if args.json:
        print(json.dumps(_as_json(differing, pairing, findings, notes), indent=1))
    else:
        _print([*said, *notes], pairing, findings, folders)
        print(f"\ntables and page: {out}")
    return EXIT_CONFOUNDED if any(f.verdict == Verdict.CONFOUNDED for f in findings) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cb-compare",
        description="Compare result set B with A: runs are paired by requests, seed and repeat; ratios are B over A.",
    )
    parser.add_argument("a", type=Path, metavar="A", help="a run folder or the root folder of a sweep: the baseline")
    parser.add_argument("b", type=Path, metavar="B", help="the one that is judged")
    parser.add_argument("--arm-a", metavar="NAME", help="take only this engine or value of A")
    parser.add_argument("--arm-b", metavar="NAME", help="take only this engine or value of B")
    parser.add_argument(
        "--variable",
        metavar="KEY[,KEY]",
        help="what is compared, e.g. engine.page_size or page_size; default: the one setting that differs",
    )
    parser.add_argument("--force", action="store_true", help="compare although requests, seeds, machine … differ")
    parser.add_argument("--json", action="store_true", help="print differences and findings as JSON")
    parser.add_argument(
        "--out", type=Path, help="where to write; default: B/comparisons/NAME_OF_A, with the arms that are named"
    )
    return parser


def default_name(a: Path, arm_a: str | None, arm_b: str | None) -> str:
    """Folder of a comparison with ``a``: each pair of arms of the same two sets has its own."""
    arms = [f"{side}={arm}" for side, arm in (("arm-a", arm_a), ("arm-b", arm_b)) if arm is not None]
    return ",".join((a.resolve().name, *(re.sub(r"[^\w.=,+-]+", "_", arm) for arm in arms)))


def command_of(directory: Path) -> Path:
    """The folder of the command that measured what is in ``directory``: the sweep's for one of its runs."""
    path = directory.resolve()
    return next((p for p in (path, *path.parents) if (p / manifest.FILE).is_file()), path)


def _folders(a: Path, b: Path) -> tuple[str, str]:
    """What the two sets are called: by their folders' names, or as they were given where those are alike."""
    names = a.resolve().name, b.resolve().name
    return names if names[0] != names[1] else (str(a), str(b))


def _sides(pair: Pair, folders: tuple[str, str]) -> tuple[str, str]:
    """What the two arms of a pair are called; by their folders where their own names are alike."""
    a, b = pair.a.series, pair.b.series
    if a.removeprefix("A: ") != b.removeprefix("B: "):
        return a, b
    return f"A ({folders[0]})", f"B ({folders[1]})"


def remarks(differing: Sequence[Mismatch], pairing: Pairing, apart: bool, folders: tuple[str, str]) -> list[str]:
    """What a reader must know besides the numbers, a sentence each.

    Args:
        apart: whether the two sets were measured by different commands.
        folders: what the sets are called.
    """
    source = any(m.kind == "source" for m in differing)
    lines = [("" if m.matters else "noted, ") + m.in_words() for m in differing]
    lines += pairing.unmatched
    for pair in pairing.pairs:
        a, b = _sides(pair, folders)
        if pair.variable is not None:
            lines.append(f"{a} against {b}: compared is {pair.variable}")
        elif not pair.confounded:
            code = "the code does" if source else "nor does the code, as far as recorded: the same was measured twice"
            lines.append(f"{a} against {b}: no setting differs, {'but ' if source else ''}{code}")
        derived = [key_of(d.field) for d in pair.differences if d.kind == DERIVED]
        if derived:
            lines.append(f"{b}: derived from other settings: {', '.join(derived)}")
        if pair.confounded:
            names = [*(pair.variable.split(",") if pair.variable else []), *pair.confounded]
            lines.append(
                f"{b}: confounded by {', '.join(pair.confounded)}. Measure again with one setting changed, or compare "
                f"them together: --variable {','.join(names)}"
            )
    if apart:
        lines.append("The two sets were measured apart: block i of one did not run beside block i of the other.")
    return lines


def _print(said: Sequence[str], pairing: Pairing, findings: Sequence[Finding], folders: tuple[str, str]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=200, no_color=True)
    for shown in _tables(pairing, findings, folders):
        table = Table(
            title=plain(shown.title),
            title_justify="left",
            box=box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN,
        )
        for header in shown.header:
            table.add_column(header, justify="left" if header in ("metric", "verdict", "why") else "right")
        for row in shown.rows:
            table.add_row(*map(plain, row))
        console.print(table)
        for line in shown.below:
            console.print(plain(line), highlight=False)
        console.print()
    for line in said:
        console.print(plain(f"! {line}"), highlight=False)


@dataclass(frozen=True, slots=True)
class _Shown:
    """The table of a pair, and below it a reason that all its metrics share and the rule of its verdicts."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    below: Sequence[str]


def _tables(pairing: Pairing, findings: Sequence[Finding], folders: tuple[str, str]) -> Iterator[_Shown]:
    for pair in pairing.pairs:
        own = [f for f in findings if (f.facet, f.arm) == (pair.facet, pair.b.series)]
        a, b = _sides(pair, folders)
        reasons = {f.reason for f in own}
        is_shared = len(reasons) == 1 < len(own)  # it is about the pairs, not the metric
        header = _HEADERS[:-1] if is_shared else _HEADERS
        below = [f"verdict {own[0].verdict or 'none'} in every metric: {own[0].reason}"] if is_shared else []
        below += [Thresholds().in_words(tests)] if (tests := tests_in(own)) else []
        yield _Shown(f"{pair.facet}: {b} over {a}", header, [_cells(f)[: len(header)] for f in own], below)


def _cells(f: Finding) -> list[str]:
    unit = column("runs", f.metric).unit
    return [
        metric_name(f.metric),
        in_unit(f.baseline_median, unit),
        in_unit(f.arm_median, unit),
        UNKNOWN if f.ratio is None else times(f.ratio),
        interval_in_words(f),
        str(f.pairs),
        UNKNOWN if f.p_holm is None else f"{f.p_holm:.2g}",
        f.verdict or "none",
        f.reason,
    ]


def _as_json(
    differing: Sequence[Mismatch], pairing: Pairing, findings: Sequence[Finding], notes: Sequence[str]
) -> dict[str, Any]:
    return {
        "notes": list(notes),
        "differences": [asdict(m) for m in differing],
        "unmatched": list(pairing.unmatched),
        "pairs": [
            {
                "facet": p.facet,
                "a": p.a.series,
                "b": p.b.series,
                "variable": p.variable,
                "confounded": list(p.confounded),
                "settings": [{"field": d.field, "role": d.kind, "values": d.values} for d in p.differences],
            }
            for p in pairing.pairs
        ],
        "findings": [asdict(f) for f in findings],
    }


def _page(
    a: Path,
    b: Path,
    said: Sequence[str],
    notes: Sequence[str],
    differing: Sequence[Mismatch],
    pairing: Pairing,
    findings: Sequence[Finding],
) -> str:
    title = f"{b.resolve().name} against {a.resolve().name}"
    rows = [[m.kind, m.name, m.a, m.b, "yes" if m.matters else "no", m.because or ""] for m in differing]
    tables = [
        f"<h3>{escape(shown.title)}</h3>{text_table(shown.header, shown.rows)}"
        + "".join(f'<p class="soft">{escape(line)}</p>' for line in shown.below)
        for shown in _tables(pairing, findings, _folders(a, b))
    ]
    return page(
        title,
        [
            f"<h1>{escape(title)}</h1>" + "".join(f"<p>{escape(line)}</p>" for line in said) + notes_box(notes),
            section("Comparison", *tables),
            section("What differs", text_table(["kind", "fact", "A", "B", "matters", "because of"], rows))
            if rows
            else "",
        ],
    )


if __name__ == "__main__":
    raise SystemExit(main())
