"""How a real browser draws the HTML report, and what its keyboard and a screen reader get."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from report.browser import CHROMIUM, Browser, browser
from report.run_folders import eval_row, log_rows, record_of
from report.test_page import CUDA, DETAILS, HELD, MARKUP, ROWS, USE, VERDICT

from hwopt.report.page import page_of

CONTRAST = """
(() => {
  const parts = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => {
    const [r, g, b] = parts(colour).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = element => {
    const colour = getComputedStyle(element).backgroundColor;
    return parts(colour)[3] === 0 && element.parentElement ? ground(element.parentElement) : colour;
  };
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    const text = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join("");
    const style = getComputedStyle(element), svg = element instanceof SVGElement;
    const stroked = element.matches("path.line");
    if (!text && !stroked || element.matches("title, desc")) continue;
    const ink = stroked ? style.stroke : svg ? style.fill : style.color;
    const [a, b] = [light(ink), light(ground(element))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), stroked ? 3 : 4.5, text || element.getAttribute("class")]);
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on the path; apt-get install chromium")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two runs, one of them with markup in its name."""
    folder = tmp_path_factory.mktemp("page")
    summary = DETAILS | {"use": USE, "verdict": VERDICT}
    first = record_of(folder / MARKUP.replace("/", "\u2215"), ROWS, summary=summary, plan=CUDA, memory=HELD)
    second = record_of(folder / "second", [*log_rows(20, 150, seed=1), eval_row(100, loss=1.1, f1=0.6)], status=(5, MARKUP))
    path = folder / "report.html"
    path.write_text(page_of([first, second]), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_browser_draws_the_page(chromium: Browser, page: Path, width: int, dark: bool) -> None:
    chromium.requested.clear()
    chromium.errors.clear()
    chromium.open(page, width=width, dark=dark)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    boxes = chromium.evaluate(
        "[...document.querySelectorAll('svg.chart path')].map(e => e.getBoundingClientRect()).map(b => [b.width, b.height])"
    )
    assert len(boxes) >= 12
    assert all(across > 100 for across, _ in boxes)
    assert chromium.evaluate("[...document.querySelectorAll('svg.chart text')].every(e => e.getBoundingClientRect().height > 8)")
    background = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    faint = [(text, ratio) for ratio, least, text in chromium.evaluate(CONTRAST) if ratio < least]
    assert faint == [], "contrast below 4.5 of a text, or below 3 of a line (WCAG 2.2, 1.4.3 and 1.4.11)"
    assert chromium.requested == [page.as_uri()], "nothing else is fetched"
    assert chromium.errors == []
    assert chromium.evaluate("window.hacked") is None


def test_keyboard_opens_a_table_of_values(chromium: Browser, page: Path) -> None:
    chromium.open(page, width=1400, dark=False)
    focused = []
    for _ in range(12):
        chromium.press("Tab", 9)
        focused.append(chromium.evaluate("document.activeElement.textContent.trim() || document.activeElement.ariaLabel"))
        if focused[-1] == "Values of Loss":
            break
    assert focused[-1] == "Values of Loss", focused
    assert chromium.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    chromium.press("Enter", 13)
    assert chromium.evaluate("document.activeElement.parentElement.open") is True


def test_screen_reader_gets_headings_tables_and_charts(chromium: Browser, page: Path) -> None:
    chromium.open(page, width=1400, dark=False)
    found = chromium.accessible()
    names = {role: [name for other, name in found if other == role] for role, _ in found}
    assert [name for name in names["heading"] if name in ("Verdicts", "Figures", "Differences", "Course of the training")]
    levels = chromium.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(e => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    charts = [name for role in ("image", "img", "graphics-document") for name in names.get(role, [])]
    assert "Loss over the steps" in charts
    assert len(charts) == chromium.evaluate("document.querySelectorAll('svg.chart, svg.bar').length")
    assert all(names["table"]), "each table has a name"
    assert chromium.evaluate("[...document.querySelectorAll('th')].every(e => e.scope)")
    assert chromium.evaluate("document.documentElement.lang") == "en"
