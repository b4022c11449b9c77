from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest

from tests.fakes import studies
from tuner.domain.experiment import Results
from tuner.report.html import render, unbroken
from tuner.report.page import make_page


class Outline(HTMLParser):
    """Elements with their attributes, script bodies, and the text outside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.text.append(data)


@cache
def html_of(kind: str) -> str:
    return render(studies.ALL[kind]())


@cache
def outline(kind: str) -> Outline:
    parser = Outline()
    parser.feed(html_of(kind))
    return parser


@pytest.mark.parametrize("kind", studies.ALL)
def test_nothing_on_the_page_points_elsewhere(kind: str) -> None:
    page = outline(kind)
    for tag, attributes in page.elements:
        assert tag not in ("img", "iframe", "object", "embed", "form", "base", "audio", "video"), tag
        assert not {"src", "srcset", "action", "background", "ping"} & attributes.keys()
        assert attributes.get("href", "data:,") == "data:,"
        assert not [name for name in attributes if name.startswith("on")]


@pytest.mark.parametrize("kind", ["normal", "hostile", "failures_only"])
def test_the_policy_lets_only_our_scripts_run(kind: str) -> None:
    page = outline(kind)
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy") or ""
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    data, *scripts = page.scripts
    assert data.startswith("[{")
    assert {base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts} == allowed
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy


def test_a_hostile_name_stays_text_everywhere() -> None:
    html = html_of("hostile")
    assert "<script>document.title" not in html
    assert "<img" not in re.sub(r"<script>.*?</script>", "", html, flags=re.S)
    assert "49" not in "".join(t for t in outline("hostile").text if "evil" in t)


@pytest.mark.parametrize("kind", studies.ALL)
def test_sections_stand_in_reading_order(kind: str) -> None:
    page = outline(kind)
    ids = [a["id"] for t, a in page.elements if t == "section" and "id" in a]
    order = ["comparison", "chunks", "figures", "settings", "starts", "not-measured", "fingerprint", "method"]
    assert ids == [i for i in order if i in ids]
    assert set(order[3:]) <= set(ids)
    headings = [t for t, _ in page.elements if t == "h1"]
    assert headings == ["h1"]


def test_simulated_is_said_at_the_top_the_bottom_and_in_every_figure() -> None:
    text = " ".join(outline("simulated").text)
    assert text.count("SIMULATED") >= 3
    assert html_of("simulated").count('"text":"SIMULATED"') == 12
    assert "SIMULATED" not in " ".join(outline("normal").text)


def test_missing_values_are_dashes_and_their_reasons_are_listed() -> None:
    text = " ".join(outline("null_metrics").text)
    assert "the server has no /metrics (every round)." in text
    assert "no NVML here (every round)." in text
    assert not re.search(r"\b(nan|None|inf)\b", text)


def test_the_sentence_of_the_summary_stands_at_the_top() -> None:
    for kind in ("normal", "stock_wins", "unfinished"):
        page = make_page(studies.ALL[kind]())
        assert page.sentence == f"{studies.ALL[kind]().summary.sentence}."
        assert page.sentence.partition("%")[0].strip() in " ".join(outline(kind).text).replace("\u00a0", " ")


def test_gain_and_cost_are_the_contrasts_of_the_finals() -> None:
    rows = {row.name: row for row in make_page(studies.normal()).compared}
    assert rows["TTFT P90"].kind == "better"
    final = next(s for s in studies.normal().summary.finals if s.id == 5)
    assert rows["TTFT P90"].cells[2] == f"−{abs(final.vs_stock['ttft_ms.p90'].change) * 100:.0f} %"
    assert rows["request throughput"].note == "better"
    assert rows["preemptions"].cells[2:] == ("–", "–")


def test_where_stock_is_frozen_it_is_set_against_the_best_of_the_others() -> None:
    page = make_page(studies.stock_wins())
    assert page.compared_name == "chunk 4096"
    lone = studies.stock_wins()
    finals = [s for s in lone.summary.finals if s.id != 6]
    page = make_page(replace(lone, summary=lone.summary.model_copy(update={"finals": finals})))
    assert page.compared_name == "chunk 2048"
    assert page.compared[0].note == "no difference shown"


def test_what_is_optimized_has_a_column() -> None:
    page = make_page(studies.class_objective())
    assert page.setting_headings[:2] == ["TTFT of short P90", "output throughput"]
    assert all(len(row.cells) == len(page.setting_headings) for row in page.settings)
    best = next(row for row in page.settings if row.kind == "best")
    line = next(s for s in studies.class_objective().summary.settings if str(s.id) == best.name)
    assert line.median is not None
    assert best.cells[0] == f"{line.median.groups['short'].p90:.0f}"


def test_a_start_has_its_cause_and_its_log() -> None:
    refused, search, *_ = make_page(studies.normal()).starts
    assert refused.note == "no_memory_for_kv: 1.2 GiB is needed, 0.4 GiB is available. Lower it."
    assert refused.texts == ("chunk 16384\nstarts/0001/engine.log", "cannot run")
    assert search.cells[:3] == ("11", "39", "1")
    assert "starts/0002/engine.log" in " ".join(outline("normal").text)


def test_a_discarded_round_has_its_reason() -> None:
    page = make_page(studies.normal())
    assert ("Rounds discarded", "the client was 12 ms late (1 round).") in page.not_measured


def test_reasons_that_differ_in_numbers_are_one() -> None:
    data = studies.normal()
    rows = [studies.discarded(row, f"lagged by {n} ms") for n, row in enumerate(data.results.rounds[:5], 10)]
    page = make_page(replace(data, results=Results(data.results.starts, rows)))
    assert ("Rounds discarded", "lagged by 10 ms (5 rounds).") in page.not_measured


def test_hundreds_of_settings_stay_foldable() -> None:
    page = outline("many")
    text = " ".join(page.text)
    assert "301 settings" in text
    assert "301 starts" in text
    opened = [a for t, a in page.elements if t == "details" and "open" in a]
    assert opened == []


def test_the_command_is_that_of_the_frozen_file_ready_to_paste() -> None:
    data = studies.normal()
    profile = {**data.study.profile, "engine": {"env": {"HF_HOME": "/big models", "x y": "1"}}}
    study = data.study.model_copy(update={"profile": profile})
    page = make_page(replace(data, study=study))
    assert page.command.split(" \\\n  ") == [
        "HF_HOME='/big models'",
        "vllm serve meta-llama/Llama-3.1-70B-Instruct",
        "--tensor-parallel-size=4",
        "--max-num-batched-tokens=2048",
    ]
    assert not page.needs_plugin
    plugin = ("vllm", "serve", "m", "--scheduler-cls", "tuner.scheduler.ReuseBudgetScheduler")
    assert make_page(replace(data, command=plugin)).needs_plugin
    assert make_page(studies.unfinished()).command == ""


def test_the_method_says_what_was_done() -> None:
    told = " ".join(make_page(studies.normal()).method)
    assert "1 engine start measured the settings of the search" in told
    assert "on 3 fresh starts" in told
    assert "the frozen command was started as it is" in told
    single = " ".join(make_page(studies.many()).method)
    assert "Each engine start of the search measured one setting." in single
    assert "finals measured" not in single


def test_the_same_study_gives_the_same_bytes() -> None:
    assert render(studies.normal()) == html_of("normal")


def test_units_stay_with_their_numbers() -> None:
    assert unbroken("41 % lower than 146 ms, 16 trials") == "41\u00a0% lower than 146\u00a0ms, 16 trials"
