"""Servers that make a careless tuner crown the wrong configuration: ours crowns the right one, or says it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FAKE = Path(__file__).parents[1] / "fakes" / "fake_vllm.py"
PROFILE = """\
version: 1
name: liars
model: fake/model
engine: {args: {max_model_len: 2048, max_num_seqs: 16}, startup_timeout: 30s}
workload: {kind: shared-prefix, system_prompt_tokens: 128, user_prompt_tokens: [8, 16], output_tokens: [4, 8],
  concurrency: 4, requests: 32, request_timeout: 10s}
rounds: 3
space: {max_num_batched_tokens: [256, 512]}
"""
TRUTH = {"ttft_ms": 90, "ttft_ms_by_chunk": {"256": 90, "512": 60}, "token_ms": 3}
"""Chunk 512 is the faster one by a third; every lie below leaves that true."""


def sweep(folder: Path, script: dict[str, Any], *overrides: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    (folder / "liars.yaml").write_text(PROFILE)
    sets = [part for override in overrides for part in ("--set", override)]
    done = subprocess.run(
        [sys.executable, "-m", "tuner", "sweep", "liars.yaml", "--vllm", f"{sys.executable} {FAKE}", *sets],
        cwd=folder,
        env={**os.environ, "FAKE_VLLM": json.dumps({"state": str(folder / "state"), **script})},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done, folder / "results/liars"


def best_chunk(study: Path) -> int:
    frozen = json.loads((study / "frozen.json").read_text())
    return int(frozen["engine_args"]["max_num_batched_tokens"])


def rounds_of(study: Path, chunk: int, latency: str = "ttft_ms", stat: str = "p90") -> list[float]:
    """A latency of every round that counts, of every start with this chunk."""
    found = []
    for file in study.glob("trials/*/trial.json"):
        trial = json.loads(file.read_text())
        if trial["knobs"].get("max_num_batched_tokens") == chunk:
            found += [r[latency][stat] for r in trial["rounds"] if not r["void"]]
    return found


def test_a_server_that_remembers_prompts(tmp_path: Path) -> None:
    """A prompt seen before is answered 50 times faster: every round has to begin with one that was not."""
    done, study = sweep(tmp_path, {**TRUTH, "remember": {"unseen_ms": 500, "seen_ms": 10}})
    assert done.returncode == 0, done.stderr
    for chunk in (256, 512):
        cold = rounds_of(study, chunk, "cold_ttft_ms", "p99")
        assert len(cold) >= 3
        assert min(cold) > 480, f"a round of chunk {chunk} found its prompt warm: {cold}"
        assert max(cold) < 1.5 * min(cold), f"the rounds of chunk {chunk} disagree: {cold}"


def test_a_server_that_is_slow_for_its_first_requests(tmp_path: Path) -> None:
    done, study = sweep(tmp_path, {**TRUTH, "first_slow": {"requests": 4, "ms": 1500}})
    assert done.returncode == 0, done.stderr
    assert best_chunk(study) == 512
    assert max(rounds_of(study, 256) + rounds_of(study, 512)) < 1000, "a first wave was measured"


def test_a_server_that_fails_most_requests_gets_no_winner(tmp_path: Path) -> None:
    """Empty streams come back at once: counted as successes they would be the fastest of all."""
    done, study = sweep(tmp_path, {**TRUTH, "empty_share": 0.6})
    assert done.returncode == 3, done.stderr
    assert not (study / "frozen.json").exists()
    summary = json.loads((study / "summary.json").read_text())
    assert summary["best"] is None
    assert set(summary["counts"]) == {"load_failed"}
    assert "Traceback" not in done.stderr


def test_a_server_that_lies_in_its_first_delta(tmp_path: Path) -> None:
    """The role comes after a time that grows with the chunk, the first token after a constant one: all tie."""
    script = {"ttft_ms": 200, "token_ms": 3, "role_first": True, "role_delay_ms_per_1000_chunk": 20}
    done, study = sweep(tmp_path, script, "workload.api=chat", "rounds=2", "workload.requests=16")
    assert done.returncode == 0, done.stderr
    small, large = rounds_of(study, 256), rounds_of(study, 512)
    assert min(small) > 190, "the role was taken for a token"
    assert min(large) > 190
    middle = sorted(small)[len(small) // 2], sorted(large)[len(large) // 2]
    assert max(middle) < 1.1 * min(middle), f"they tie: {middle}"


@pytest.mark.parametrize("share", [1.0])
def test_an_error_inside_a_stream_is_no_success(tmp_path: Path, share: float) -> None:
    done, study = sweep(tmp_path, {**TRUTH, "error_event_share": share}, "rounds=1")
    assert done.returncode == 3, done.stderr
    assert not (study / "frozen.json").exists()
