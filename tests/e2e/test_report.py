"""The report in a real browser: nothing fetched, nothing broken, every figure drawn, nothing cut off."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.chromium import Connection, Page, browser, find_chromium, new_page
from tests.fakes import studies
from tuner.report.html import render

CHROMIUM = find_chromium()
KINDS = ["normal", "simulated", "hostile", "failures_only", "null_metrics", "many"]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        CHROMIUM is None and os.environ.get("CI") != "true", reason="no Chromium here (Debian package chromium)"
    ),
]

OVERFLOWING = """[...document.querySelectorAll('main *')].filter(e => {
  if (e.closest('.js-plotly-plot') || e.closest('.scroll') || e.closest('details:not([open])')) return false;
  const box = e.getBoundingClientRect();
  return box.width > 0 && box.right > document.documentElement.clientWidth + 1;
}).map(e => e.tagName + '.' + e.className + '#' + e.id)"""
CUT_TABLES = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
DRAWN = """[...document.querySelectorAll('[data-figure]')].map(e => ({
  key: e.dataset.figure,
  marks: e.querySelectorAll('.points path, .point path, path.js-line').length,
  inside: [...e.querySelectorAll('svg.main-svg')].every(s => s.getBoundingClientRect().width <= e.clientWidth + 1),
}))"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Connection]:
    assert CHROMIUM is not None, "CI has to install Debian's package chromium"
    async with browser(CHROMIUM, tmp_path_factory.mktemp("chromium")) as connection:
        yield connection


@pytest_asyncio.fixture(loop_scope="module")
async def page(chromium: Connection) -> AsyncIterator[Page]:
    async with new_page(chromium) as tab:
        await tab.resize(1280, 900)
        yield tab


def written(kind: str, folder: Path) -> str:
    path = folder / f"{kind}.html"
    path.write_text(render(studies.ALL[kind]()), encoding="utf-8")
    return path.as_uri()


async def keep(page: Page, name: str) -> None:
    """A picture for people to look at, where the environment names a folder for them."""
    folder = os.environ.get("CHUNKTUNE_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        await page.screenshot(Path(folder) / f"{name}.png")


@pytest.mark.parametrize("kind", KINDS)
async def test_the_page_is_whole_and_asks_for_nothing(page: Page, tmp_path: Path, kind: str) -> None:
    url = written(kind, tmp_path)
    await page.open(url)
    await keep(page, f"{kind}-1280")
    assert page.problems == []
    assert [r for r in page.requests if not r.startswith(("data:", "blob:", "about:"))] == [url]
    for figure in await page.evaluate(DRAWN):
        assert figure["marks"] > 0, f"{figure['key']} is empty"
        assert figure["inside"], f"{figure['key']} is wider than its place"
    assert await page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert await page.evaluate(OVERFLOWING) == []
    assert await page.evaluate(CUT_TABLES) == 0


async def test_a_finished_study_draws_every_figure(page: Page, tmp_path: Path) -> None:
    await page.open(written("normal", tmp_path))
    keys = [f["key"] for f in await page.evaluate(DRAWN)]
    assert keys == [
        "ttft-by-chunk",
        "itl-by-chunk",
        "contrasts",
        "rounds",
        "ttft-distribution",
        "memory-over-time",
        "utilisation-over-time",
        "prefix-hit-rate-by-chunk",
        "prefill-chunks-per-request-by-chunk",
        "pareto",
        "importance",
        "time",
    ]


async def test_dark_mode_recolours_page_and_figures(page: Page, tmp_path: Path) -> None:
    await page.color_scheme("light")
    await page.open(written("normal", tmp_path))
    seen = "[getComputedStyle(document.body).backgroundColor, document.querySelector('path.js-line').style.stroke]"
    light = await page.evaluate(seen)
    await page.color_scheme("dark")
    await page.wait_for("getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 27)'")
    await page.wait_for(f"document.querySelector('path.js-line').style.stroke !== '{light[1]}'")
    await keep(page, "normal-dark")
    dark = await page.evaluate(seen)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    assert page.problems == []


@pytest.mark.parametrize("kind", ["normal", "simulated", "failures_only"])
async def test_it_prints_on_a4_without_overflow(page: Page, tmp_path: Path, kind: str) -> None:
    await page.color_scheme("dark")
    await page.open(written(kind, tmp_path))
    folder = Path(os.environ.get("CHUNKTUNE_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    pdf = await page.pdf(folder / f"{kind}.pdf")
    assert pdf.startswith(b"%PDF")
    # The same layout where it can be measured: print media at the width between A4's margins.
    await page.resize(696, 1000)
    await page.send("Emulation.setEmulatedMedia", media="print")
    await page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert await page.evaluate("document.documentElement.scrollWidth") <= 696
    assert await page.evaluate(OVERFLOWING) == []
    wider = "[...document.querySelectorAll('.scroll table')].filter(t => t.getBoundingClientRect().right > 697).length"
    assert await page.evaluate(wider) == 0
    assert all(f["inside"] for f in await page.evaluate(DRAWN))


async def test_hover_names_the_setting(page: Page, tmp_path: Path) -> None:
    await page.open(written("normal", tmp_path))
    await page.evaluate("document.querySelector('[data-figure=ttft-by-chunk]').scrollIntoView({block: 'center'})")
    place = await page.evaluate(
        "(() => { const b = document.querySelector('[data-figure=ttft-by-chunk] .points path')"
        ".getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=place[0] - 1, y=place[1])
    await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    await page.wait_for("document.querySelector('[data-figure=ttft-by-chunk] .hovertext') !== null")
    shown = await page.evaluate("document.querySelector('[data-figure=ttft-by-chunk] .hovertext').textContent")
    assert "chunk 64" in shown


async def test_a_hostile_name_is_text(page: Page, tmp_path: Path) -> None:
    await page.open(written("hostile", tmp_path))
    assert "owned" not in (await page.evaluate("document.title")).split(",")[0].replace(studies.HOSTILE, "")
    assert await page.evaluate("document.querySelectorAll('img').length") == 0
    assert await page.evaluate("document.querySelectorAll('script').length") == 3
    text = await page.evaluate("document.querySelector('h1').textContent")
    assert studies.HOSTILE in text


async def test_copy_takes_the_whole_command(page: Page, tmp_path: Path) -> None:
    await page.open(written("normal", tmp_path))
    await page.evaluate(
        "navigator.clipboard.writeText = async (text) => { window.copied = text; };"
        "document.querySelector('[data-copies=command]').click()"
    )
    copied = await page.evaluate("window.copied")
    assert copied.startswith("vllm serve meta-llama/Llama-3.1-70B-Instruct \\\n  --tensor-parallel-size=4")


async def test_simulated_lies_across_the_page(page: Page, tmp_path: Path) -> None:
    await page.open(written("simulated", tmp_path))
    mark = "getComputedStyle(document.querySelector('.watermark'), '::before').content"
    assert await page.evaluate(mark) == '"SIMULATED"'
    assert await page.evaluate("getComputedStyle(document.querySelector('.watermark')).position") == "fixed"
    stamped = "[...document.querySelectorAll('[data-figure]')].every(e => e.textContent.includes('SIMULATED'))"
    assert await page.evaluate(stamped)
