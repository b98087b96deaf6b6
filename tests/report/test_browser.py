"""How a real browser draws the HTML report, and what a keyboard and a screen reader find in it."""

import html
import json
import re
import shutil
import subprocess
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

import pytest
from report.run_folders import eval_row, log_rows, record_of
from report.test_page import CUDA, DETAILS, HELD, MARKUP, ROWS, USE, VERDICT

from hwopt.report.page import page_of

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=2000", "--dump-dom")
VIEWS = [(width, theme) for width in (400, 1400) for theme in ("light", "dark")]
PAPER = {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}
EXAMINE = """
const parts = colour => colour.match(/[\\d.]+/g).map(Number);
const light = colour => {
  const [r, g, b] = parts(colour).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const examine = frame => {
  const view = frame.contentWindow, page = view.document, all = query => [...page.querySelectorAll(query)];
  const style = element => view.getComputedStyle(element);
  const ground = element => {
    const colour = style(element).backgroundColor;
    return parts(colour)[3] === 0 && element.parentElement ? ground(element.parentElement) : colour;
  };
  const faint = element => {
    const text = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join("");
    const stroked = element.matches("path.line"), svg = element instanceof view.SVGElement;
    if (!text && !stroked || element.matches("title, desc")) return false;
    const ink = stroked ? style(element).stroke : svg ? style(element).fill : style(element).color;
    const [a, b] = [light(ink), light(ground(element))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05) < (stroked ? 3 : 4.5);
  };
  const summary = all("summary").find(e => e.textContent === "Values of Loss");
  summary.focus();
  summary.click();
  return {
    width: page.documentElement.scrollWidth,
    paper: style(page.body).backgroundColor,
    lines: all("svg.chart path").map(e => e.getBoundingClientRect().width),
    texts: all("svg.chart text").map(e => e.getBoundingClientRect().height),
    faint: all("body *").filter(faint).map(e => e.outerHTML),
    fetched: view.performance.getEntriesByType("resource").map(e => e.name),
    hacked: view.hacked !== undefined,
    outline: style(summary).outlineStyle,
    opened: summary.parentElement.open,
    levels: all("h1, h2, h3").map(e => Number(e.tagName[1])),
    charts: all("svg[role=img]").map(e => page.getElementById(e.getAttribute("aria-labelledby")).textContent),
    captions: all("table").map(e => e.caption ? e.caption.textContent : e.parentElement.ariaLabel),
    scopes: all("th").map(e => e.scope),
    language: page.documentElement.lang,
  };
};
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(examine);
  document.body.textContent = encodeURIComponent(JSON.stringify(found));
};
"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], dict[str, Any]]:
    """(width, theme) -> what a browser shows of the report of two runs, one of them with markup in its name."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on the path; apt-get install chromium")
    folder = tmp_path_factory.mktemp("page")
    summary = DETAILS | {"use": USE, "verdict": VERDICT}
    first = record_of(folder / MARKUP.replace("/", "\u2215"), ROWS, summary=summary, plan=CUDA, memory=HELD)
    second = record_of(folder / "second", [*log_rows(20, 150, seed=1), eval_row(100, loss=1.1, f1=0.6)], status=(5, MARKUP))
    page = html.escape(page_of([first, second]))
    frames = [
        f'<iframe srcdoc="{page}" style="width: {width}px; border: 0; color-scheme: {theme}"></iframe>' for width, theme in VIEWS
    ]
    path = folder / "frames.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{''.join(frames)}<script>{EXAMINE}</script>", encoding="utf-8")
    command = [CHROMIUM, *ARGUMENTS, f"--user-data-dir={folder / 'profile'}", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"<body>(.*)</body>", shown, re.DOTALL)
    assert found is not None, shown
    return dict(zip(VIEWS, json.loads(unquote(found[1])), strict=True))


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_browser_draws_the_page(view: tuple[int, str], drawn: dict[tuple[int, str], dict[str, Any]]) -> None:
    found = drawn[view]
    assert found["width"] <= view[0]
    assert found["paper"] == PAPER[view[1]]
    assert len(found["lines"]) >= 12
    assert min(found["lines"]) > 100
    assert min(found["texts"]) > 8
    assert found["faint"] == [], "contrast below 4.5 of a text, or below 3 of a line (WCAG 2.2, 1.4.3 and 1.4.11)"
    assert found["fetched"] == []
    assert not found["hacked"]
    assert (found["outline"], found["opened"]) == ("solid", True), "the focus is visible, and the values can be opened"


def test_screen_reader_gets_headings_tables_and_charts(drawn: dict[tuple[int, str], dict[str, Any]]) -> None:
    found = drawn[1400, "light"]
    assert found["levels"][0] == 1
    assert all(after <= before + 1 for before, after in pairwise(found["levels"]))
    assert "Loss over the steps" in found["charts"]
    assert all(found["charts"])
    assert all(found["captions"]), "each table has a name"
    assert all(found["scopes"])
    assert found["language"] == "en"
