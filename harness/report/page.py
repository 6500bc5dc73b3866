"""The frame of the HTML page and its style: no script, no network, phone to print, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1b1d21; --soft: #5a616b; --line: #d9dce1; --tint: #f4f5f7;
  --warn: #8a3c00; --warn-tint: #fdf1e7; --accent: #0072b2; --edge: #0005; }
@media (prefers-color-scheme: dark) { :root { --page: #15171b; --text: #e7e9ec; --soft: #a2a9b3; --line: #363b43;
  --tint: #1e2126; --warn: #ffb47a; --warn-tint: #33241a; --accent: #6bb8e8; --edge: #fff5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .4rem 0; max-width: 46rem; }
.question, .soft, figcaption, dd { color: var(--soft); }
.question { font-size: 1.05rem; }
.headline { font-size: 1.08rem; font-weight: 600; line-height: 1.4; max-width: 60rem; }
.notes { background: var(--warn-tint); border-left: 4px solid var(--warn); padding: .6rem 1rem; margin: 1rem 0; }
.notes ul { margin: .2rem 0; padding-left: 1.1rem; }
/* An edge in shade shows that there is more to scroll to: covers move with the table and hide it at the end. */
.scroll { overflow-x: auto; margin: .5rem 0; scrollbar-width: thin; background:
  linear-gradient(var(--page), var(--page)) left / 1.5rem 100% no-repeat local,
  linear-gradient(var(--page), var(--page)) right / 1.5rem 100% no-repeat local,
  linear-gradient(to right, var(--edge), transparent) left / .8rem 100% no-repeat scroll,
  linear-gradient(to left, var(--edge), transparent) right / .8rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; vertical-align: bottom; background: var(--tint); }
th small, td small { display: block; color: var(--soft); font-weight: 400; white-space: normal; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--page); }
thead th:first-child { background: var(--tint); }
td:first-child { font-weight: 600; min-width: 7rem; }
td { white-space: nowrap; } td:first-child { white-space: normal; }
table.text th, table.text td { text-align: left; white-space: normal; }
table.text td { overflow-wrap: anywhere; min-width: 7rem; max-width: 30rem; }
table.text tr:has(:nth-child(9)) td { min-width: 4rem; } /* many columns are numbers, not prose */
table.text td:first-child { overflow-wrap: break-word; }
.few { opacity: .5; }
.bad { color: var(--warn); font-weight: 600; }
.plots, .beside { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr));
  gap: 1.2rem; }
.plots + .plots { margin-top: 1.2rem; }
.beside { column-gap: 1.2rem; row-gap: 0; } .beside > section { min-width: 0; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; max-width: 40rem; }
figure h3 { margin: 0 0 .2rem; }
figcaption { font-size: .85rem; line-height: 1.4; max-width: 40rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; font-size: .9rem; margin: .5rem 0; }
dt { font-weight: 600; } dd { margin: 0; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; } }
pre, code { font: .85rem/1.45 ui-monospace, monospace; }
pre { background: var(--tint); padding: .7rem .9rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--accent); }
@media print {
  :root { --page: #fff; --text: #000; --soft: #444; --line: #bbb; --tint: #f2f2f2; --warn: #8a3c00; --warn-tint: #fff; }
  html, body { font-size: 9pt; } main, p, figcaption { max-width: none; } main { padding: 0; }
  h2 { break-after: avoid; }
  table { font-size: 7pt; } th, td { padding: .2rem .3rem; } .scroll { overflow: visible; background: none; }
  tr { break-inside: avoid; }
  .wide table { font-size: 6.5pt; } .wide th, .wide td { padding: .15rem .12rem; }
  .wide td:first-child { min-width: 4rem; }
  th:first-child, td:first-child { position: static; }
  details::details-content { content-visibility: visible; } /* paper has nothing to unfold */
  .plots, .beside { grid-template-columns: 1fr 1fr; } .beside .plots { grid-template-columns: 1fr; }
}
"""


def page(title: str, sections: Iterable[str]) -> str:
    """The whole document; ``sections`` are HTML."""
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        "</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A headed part of the page; "" if nothing is in it."""
    body = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>" if body else ""


def notes_box(notes: Sequence[str]) -> str:
    """What a reader must know before believing the numbers, set off from the text; "" if there is nothing."""
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<div class="notes"><strong>Before you believe the numbers</strong><ul>{items}</ul></div>'


def beside(sections: Sequence[str]) -> str:
    """Sections of one picture each, two in a row."""
    return f'<div class="beside">{"".join(sections)}</div>' if len(sections) > 1 else "".join(sections)


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of left-aligned texts, which are escaped here."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return (
        f'<div class="scroll"><table class="text"><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'
    )


def details(summary: str, *parts: str) -> str:
    """Parts that are folded away; "" if there are none."""
    body = "\n".join(part for part in parts if part)
    return f"<details><summary>{escape(summary)}</summary>\n{body}\n</details>" if body else ""
