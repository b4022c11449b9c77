"""The reuse budget, switched within one start and frozen with the options of the plug-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.commands import document, run, starts

PRESSURE = """\
version: 1
name: pressure
model: meta-llama/Llama-3.1-8B-Instruct
hardware: {gpu: h100_sxm, count: 1, cost_model: meta-llama/Meta-Llama-3.1-8B}
engine:
  # 10,240 tokens of KV: what comes between two visits evicts the visitor's system prompt.
  args: {max_model_len: 4096, max_num_seqs: 16, max_num_batched_tokens: 512, num_gpu_blocks_override: 640}
  startup_timeout: 2m
workload:
  kind: mixed
  concurrency: 2
  requests: 40
  classes:
    - {name: busy, user_prompt_tokens: 3000, output_tokens: [4, 8]}
    - {name: visitor, visit_every: 300ms, system_prompt_tokens: 2000, user_prompt_tokens: [32, 128],
       output_tokens: [4, 8]}
rounds: 1
space: {reuse_budget: {max_cached_blocks: [0, 160]}}
objective: {minimize: groups.visitor.p50}
constraints: [failed_requests == 0]
budget: {time: 30s}
"""


@pytest.mark.slow
def test_under_pressure_the_plugin_wins_and_its_flags_are_frozen(tmp_path: Path) -> None:
    (tmp_path / "pressure.yaml").write_text(PRESSURE)
    done = run("sweep", "pressure.yaml", "--engine", "sim", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    study = tmp_path / "results/pressure"
    search = [s for s in starts(study) if s["purpose"] == "search"]
    assert len(search) == 1
    budgets = [(s["reuse_budget"] or {}).get("max_cached_blocks", 0) for s in search[0]["defined"].values()]
    assert set(budgets) == {0, 160}
    frozen = document(study / "frozen.json")
    assert frozen["verdict"] == "better"
    assert frozen["reuse_budget"]["max_cached_blocks"] == 160
    literal = next(s for s in starts(study) if s["purpose"] == "literal")
    assert literal["reuse_budget"]["max_cached_blocks"] == 160

    args = run("freeze", study, "--allow-simulated", "--format", "args", cwd=tmp_path).stdout
    assert "--scheduler-cls tuner.scheduler.ReuseBudgetScheduler" in args
    assert '"max_cached_blocks": 160' in args
