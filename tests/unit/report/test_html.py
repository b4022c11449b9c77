from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest

from tests.fakes import studies
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
    order = ["comparison", "chunks", "figures", "failures", "not-measured", "fingerprint", "method", "trials"]
    assert ids == [i for i in order if i in ids]
    assert {"failures", "not-measured", "fingerprint", "method", "trials"} <= set(ids)
    headings = [t for t, _ in page.elements if t == "h1"]
    assert headings == ["h1"]


def test_simulated_is_said_at_the_top_the_bottom_and_in_every_figure() -> None:
    text = " ".join(outline("simulated").text)
    assert text.count("SIMULATED") >= 3
    assert html_of("simulated").count('"text":"SIMULATED"') == 9
    assert "SIMULATED" not in " ".join(outline("normal").text)


def test_missing_values_are_dashes_and_their_reasons_are_listed() -> None:
    text = " ".join(outline("null_metrics").text)
    assert "the server has no /metrics (every trial)." in text
    assert "no NVML here (every trial)." in text
    assert not re.search(r"\b(nan|None|inf)\b", text)


def test_what_is_optimized_has_a_column_in_both_tables() -> None:
    page = make_page(studies.class_objective())
    assert page.objective_titles == ["TTFT of short P90"]
    assert page.trial_headings[:2] == ["TTFT of short P90", "output throughput"]
    assert all(len(row.cells) == len(page.trial_headings) for row in page.trials)
    best = next(row for row in page.chunks if row.best)
    winner = next(t for t in studies.class_objective().trials if t.number == best.trial)
    assert winner.median is not None
    assert best.objectives == (f"{winner.median.groups['short'].p90:.0f}",)


def test_one_round_a_side_is_no_verdict() -> None:
    data = studies.normal()
    trials = [t.model_copy(update={"rounds": t.rounds[:1]}) for t in data.trials]
    alone = replace(data, trials=trials, merged=[t for t in trials if t.role == "final"])
    told = {row.reading for row in make_page(alone).compared if row.interval}
    assert told == {"one round"}
    assert "one round" not in {row.reading for row in make_page(data).compared}


def test_a_thousand_trials_stay_foldable() -> None:
    page = outline("thousand")
    text = " ".join(page.text)
    assert re.search(r"\d+ more chunk sizes", text)
    assert "1000 trials" in text
    opened = [a for t, a in page.elements if t == "details" and "open" in a]
    assert opened == []


def test_the_command_is_ready_to_paste() -> None:
    data = studies.normal()
    profile = {**data.study.profile, "engine": {"env": {"HF_HOME": "/big models", "x y": "1"}}}
    study = data.study.model_copy(update={"profile": profile})
    summary = studies.summary_of(study, data.trials, 11)
    page = make_page(replace(data, study=study, summary=summary))
    assert page.command.split(" \\\n  ")[:3] == [
        "HF_HOME='/big models'",
        "vllm serve meta-llama/Llama-3.1-70B-Instruct",
        "--tensor-parallel-size=4",
    ]
    assert page.needs_plugin
    assert not make_page(data).needs_plugin


def test_the_frozen_command_is_the_one_shown() -> None:
    """What the engine chose by itself is pinned in the frozen file, and not in the command that was measured."""
    frozen = ["vllm", "serve", "m", "--enable-chunked-prefill", "--max-num-seqs", "128"]
    page = make_page(replace(studies.normal(), command=frozen))
    assert page.command.split(" \\\n  ") == ["vllm serve m", "--enable-chunked-prefill", "--max-num-seqs 128"]


def test_the_same_study_gives_the_same_bytes() -> None:
    assert render(studies.normal()) == html_of("normal")


def test_units_stay_with_their_numbers() -> None:
    assert unbroken("41 % lower than 146 ms, 16 trials") == "41\u00a0% lower than 146\u00a0ms, 16 trials"
