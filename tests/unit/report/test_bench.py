"""The table of `bench` at the widths of real terminals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.fakes import studies
from tuner.domain.measurement import Latency
from tuner.domain.experiment import Trial
from tuner.report.bench import bench_table


def measured(rounds: int = 3, **changes: object) -> Trial:
    """A server of this machine, with every latency there is and numbers as long as they get."""
    trial = studies.trial(0, {}, 1142.0, label="http://127.0.0.1:8000")
    assert trial.median is not None
    long = Latency(p50=12345.6, p90=23456.7, p99=34567.8, mean=14567.8, n=1200)
    median = trial.median.model_copy(update={"ttft_uncached_ms": long, "cold_ttft_ms": long})
    return trial.model_copy(
        update={
            "rounds": [median] * rounds,
            "median": median,
            "ci95": {"ttft_ms.p90": (1131.2, 1150.4), "ttft_uncached_ms.p90": (22345.6, 24567.8)},
        }
        | changes
    )


def shown(trial: Trial, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(bench_table(trial))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 79, 80, 118])
def test_every_latency_is_one_whole_line(width: int) -> None:
    text = shown(measured(), width)
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= width
    assert "…" not in text
    row = next(line for line in lines if line.startswith("ttft_uncached"))
    assert row.split()[1:7] == ["12,346", "23,457", "22,346", "to", "24,568", "34,568"]
    assert (row.split()[7:] == ["14,568", "1200"]) is (width >= 80)
    assert not any(mark in text for mark in "┃│┏└")


def test_the_title_counts_the_rounds_that_count() -> None:
    assert "http://127.0.0.1:8000, median of 3 rounds, times in ms" in shown(measured(), 80)
    assert "median of 1 round, times in ms" in shown(measured(1), 80)
    trial = measured(2)
    void = [trial.rounds[0], trial.rounds[1].model_copy(update={"void": "warm_cache"})]
    interrupted = measured().model_copy(update={"rounds": void, "state": "interrupted"})
    assert "median of 1 round, then interrupted" in shown(interrupted, 80)


def test_a_simulated_server_is_labelled() -> None:
    assert "SIMULATED" not in shown(measured(), 80)
    assert shown(measured(simulated=True), 80).startswith("SIMULATED: no engine and no GPU were measured")


def test_a_broken_limit_is_in_words() -> None:
    assert "outside itl_ms.p99 <= 250 (605 ms)" in shown(measured(violations=["itl_ms.p99 <= 250: 605.246"]), 80)


def test_without_a_round_there_is_the_reason() -> None:
    trial = measured(0, median=None, state="load_failed", cause="warm_cache", message="[b]2 of 2[/b]", ci95={})
    text = shown(trial, 80)
    assert "no round counts" in text
    assert "warm_cache: [b]2 of 2[/b]" in text
