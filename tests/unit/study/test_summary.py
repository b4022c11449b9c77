"""What a study advises: for whom the advice is true, and for whom it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.frozen_trials import PROFILE, STUDY, round_of, trial_of
from tuner.domain.measurement import Latency, Measurement
from tuner.domain.observation import ClientStats, MemoryTimeline, RequestRecord, RoundObservation
from tuner.domain.experiment import Trial
from tuner.domain.profile import Profile
from tuner.domain.workload import MixedWorkload, Workload
from tuner.study.summary import build_summary
from tuner.experiment.store import StudyDirectory

MIXED = MixedWorkload.model_validate(
    {
        "concurrency": 8,
        "requests": 120,
        "classes": [
            {
                "name": "chat",
                "weight": 9,
                "system_prompt_tokens": 1024,
                "user_prompt_tokens": [64, 192],
                "output_tokens": 8,
            },
            {"name": "document", "weight": 1, "user_prompt_tokens": 12000, "output_tokens": 8},
        ],
    }
)
SEEN = {"chat": 108, "document": 12}


def advice(trials: list[Trial], tmp_path: Path, workload: Workload, best: Trial | None = None) -> str:
    profile: Profile = PROFILE.model_copy(update={"workload": workload})
    summary = build_summary(StudyDirectory(tmp_path), STUDY, profile, trials, merged=trials, best=best, elapsed_s=1.0)
    return " ".join(summary.advice)


def stock(hit_rate: float, **more: Any) -> Trial:
    groups = {name: Latency(p50=1.0, p90=1.0, p99=1.0, mean=1.0, n=n) for name, n in SEEN.items()}
    median: Measurement = round_of(80.0).model_copy(update={"prefix_hit_rate": hit_rate, "groups": groups})
    return trial_of(0, [80.0] * 3, role="baseline", median=median, **more)


@pytest.mark.parametrize(
    ("hit_rate", "said"), [(0.41, "this load shares only 41 % of its tokens"), (0.2, "cache more")]
)
def test_a_mixed_load_is_measured_against_what_it_shares(hit_rate: float, said: str, tmp_path: Path) -> None:
    told = advice([stock(hit_rate)], tmp_path, MIXED)
    assert said in told
    assert ("memory" in told) == (hit_rate < 0.3)


def kept(directory: StudyDirectory, trial: Trial) -> Trial:
    """The trial with its rounds on disk, as a sweep leaves them."""
    for number, measured in enumerate(trial.rounds, 1):
        assert measured.ttft_ms is not None
        records = [answered(i, measured.ttft_ms.p90 + i % 5) for i in range(16)]
        client = ClientStats(0.1, 4, 4, 0.1, limited=False)
        directory.write_round(
            trial.number,
            number,
            RoundObservation(records, client, 0.0, 0.0, 9.0),
            MemoryTimeline("unavailable", [], {}),
        )
    return trial


def answered(index: int, ttft_ms: float) -> RequestRecord:
    first_s = index + ttft_ms / 1e3
    return RequestRecord(
        index=index,
        phase="measured",
        intended_s=float(index),
        sent_s=float(index),
        prompt_tokens_planned=64,
        output_tokens_planned=1,
        first_token_s=first_s,
        last_token_s=first_s,
        finished_s=first_s,
        deltas=1,
    )


def test_stock_is_not_to_be_kept_where_it_breaks_a_limit(tmp_path: Path) -> None:
    directory = StudyDirectory(tmp_path)
    best = kept(directory, trial_of(1, [78.0, 82.0, 84.0], knobs={"max_num_batched_tokens": 512}))
    untouched = kept(directory, stock(0.9))
    assert "Keep stock" in advice([untouched, best], tmp_path, PROFILE.workload, best)
    broken = untouched.model_copy(update={"violations": ["itl_ms.p99 <= 1: 36"]})
    assert "Keep stock" not in advice([broken, best], tmp_path, PROFILE.workload, best)
