"""Frozen documents that no engine measured: a small study's profile, and starts with made-up rounds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tuner.domain.experiment import Fingerprint, Round, SettingId, Start, StudyFile
from tuner.domain.frozen import Frozen
from tuner.domain.measurement import Latency, Measurement
from tuner.domain.profile import Profile
from tuner.domain.setting import STOCK, Setting
from tuner.domain.workload import workload_sha256
from tuner.freeze import freeze_setting

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
    workload_sha256=workload_sha256(PROFILE.workload),
    engine_kind="vllm",
    simulated=False,
    versions={},
    design={"sampler": "enumeration"},
    seed=7,
    created_at="2026-01-01T00:00:00+00:00",
)
CHUNK_512 = Setting(knobs={"max_num_batched_tokens": 512})
NOW = datetime(2026, 1, 2, tzinfo=UTC)


def round_of(p90: float, throughput: float = 40.0) -> Measurement:
    latency = Latency(p50=p90 / 2, p90=p90, p99=p90 * 1.5, mean=p90 / 2, n=16)
    return Measurement(ttft_ms=latency, request_throughput=throughput, failed_requests=0, requests=16)


def start_of(number: int, **more: Any) -> Start:
    """A live final, booted with a chunk of 2048, that measured stock and the setting 3."""
    fields: dict[str, Any] = {
        "purpose": "final",
        "state": "completed",
        "live": True,
        "engine_args": {"max_num_batched_tokens": 2048, "max_num_seqs": 64},
        "effective_args": {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "enable_chunked_prefill": True},
        "stock_chunk": 1024,
        "command": ["/opt/vllm", "serve", "org/model", "--max-num-batched-tokens", "2048", "--port", "1"],
        "settings": ["stock", 3],
        "defined": {"stock": STOCK, "3": CHUNK_512},
    }
    return Start(number=number, **(fields | more))


def rows_of(start: int, p90s: Sequence[float], setting: SettingId = 3, **more: Any) -> list[Round]:
    """A round of `setting` for each TTFT P90."""
    fields: dict[str, Any] = {"position": 0, "state": "kept", **more}
    return [
        Round(start=start, round=i, cycle=i, setting=setting, measurement=round_of(p90), **fields)
        for i, p90 in enumerate(p90s, 1)
    ]


def finals_of(
    p90s: Sequence[Sequence[float]], setting: SettingId = 3, **more: Any
) -> list[tuple[Start, Sequence[Round]]]:
    """A start for each list of TTFT P90, numbered from 1; `more` are fields of the starts."""
    return [(start_of(n, **more), rows_of(n, values, setting)) for n, values in enumerate(p90s, 1)]


def frozen_of(
    p90s: Sequence[Sequence[float]] = ((100.0,),),
    *,
    stock: Sequence[Sequence[float]] = (),
    setting: Setting = CHUNK_512,
    start: dict[str, Any] | None = None,
    **more: Any,
) -> Frozen:
    """The document of a setting and of stock with these TTFT P90 by final; `start` are fields of the starts."""
    fields: dict[str, Any] = {
        "verdict": "better",
        "setting_id": 3,
        "setting": setting,
        "starts": finals_of(p90s, **(start or {})),
        "stock": finals_of(stock, "stock", **(start or {})),
        "study": STUDY,
        "profile": PROFILE,
        "sampler": "enumeration",
        "counts": {"measured": 3},
        "now": NOW,
    }
    return freeze_setting(**(fields | more))
