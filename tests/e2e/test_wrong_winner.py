"""Servers that make a careless tuner take the wrong setting: ours takes the right one, or says that it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.commands import FAKE_VLLM, Done, document, rounds, run, starts

PROFILE = """\
version: 1
name: liars
model: fake/model
engine: {args: {max_model_len: 2048, max_num_seqs: 16, max_num_batched_tokens: 1024}, startup_timeout: 30s}
workload: {kind: shared-prefix, system_prompt_tokens: 128, user_prompt_tokens: [8, 16], output_tokens: [4, 8],
  concurrency: 4, requests: 24, request_timeout: 10s}
rounds: 2
space: {max_num_batched_tokens: [256, 512], refine: false}
"""
TRUTH = {"ttft_ms": 90, "ttft_ms_by_chunk": {"512": 60}, "token_ms": 3}
"""Chunk 512 is the faster one by a third; every lie below leaves that true."""


def sweep(folder: Path, script: dict[str, Any], *overrides: str) -> tuple[Done, Path]:
    (folder / "liars.yaml").write_text(PROFILE)
    sets = [word for override in overrides for word in ("--set", override)]
    return run("sweep", "liars.yaml", "--vllm", FAKE_VLLM, *sets, cwd=folder, script=script), folder / "results/liars"


def measured(study: Path, chunk: int, latency: str = "ttft_ms", stat: str = "p90") -> list[float]:
    """A latency of every round that counts of the setting with this chunk."""
    ids = {
        name
        for start in starts(study)
        for name, setting in start["defined"].items()
        if setting["knobs"].get("max_num_batched_tokens") == chunk
    }
    return [r["measurement"][latency][stat] for r in rounds(study) if str(r["setting"]) in ids]


def test_a_server_that_remembers_prompts(tmp_path: Path) -> None:
    """A prompt seen before is answered 50 times faster: every round has to begin with one that was not."""
    done, study = sweep(tmp_path, {**TRUTH, "remember": {"unseen_ms": 500, "seen_ms": 10}})
    assert done.returncode == 0, done.stderr
    for chunk in (256, 512):
        cold = measured(study, chunk, "cold_ttft_ms", "p99")
        assert len(cold) >= 2
        assert min(cold) > 480, f"a round of chunk {chunk} found its prompt warm: {cold}"


def test_a_server_that_is_slow_for_its_first_requests(tmp_path: Path) -> None:
    done, study = sweep(tmp_path, {**TRUTH, "first_slow": {"requests": 4, "ms": 1500}})
    assert done.returncode == 0, done.stderr
    assert document(study / "frozen.json")["engine_args"]["max_num_batched_tokens"] == 512
    assert max(measured(study, 256) + measured(study, 512)) < 1000, "a first wave was measured"


def test_a_server_that_fails_most_requests_gets_no_winner(tmp_path: Path) -> None:
    """Empty streams come back at once: counted as successes they would be the fastest of all."""
    done, study = sweep(tmp_path, {**TRUTH, "empty_share": 0.6}, "rounds=1")
    assert done.returncode == 3, done.stderr
    assert not (study / "frozen.json").exists()
    summary = document(study / "summary.json")
    assert (summary["verdict"], summary["winner"]) == ("none", None)
    assert rounds(study) == []


def test_a_server_that_lies_in_its_first_delta(tmp_path: Path) -> None:
    """The role comes after a time that grows with the chunk, the first token after a constant one: all tie."""
    script = {"ttft_ms": 200, "token_ms": 3, "role_first": True, "role_delay_ms_per_1000_chunk": 20}
    done, study = sweep(tmp_path, script, "workload.api=chat", "rounds=1", "workload.requests=16")
    assert done.returncode == 0, done.stderr
    assert min(measured(study, 256) + measured(study, 512)) > 190, "the role was taken for a token"
