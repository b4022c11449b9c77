"""GPUs, tenants, interpreters and what surrounds a sweep."""

from __future__ import annotations

import json
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
