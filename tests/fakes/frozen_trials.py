"""A small study's profile, rounds, trials and frozen documents, for the tests that need one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tuner.domain.frozen import Frozen
from tuner.domain.measurement import Latency, Measurement
from tuner.domain.experiment import Fingerprint, StudyFile, Trial
from tuner.domain.profile import Profile
from tuner.domain.workload import workload_sha256
from tuner.freeze import freeze_trial

PROFILE = Profile.model_validate(
    {
        "version": 1,
        "name": "t",
        "model": "org/model",
        "engine": {
            "args": {"max_num_seqs": 64},
            "env": {"HF_HOME": "/models", "HF_TOKEN": "hf_abc", "MY_API_KEY": "k", "AWS_SECRET_ACCESS_KEY": "s"},
        },
        "workload": {
            "kind": "shared-prefix",
            "system_prompt_tokens": 512,
            "user_prompt_tokens": [32, 64],
            "output_tokens": 8,
            "concurrency": 4,
            "requests": 16,
        },
        "space": {"max_num_batched_tokens": [256, 512]},
        "constraints": ["ttft_ms.p99 <= 500"],
    }
)
STUDY = StudyFile(
    study="s",
    profile=PROFILE.to_json(),
    fingerprint=Fingerprint(model="org/model", engine="vllm", vllm_version="0.32.0"),
    space_sha256="0",
    workload_sha256=workload_sha256(PROFILE.workload),
    engine_kind="vllm",
    simulated=False,
    versions={},
    sampler="enumeration",
    seed=7,
    created_at="2026-01-01T00:00:00+00:00",
)


def round_of(p90: float, throughput: float = 40.0, void: str | None = None) -> Measurement:
    latency = Latency(p50=p90 / 2, p90=p90, p99=p90 * 1.5, mean=p90 / 2, n=16)
    return Measurement(ttft_ms=latency, request_throughput=throughput, failed_requests=0, requests=16, void=void)


def trial_of(number: int, p90s: list[float], **more: Any) -> Trial:
    rounds = [round_of(p) for p in p90s]
    fields: dict[str, Any] = {
        "number": number,
        "role": "candidate",
        "state": "completed",
        "engine_args": {"max_num_batched_tokens": 512, "max_num_seqs": 64},
        "effective_args": {"max_num_batched_tokens": 512, "max_num_seqs": 64, "enable_chunked_prefill": True},
        "command": ["/opt/vllm", "serve", "org/model", "--max-num-batched-tokens", "512", "--port", "1"],
        "rounds": rounds,
        "median": rounds[len(rounds) // 2] if rounds else None,
    }
    return Trial(**(fields | more))


def frozen_of(trial: Trial, repeats: list[Trial] | None = None, **more: Any) -> Frozen:
    return freeze_trial(trial, repeats or [], STUDY, PROFILE, now=datetime(2026, 1, 2, tzinfo=UTC), **more)
