from __future__ import annotations

import pytest

from tests.fakes import studies
from tuner.domain.setting import ReuseBudget
from tuner.domain.experiment import Improvement
from tuner.report.answer import (
    advice_beside_failures,
    answer,
    beats_stock,
    copyable_command,
    failures,
    limit_text,
    row_name,
    trial_label,
    unmeasured,
)
from tuner.report.data import ReportData


def told(data: ReportData) -> str:
    return answer(data.study, data.summary, data.trials).sentence


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("normal", "winner"), ("failures_only", "nothing_measured"), ("one_trial", "unfinished"), ("thousand", "winner")],
)
def test_every_study_has_a_kind_of_answer(kind: str, expected: str) -> None:
    data = studies.ALL[kind]()
    assert answer(data.study, data.summary, data.trials).kind == expected


def test_an_interval_over_zero_is_no_victory() -> None:
    data = studies.normal()
    noisy = Improvement(baseline=86.5, best=84.0, change=-0.029, ci95=(-0.78, 0.075))
    summary = data.summary.model_copy(update={"improvement": {"ttft_ms.p90": noisy}})
    sentence = answer(data.study, summary, data.trials).sentence
    assert sentence == (
        "Chunk 8192 measured best, but its TTFT P90 of 84 ms is not distinguishable from the stock configuration's "
        "86 ms (measured −2.9 %, 95 % interval −78 % to +7.5 %)."
    )


def test_a_best_that_is_not_better_than_stock_says_keep_stock() -> None:
    data = studies.normal()
    worse = Improvement(baseline=80.0, best=85.0, change=0.0625, ci95=(-0.05, 0.2))
    summary = data.summary.model_copy(update={"improvement": {"ttft_ms.p90": worse}})
    assert answer(data.study, summary, data.trials).sentence == (
        "Keep the stock configuration: the best of the others, chunk 8192, has a TTFT P90 of 85 ms, not "
        "distinguishable from the stock configuration's 80 ms (measured +6.2 %, 95 % interval −5.0 % to +20 %)."
    )


def test_freeze_warns_where_stock_would_do() -> None:
    data = studies.normal()
    for change, ci95, beaten in [(-0.3, (-0.4, -0.2), True), (-0.03, (-0.4, 0.2), False), (0.05, (0.01, 0.2), False)]:
        told = Improvement(baseline=100.0, best=100.0 * (1 + change), change=change, ci95=ci95)
        summary = data.summary.model_copy(update={"improvement": {"ttft_ms.p90": told}})
        assert beats_stock(data.study, summary, data.trials) is beaten


def test_a_stock_that_breaks_a_limit_is_not_the_one_to_keep() -> None:
    data = studies.normal()
    worse = Improvement(baseline=80.0, best=85.0, change=0.0625, ci95=(-0.05, 0.2))
    summary = data.summary.model_copy(update={"improvement": {"ttft_ms.p90": worse}})
    trials = [
        t.model_copy(update={"violations": ["itl_ms.p99 <= 1: 36"]}) if t.number == summary.baseline else t
        for t in data.trials
    ]
    assert answer(data.study, summary, trials).sentence == (
        "Take chunk 8192: TTFT P90 of 85 ms. The stock configuration, at 80 ms, breaks itl_ms.p99 <= 1 (36 ms)."
    )


@pytest.mark.parametrize(
    ("violation", "said"),
    [
        ("itl_ms.p99 <= 250: 605.246", "itl_ms.p99 <= 250 (605 ms)"),
        ("memory.peak_fraction <= 0.95: 0.971", "memory.peak_fraction <= 0.95 (97.1 %)"),
        ("itl_ms.p99 <= 250: 250.2", "itl_ms.p99 <= 250 (250.2 ms)"),
        ("itl_ms.p99 <= 250: not measured (no reason given)", "itl_ms.p99 <= 250 (not measured (no reason given))"),
        ("something else", "something else"),
    ],
)
def test_a_broken_limit_in_words(violation: str, said: str) -> None:
    assert limit_text(violation) == said


def test_an_objective_that_was_never_measured_is_named() -> None:
    data = studies.normal()
    profile = {**data.study.profile, "objective": {"minimize": "ttft_uncached_ms.p90"}}
    study = data.study.model_copy(update={"profile": profile})
    said = answer(study, data.summary.model_copy(update={"best": None}), data.trials)
    assert said.kind == "nothing_measured"
    assert said.sentence == (
        "No answer: ttft_uncached_ms.p90, which is optimized, could be measured in none of 14 trials: no measured "
        "prompt was less than half cached."
    )


