"""GPUs, tenants, interpreters and what surrounds a sweep."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.doctor.test_sense import profile
from tuner.doctor.line import Line
from tuner.doctor.machine import judge_devices
from tuner.doctor.surroundings import has_chat_template, judge_surroundings, proxies
from tuner.telemetry import DeviceFact, DeviceFacts, Tenant

GIB = 1 << 30


def device(used: int = 0, *tenants: Tenant) -> DeviceFact:
    return DeviceFact("NVIDIA H100", "GPU-1", 80 * GIB, used, list(tenants))


def by_check(lines: list[Line]) -> dict[str, Line]:
    return {line.check: line for line in lines}


def test_free_devices_are_fine() -> None:
    lines = judge_devices(DeviceFacts([device()], "570.1"), profile(), needed=True)
    assert {line.status for line in lines} == {"ok"}
    assert "570.1" in by_check(lines)["nvml"].message


def test_no_device_is_wrong_only_where_one_is_needed() -> None:
    facts = DeviceFacts(reason="NVML Shared Library Not Found")
    assert judge_devices(facts, profile(), needed=True)[0].status == "wrong"
    found = judge_devices(facts, profile(), needed=False)[0]
    assert found.status == "ok"
    assert "Not Found" in found.message


def test_devices_that_nothing_will_use_are_not_judged() -> None:
    facts = DeviceFacts([device(80 * GIB)], "570.1")
    assert [line.status for line in judge_devices(facts, profile(), needed=False)] == ["ok"]


def test_tenants_and_the_memory_they_hold() -> None:
    facts = DeviceFacts([device(40 * GIB, Tenant(4711, 40 * GIB), Tenant(5, None))], "570.1")
    lines = by_check(judge_devices(facts, profile(), needed=True))
    assert "pid 4711 (40.0 GiB)" in lines["other tenants"].message
    assert "pid 5" in lines["other tenants"].message
    assert lines["free memory"].status == "wrong"
    assert "gpu_memory_utilization" in lines["free memory"].hint


def test_gpus_that_the_engine_will_not_use_are_not_judged() -> None:
    facts = DeviceFacts([device(), device(70 * GIB, Tenant(4711, 70 * GIB))], "570.1")
    lines = by_check(judge_devices(facts, profile(), needed=True))
    assert (lines["other tenants"].status, lines["free memory"].status) == ("ok", "ok")
    two = by_check(judge_devices(facts, profile(args={"tensor_parallel_size": 2}), needed=True))
    assert two["free memory"].status == "wrong"


@pytest.mark.parametrize(("cuda", "status"), [(13, "wrong"), (12, "ok"), (None, "ok")])
def test_a_driver_too_old_for_vllms_cuda(cuda: int | None, status: str) -> None:
    facts = DeviceFacts([device()], "550.1", driver_cuda=12)
    line = by_check(judge_devices(facts, profile(), needed=True, cuda=cuda))["driver"]
    assert line.status == status
    assert status == "ok" or "driver 550.1 runs CUDA up to 12" in line.message


def test_more_ranks_than_devices() -> None:
    lines = by_check(judge_devices(DeviceFacts([device()]), profile(args={"tensor_parallel_size": 4}), needed=True))
    assert lines["gpu count"].status == "wrong"


@pytest.mark.parametrize(
    ("env", "status"),
    [
        ({}, "ok"),
        ({"HTTP_PROXY": "http://user:secret@p"}, "warning"),
        ({"https_proxy": "http://user:secret@p", "no_proxy": "localhost, 127.0.0.1"}, "ok"),
        ({"ALL_PROXY": "http://user:secret@p", "NO_PROXY": "*"}, "ok"),
    ],
)
def test_proxies(env: dict[str, str], status: str) -> None:
    found = proxies(env)
    assert found.status == status
    assert "secret" not in found.message + found.hint


def cache(folder: Path, model: str, **files: Any) -> None:
    root = folder / "hub" / f"models--{model.replace('/', '--')}"
    snapshot = root / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("c0ffee")
    for name, value in files.items():
        (snapshot / f"{name}.json").write_text(json.dumps(value))


def look(tmp_path: Path, env: dict[str, str], *, simulated: bool = False, **workload: Any) -> dict[str, Line]:
    env = {"HF_HOME": str(tmp_path), **env}
    return by_check(judge_surroundings(profile(**workload), tmp_path / "out", env, simulated=simulated))


def test_the_token_is_never_shown(tmp_path: Path) -> None:
    lines = look(tmp_path, {"HF_TOKEN": "hf_verysecret"})
    assert lines["HF_TOKEN"].status == "ok"
    assert "verysecret" not in str(lines)
    assert look(tmp_path, {})["HF_TOKEN"].status == "warning"
    assert look(tmp_path, {"HF_HUB_OFFLINE": "1"})["HF_TOKEN"].status == "wrong"
    cache(tmp_path, "m/x")
    assert look(tmp_path, {"HF_HUB_OFFLINE": "1"})["HF_TOKEN"].status == "ok"


def test_the_simulated_engine_needs_no_files_of_the_model(tmp_path: Path) -> None:
    assert "HF_TOKEN" not in look(tmp_path, {}, simulated=True)


def test_chat_template(tmp_path: Path) -> None:
    assert look(tmp_path, {}, api="completions")["chat template"].status == "ok"
    assert look(tmp_path, {}, api="chat")["chat template"].status == "warning"
    cache(tmp_path, "m/x", tokenizer_config={"bos_token": "<s>"})
    assert look(tmp_path, {}, api="chat")["chat template"].status == "wrong"
    snapshot = next((tmp_path / "hub").glob("*/snapshots/*"))
    (snapshot / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert has_chat_template(snapshot)
    assert look(tmp_path, {}, api="chat")["chat template"].status == "ok"


def test_disk(tmp_path: Path) -> None:
    assert look(tmp_path, {})["disk"].status in ("ok", "warning")
    (tmp_path / "out").write_text("a file where the results should be")
    assert look(tmp_path, {})["disk"].status == "wrong"


def free(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    usage = shutil.disk_usage("/")._replace(free=int(gib * GIB))
    monkeypatch.setattr("tuner.doctor.surroundings.shutil.disk_usage", lambda folder: usage)


@pytest.mark.parametrize(
    ("model", "gib", "status"),
    [
        ("meta/Llama-70B", 100, "wrong"),
        ("meta/Llama-70B", 150, "warning"),
        ("meta/Llama-70B-FP8", 100, "warning"),
        ("meta/Llama-70B-FP8", 60, "wrong"),
        ("meta/Llama-3.1-8B-Instruct-AWQ", 3, "wrong"),
        ("meta/model", 1, "warning"),
    ],
)
def test_room_for_a_model_that_has_to_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, gib: float, status: str
) -> None:
    free(monkeypatch, gib)
    lines = by_check(
        judge_surroundings(
            profile().model_copy(update={"model": model}), tmp_path, {"HF_HOME": str(tmp_path)}, simulated=False
        )
    )
    assert lines["model files"].status == status
    assert f"{gib} GiB free" in lines["model files"].message


def test_a_model_that_is_here_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache(tmp_path, "m/x")
    free(monkeypatch, 0)
    assert look(tmp_path, {})["model files"].status == "ok"


def test_shared_memory_of_a_container_is_too_small_for_several_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 0.0625)
    assert look(tmp_path, {})["/dev/shm"].status == "ok"
    several = look(tmp_path, {}, args={"tensor_parallel_size": 4})["/dev/shm"]
    assert (several.status, several.message) == ("wrong", "64 MiB free, too little for an engine of several GPUs")
    assert "--shm-size" in several.hint
    free(monkeypatch, 16)
    assert look(tmp_path, {}, args={"tensor_parallel_size": 4})["/dev/shm"].status == "ok"
