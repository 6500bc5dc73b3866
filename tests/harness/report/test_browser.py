"""The page as a browser shows it: nothing runs off a phone, nothing is fetched, every picture has a size."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.report import write_report
from harness.report.page import details, section, text_table
from harness.report.page import page as whole_page

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in _NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium in the PATH (Debian: apt-get install chromium)")

# Laid around the page, because the page itself has no script and Chromium's window is never narrower than 500 px: a
# frame of any width, and what its document makes of it.
PROBE = """<body style="margin:0"><iframe id="f" width="WIDTH" height="900" style="border:0"></iframe>
<script>
const frame = document.getElementById("f");
frame.onload = () => {
  const view = frame.contentWindow, doc = frame.contentDocument;
  const right = e => e.getBoundingClientRect().right;
  const free = [...doc.querySelectorAll("main *")].filter(e => !e.closest(".scroll, svg, details, pre"));
  const pictures = [...doc.querySelectorAll("figure svg")];
  document.body.dataset.found = JSON.stringify({
    width: view.innerWidth,
    room: doc.documentElement.clientWidth,
    scroll: doc.documentElement.scrollWidth,
    wide: free.filter(e => right(e) > doc.documentElement.clientWidth + 1).map(e => e.tagName),
    pictures: pictures.length,
    flat: pictures.filter(s => s.getBoundingClientRect().height < 40).length,
    // texts of a picture in the reader's own font, and tables that scroll inside their own box
    cut: pictures.flatMap(s => [...s.querySelectorAll("text")].filter(t => {
      const box = s.getBoundingClientRect(), text = t.getBoundingClientRect();
      return text.left < box.left - 1 || text.right > box.right + 1 || text.bottom > box.bottom + 1;
    }).map(t => t.textContent)),
    scrolled: [...doc.querySelectorAll("section > .scroll.wide")].map(e => e.scrollWidth - e.clientWidth),
    fetched: view.performance.getEntriesByType("resource").length,
    page: view.getComputedStyle(doc.body).backgroundColor,
  });
};
frame.srcdoc = document.getElementById("page").textContent;
</script></body>"""


def seen(page: Path, folder: Path, width: int, *flags: str) -> dict[str, Any]:
    """What the probe found in a frame of ``width`` px."""
    around = folder / f"probe-{width}-{len(flags)}.html"
    text = json.dumps(page.read_text()).replace("</", "<\\/")
    script = PROBE.replace("WIDTH", str(width)).replace('document.getElementById("page").textContent', text)
    around.write_text(f'<!doctype html><meta charset="utf-8">{script}')
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
         "--virtual-time-budget=5000", "--window-size=1400,1000", *flags, "--dump-dom", around.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(html.unescape(found[1]))
    return answer


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_runs_off_the_page_and_every_picture_is_drawn(width: int, rates_dir: Path, tmp_path: Path) -> None:
    found = seen(write_report(rates_dir), tmp_path, width)
    assert found["width"] == width
    assert found["scroll"] == found["room"]  # what the scroll bar leaves
    assert found["wide"] == []
    assert found["flat"] == 0
    assert found["cut"] == []
    assert found["fetched"] == 0
    assert int(str(found["pictures"])) >= 8


def test_the_results_fit_a_window_of_1200_px(engines_dir: Path, rates_dir: Path, tmp_path: Path) -> None:
    for directory, tables in ((engines_dir, 2), (rates_dir, 1)):
        page = write_report(directory)
        found = seen(page, tmp_path, 1200)
        assert found["scrolled"] == [0] * tables
        assert found["cut"] == []
    assert max(seen(page, tmp_path, 390)["scrolled"]) > 0  # on a phone, inside its own box


def test_dark_where_the_reader_is_dark(single_dir: Path, tmp_path: Path) -> None:
    page = write_report(single_dir)
    assert seen(page, tmp_path, 800)["page"] == "rgb(255, 255, 255)"
    dark = seen(page, tmp_path, 800, "--blink-settings=preferredColorScheme=0")
    assert dark["page"] == "rgb(21, 23, 27)"


def test_a_table_of_many_columns_fits_a_window_of_1300_px(tmp_path: Path) -> None:
    words = ("none: non stationary (the rate of arrivals changes within the window)", *["19.7"] * 9)
    table = text_table([f"ITL p{k} ms, steady" for k in range(11)], [["round robin", *words]])
    table = table.replace("scroll", "scroll wide")  # what the probe looks at
    (tmp_path / "page.html").write_text(whole_page("plan", [section("Behind a router", table)]))
    assert seen(tmp_path / "page.html", tmp_path, 1300)["scrolled"] == [0]


@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="no pdftotext (Debian: apt-get install poppler-utils)")
def test_what_is_folded_is_printed(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(whole_page("report", [details("Every setting", "<p>page_size 16</p>")]))
    printed = tmp_path / "page.pdf"
    subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         f"--print-to-pdf={printed}", (tmp_path / "page.html").as_uri()],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    text = subprocess.run(["pdftotext", str(printed), "-"], capture_output=True, text=True, check=True).stdout
    assert "page_size 16" in text
