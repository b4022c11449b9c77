"""A frozen reuse budget starts: through `chunktune serve`, and through the YAML file as its own words say."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.engine.serving import Server, started
from tests.fakes.frozen import frozen_of
from tuner.domain.frozen import Frozen
from tuner.domain.setting import ReuseBudget, Setting
from tuner.engine.effective import difference, from_log
from tuner.engine.launch import LaunchSpec, plugin_folder
from tuner.freeze import save_frozen, to_yaml

BUDGET = ReuseBudget(max_cached_blocks=40, min_reuse_ratio=0.8)
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
START_S = 300.0
SAYS = "chunktune reuse budget: Budget(max_cached_blocks=40, min_reuse_ratio=0.8,"


@pytest.fixture(scope="module")
def frozen(float32_model: str, vllm_command: str, launch_spec: Callable[..., LaunchSpec]) -> Frozen:
    """A study's winner that has the plug-in, for the tiny model."""
    made = frozen_of(setting=Setting(reuse_budget=BUDGET))
    words = [vllm_command, "serve", float32_model]
    args = dict(launch_spec().args)
    return made.model_copy(update={"model": float32_model, "engine_args": args, "command": words, "engine_env": {}})


def runs_as_frozen(server: Server, frozen: Frozen) -> None:
    """It answers, with the frozen options and budget."""
    _, models = server.call("GET", "/v1/models")
    body = {"model": models["data"][0]["id"], "prompt": [7] * 100, "max_tokens": 2}
    assert server.call("POST", "/v1/completions", body)[0] == 200
    log = server.log.read_text(errors="replace")
    assert SAYS in log
    assert difference(frozen.engine_args, from_log(log.splitlines()).args) is None


def test_serve_starts_it(frozen: Frozen, vllm_command: str, tmp_path: Path) -> None:
    save_frozen(tmp_path / "frozen.json", frozen)
    command = [sys.executable, "-m", "tuner", "serve", str(tmp_path / "frozen.json"), "--vllm", vllm_command, "--"]
    env = {**ENV, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with started(command, env, tmp_path / "serve.log", START_S) as server:
        runs_as_frozen(server, frozen)


def test_the_yaml_starts_it_with_the_package_on_the_path(frozen: Frozen, vllm_command: str, tmp_path: Path) -> None:
    text = to_yaml(frozen)
    assert "PYTHONPATH" in text
    (tmp_path / "frozen.yaml").write_text(text)
    command = [vllm_command, "serve", "--config", str(tmp_path / "frozen.yaml")]
    path = os.pathsep.join(p for p in (str(plugin_folder(tmp_path)), os.environ.get("PYTHONPATH", "")) if p)
    with started(command, {**ENV, "PYTHONPATH": path}, tmp_path / "serve.log", START_S) as server:
        runs_as_frozen(server, frozen)
