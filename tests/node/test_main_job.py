"""The main job on a GPU node, as far as it can be told without one: four GPUs, two engines, one GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.node.conftest import GIB, GpuNode, uuid_of
from tuner.experiment.store import StudyRecord, read_study

Sweep = Callable[..., dict[str, Any]]
SIMPLE = "space.long_prefill_token_threshold=[0]"


def study_of(node: GpuNode) -> StudyRecord:
    return read_study(node.folder / "results" / "s")


def check_memory(study: StudyRecord, indexes: list[int], share: float) -> None:
    """Every round saw these devices alone, as full as vLLM makes them, and the parts of which its log tells."""
    for row in study.results.kept():
        memory = row.measurement.memory
        assert (memory.source, memory.reason) == ("nvml", None)
        assert set(memory.peak_bytes or {}) == {uuid_of(index) for index in indexes}
        assert memory.peak_fraction == pytest.approx(share, abs=0.01)
        assert memory.breakdown.weights_bytes == round(32.88 * GIB)
        assert memory.breakdown.activation_peak_bytes == pytest.approx(2.89 * GIB, abs=2)


def test_four_gpus(node: GpuNode, sweep: Sweep) -> None:
    """Beside a tenant on a fifth one, the whole default profile."""
    document = sweep("default")
    assert document["simulated"] is False
    study = study_of(node)
    assert [s.purpose for s in study.results.starts] == ["search", "final", "final", "final", "literal"]
    assert {s.state for s in study.results.starts} == {"completed"}
    assert len(study.results.starts[0].settings) > 30
    check_memory(study, [0, 1, 2, 3], 0.9)
    assert study.summary is not None
    chunks = {line.id: line.knobs.get("max_num_batched_tokens") for line in study.summary.settings}
    assert (study.summary.verdict, chunks[study.summary.winner or 0]) == ("better", 512)
    frozen = json.loads((study.directory / "frozen.json").read_text())
    assert frozen["engine_args"]["tensor_parallel_size"] == 4
    assert [gpu["name"] for gpu in frozen["fingerprint"]["gpus"]] == ["NVIDIA H100 80GB HBM3"] * 4
    literal = study.results.starts[-1]
    assert "--tensor-parallel-size" in literal.command
    assert "tuner.scheduler.LiveScheduler" not in literal.command
    served = node.chunktune("serve", "results/s/frozen.json", "--dry-run")
    assert served.returncode == 0, served.stderr


def test_one_gpu_that_is_not_the_first(node: GpuNode, sweep: Sweep) -> None:
    sweep("llama-8b", SIMPLE, env={"CUDA_VISIBLE_DEVICES": "3"})
    check_memory(study_of(node), [3], 0.9)


def test_every_data_parallel_engine_is_switched_and_counted(node: GpuNode, sweep: Sweep) -> None:
    sweep("llama-8b", SIMPLE, "engine.args.data_parallel_size=2")
    study = study_of(node)
    check_memory(study, [0, 1], 0.9)
    assert not [r.reason for r in study.results.rounds if r.code == "not_as_applied"]
    assert study.results.starts[0].effective_args is not None
    assert {row.measurement.kv_cache_tokens for row in study.results.kept()} == {2 * 448_384}


def test_what_one_engine_of_two_refuses_is_not_measured(node: GpuNode, sweep: Sweep) -> None:
    sweep("llama-8b", SIMPLE, "engine.args.data_parallel_size=2", live={"refuses_chunk": 1024, "engine": 1})
    summary = study_of(node).summary
    assert summary is not None
    refused = {line.knobs.get("max_num_batched_tokens") for line in summary.settings if line.state == "infeasible"}
    assert refused == {1024}


def test_doctor_names_what_is_wrong(node: GpuNode) -> None:
    lines = {line["check"]: line for line in checked(node)}
    assert {
        lines[check]["status"] for check in ("gpu", "nvml", "driver", "gpu count", "other tenants", "free memory")
    } == {"ok"}, "the neighbour is on a GPU that is not used"
    info = node.folder / "packages" / "nvidia_cuda_runtime-14.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cuda-runtime\nVersion: 14.0\n")
    node.devices(8, {2: 30 * GIB})
    env = {"PYTHONPATH": str(info.parent), "HF_HUB_OFFLINE": "1", "HF_HOME": str(node.folder)}
    lines = {line["check"]: line for line in checked(node, env=env)}
    assert lines["driver"]["status"] == "wrong"
    assert "runs CUDA up to 13, vLLM's PyTorch was built for 14" in lines["driver"]["message"]
    assert "pid 4711 (30.0 GiB)" in lines["other tenants"]["message"]
    assert lines["free memory"]["status"] == "wrong"
    assert lines["HF_TOKEN"]["status"] == "wrong"
    node.devices(3)
    lines = {line["check"]: line for line in checked(node)}
    assert lines["gpu count"]["status"] == "wrong"
    assert "4 GPUs" in lines["gpu count"]["message"]


def checked(node: GpuNode, env: dict[str, str] | None = None) -> list[dict[str, str]]:
    done = node.chunktune("doctor", "default", "--json", env=env)
    return list(json.loads(done.stdout))