def test_a_study_that_was_interrupted_at_once_is_unfinished() -> None:
    data = studies.failures_only()
    interrupted = [data.trials[0].model_copy(update={"state": "interrupted", "cause": None})]
    said = answer(data.study, data.summary, interrupted)
    assert said.kind == "unfinished"
    assert said.sentence == "Nothing is measured yet: the study was interrupted in its first trial."
    assert "none of 4 trials" in answer(data.study, data.summary, [*interrupted, *data.trials]).sentence


def test_a_row_of_the_plugin_says_so() -> None:
    data = studies.normal()
    row = data.summary.table[-1]
    trial = next(t for t in data.trials if t.role == "candidate")
    kept = trial.model_copy(update={"reuse_budget": ReuseBudget(max_cached_blocks=80)})
    size = str(row.max_num_batched_tokens)
    assert row_name(row, trial, data.summary) == size
    assert row_name(row, kept, data.summary) == f"{size} +plug-in"


def test_the_merged_value_of_the_finals_is_the_one_told() -> None:
    data = studies.normal()
    clear = Improvement(baseline=150.0, best=75.0, change=-0.5, ci95=(-0.55, -0.4))
    summary = data.summary.model_copy(update={"improvement": {"ttft_ms.p90": clear}})
    assert (
        "TTFT P90 of 75 ms, 50 % lower than the stock configuration's 150 ms"
        in answer(data.study, summary, data.trials).sentence
    )


def test_a_winning_baseline_says_keep_stock() -> None:
    data = studies.normal()
    summary = data.summary.model_copy(update={"best": 15})
    said = answer(data.study, summary, data.trials)
    assert said.kind == "stock_best"
    assert said.sentence.startswith("Keep the stock configuration")


def test_no_feasible_candidate_names_the_limit() -> None:
    data = studies.normal()
    trials = [
        t.model_copy(update={"violations": ["itl_ms.p99 <= 1: 36"]}) if t.role in ("candidate", "final") else t
        for t in data.trials
    ]
    summary = studies.summary_of(data.study, trials, None)
    said = answer(data.study, summary, trials)
    assert said.kind == "no_feasible"
    assert "most often broken: itl_ms.p99 <= 1." in said.sentence


def test_failures_are_sorted_by_how_often_they_happened() -> None:
    found = failures(studies.failures_only().trials)
    assert [(f.cause, f.trials) for f in found] == [("gated_model", (0, 1, 2)), ("stalled", (3,))]


def test_advice_that_only_counts_failures_is_not_said_twice() -> None:
    data = studies.failures_only()
    summary = data.summary.model_copy(update={"advice": ["3 x gated_model: no access", "Set a limit."]})
    assert advice_beside_failures(summary, failures(data.trials)) == ["Set a limit."]


def test_reasons_that_differ_in_numbers_are_one() -> None:
    trials = [
        studies.trial(n, {}, 100.0).model_copy(
            update={"rounds": [studies.measurement(100.0, 512).model_copy(update={"void": f"lagged by {n} ms"})]}
        )
        for n in (10, 20)
    ]
    rows = [row for row in unmeasured(trials) if row[0] == "round"]
    assert rows == [("round", "lagged by 10 ms", 2)]


def test_the_command_loses_address_name_and_launcher_of_the_run() -> None:
    trial = studies.trial(1, {}, 100.0).model_copy(
        update={
            "simulated": True,
            "command": [
                "/x/python",
                "-m",
                "tuner.sim",
                "serve",
                "m",
                "--host",
                "127.0.0.1",
                "--port=4",
                "--seed",
                "1",
                "--enable-prompt-tokens-details",
                "--served-model-name",
                "n",
            ],
        }
    )
    assert copyable_command(trial) == ["vllm", "serve", "m", "--seed", "1"]
    kept = trial.model_copy(update={"engine_args": {"enable_prompt_tokens_details": True}})
    assert "--enable-prompt-tokens-details" in copyable_command(kept)


def test_a_label_is_made_from_the_knobs() -> None:
    trial = studies.trial(3, {"max_num_batched_tokens": 512, "max_num_seqs": 64}, 100.0)
    assert trial_label(trial) == "chunk 512, max_num_seqs=64"
    assert trial_label(studies.trial(0, {}, 100.0, role="baseline")) == "stock"
