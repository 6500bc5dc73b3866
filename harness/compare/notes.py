"""What the report of each set says against its numbers, carried over to a comparison of the two."""

from __future__ import annotations

from dataclasses import replace

from harness.compare.pairing import Pairing
from harness.report.arms import Arm
from harness.report.read import Results
from harness.report.validity import validity_notes


def notes_of(a: Results, b: Results, pairing: Pairing) -> list[str]:
    """One line a note, begun with the set it is of; it names the arms it holds for."""
    sides = (("A", a, [pair.a for pair in pairing.pairs]), ("B", b, [pair.b for pair in pairing.pairs]))
    return [
        f"{name}: {note}"
        for name, results, arms in sides
        for note in (*validity_notes(results, [_named(arm, name, arms) for arm in arms], greyed=False), *results.notes)
    ]


def _named(arm: Arm, side: str, among: list[Arm]) -> Arm:
    """``arm`` as its own report calls it: without the letter of its set, or a facet that tells nothing apart."""
    alone = len({other.facet for other in among}) == 1
    return replace(arm, series=arm.series.removeprefix(f"{side}: "), facet="" if alone else arm.facet)
