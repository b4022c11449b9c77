"""The reuse budget tuned together with the chunk size: measured without the plug-in too, frozen only where it wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_sweep import run, trials

PRESSURE = """\
version: 1
name: pressure
model: meta-llama/Llama-3.1-8B-Instruct
hardware: {gpu: h100_sxm, count: 1, cost_model: meta-llama/Meta-Llama-3.1-8B}
engine:
  # 10,240 tokens of KV: what comes between two visits evicts the visitor's system prompt.
  args: {max_model_len: 4096, max_num_seqs: 16, enable_prefix_caching: true, num_gpu_blocks_override: 640}
  startup_timeout: 2m
workload:
  kind: mixed
  concurrency: 2
  requests: 130
  classes:
    - {name: busy, user_prompt_tokens: 3000, output_tokens: [4, 8]}
    - {name: visitor, visit_every: 300ms, system_prompt_tokens: 2000, user_prompt_tokens: [32, 128],
       output_tokens: [4, 8]}
rounds: 1
space:
  max_num_batched_tokens: [256, 512]
  reuse_budget: {min_reuse_ratio: [0, 0.8], max_cached_blocks: [0, 160], yield_chunk_tokens: [64]}
objective: {minimize: groups.visitor.p50}
constraints: [failed_requests == 0]
"""

NO_PRESSURE = """\
version: 1
name: calm
model: meta-llama/Llama-3.1-8B-Instruct
hardware: {gpu: h100_sxm, count: 1, cost_model: meta-llama/Meta-Llama-3.1-8B}
engine:
  args: {max_model_len: 4096, max_num_seqs: 16, enable_prefix_caching: true}
  startup_timeout: 2m
workload: {kind: shared-prefix, system_prompt_tokens: 0, user_prompt_tokens: [200, 300], output_tokens: [4, 8],
  concurrency: 4, requests: 40}
rounds: 2
space:
  max_num_batched_tokens: [512]
  reuse_budget: {max_cached_blocks: [64, 160]}
objective: {minimize: ttft_ms.p50}
constraints: [failed_requests == 0]
"""


def swept(folder: Path, profile: str) -> tuple[Path, list[dict[str, Any]]]:
    """The study's folder and its completed trials."""
    (folder / "p.yaml").write_text(profile)
    done = run("sweep", "p.yaml", "--engine", "sim", "--json", cwd=folder, wait_s=400)
    assert done.returncode == 0, done.stderr
    assert sum(row["best"] for row in json.loads(done.stdout)["table"]) == 1
    study = folder / "results" / profile.split("name: ")[1].split()[0]
    return study, [t for t in trials(study) if t["state"] == "completed"]


def without_plugin(trial: dict[str, Any]) -> bool:
    return trial["reuse_budget"] is None


@pytest.mark.slow
def test_under_pressure_the_plugin_wins_and_its_flags_are_frozen(tmp_path: Path) -> None:
    study, completed = swept(tmp_path, PRESSURE)
    candidates = [t for t in completed if t["role"] == "candidate"]
    budgets = [t["reuse_budget"] or {} for t in candidates]
    assert {t["knobs"]["max_num_batched_tokens"] for t in candidates} == {256, 512}
    assert {b.get("min_reuse_ratio", 0) for b in budgets} == {0, 0.8}
    assert {b.get("max_cached_blocks", 0) for b in budgets} == {0, 160}
    frozen = json.loads((study / "frozen.json").read_text())
    assert frozen["reuse_budget"]["max_cached_blocks"] == 160
    finals = [t for t in completed if t["role"] == "final"]
    twins = [t for t in finals if t["knobs"] == finals[0]["knobs"] and without_plugin(t)]
    assert twins, "the best candidate was not measured without the plug-in"

    args = run("freeze", study, "--allow-simulated", "--format", "args", cwd=tmp_path).stdout
    assert "--scheduler-cls tuner.scheduler.ReuseBudgetScheduler" in args
    assert '"max_cached_blocks": 160' in args
    yaml = run("freeze", study, "--allow-simulated", "--format", "yaml", cwd=tmp_path).stdout
    assert "scheduler-cls: tuner.scheduler.ReuseBudgetScheduler" in yaml


@pytest.mark.slow
def test_where_nothing_is_shared_the_plugin_is_not_frozen(tmp_path: Path) -> None:
    study, completed = swept(tmp_path, NO_PRESSURE)
    finals = [t for t in completed if t["role"] == "final"]
    assert not all(without_plugin(t) for t in finals)
    assert any(without_plugin(t) for t in finals)
    assert json.loads((study / "frozen.json").read_text())["reuse_budget"] is None
    args = run("freeze", study, "--allow-simulated", "--format", "args", cwd=tmp_path).stdout
    assert "scheduler-cls" not in args
