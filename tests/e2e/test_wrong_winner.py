"""A server that makes a careless tuner take the wrong setting; what lies within a round is in tests/integration."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.commands import FAKE_VLLM, document, rounds, run

PROFILE = """\
version: 1
name: liar
model: fake/model
engine: {args: {max_model_len: 2048, max_num_seqs: 16, max_num_batched_tokens: 1024}, startup_timeout: 30s}
workload: {kind: shared-prefix, system_prompt_tokens: 128, user_prompt_tokens: [8, 16], output_tokens: [4, 8],
  concurrency: 2, requests: 8, request_timeout: 10s}
rounds: 2
space: {max_num_batched_tokens: [256, 512], refine: false}
budget: {time: 8s}
"""


def test_every_start_is_slow_at_first_and_the_faster_setting_is_frozen(tmp_path: Path) -> None:
    """Without a warm-up whatever is measured first on a start would lose, and starts would differ more than chunks."""
    (tmp_path / "liar.yaml").write_text(PROFILE)
    script = {
        "ttft_ms": 60,
        "ttft_ms_by_chunk": {"512": 40},
        "ttft_factors": [1.0, 1.3, 0.8],
        "first_slow": {"requests": 3, "ms": 800},
        "token_ms": 3,
    }
    done = run("sweep", "liar.yaml", "--vllm", FAKE_VLLM, cwd=tmp_path, script=script)
    assert done.returncode == 0, done.stderr
    frozen = document(tmp_path / "results/liar/frozen.json")
    assert frozen["verdict"] == "better"
    assert frozen["engine_args"]["max_num_batched_tokens"] == 512
    slowest = max(row["measurement"]["ttft_ms"]["p99"] for row in rounds(tmp_path / "results/liar"))
    assert slowest < 500, "a first wave was measured"
