"""A frozen reuse budget starts: through `chunktune serve`, and through the YAML file as its own words say."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.frozen import frozen_of
from tests.vllm.test_sweep import serving
from tuner.domain.frozen import Frozen
from tuner.domain.setting import ReuseBudget, Setting
from tuner.engine.launch import LaunchSpec, free_port, plugin_folder
from tuner.freeze import save_frozen, to_yaml

BUDGET = ReuseBudget(max_cached_blocks=40, min_reuse_ratio=0.8)
SAYS = "chunktune reuse budget: Budget(max_cached_blocks=40, min_reuse_ratio=0.8,"


@pytest.fixture(scope="module")
def frozen(float32_model: str, vllm_command: str, launch_spec: Callable[..., LaunchSpec]) -> Frozen:
    """A study's winner that has the plug-in, for the tiny model."""
    made = frozen_of(setting=Setting(reuse_budget=BUDGET))
    words = [vllm_command, "serve", float32_model]
    args = dict(launch_spec().args)
    return made.model_copy(update={"model": float32_model, "engine_args": args, "command": words, "engine_env": {}})


def answers(base_url: str) -> bool:
    with urllib.request.urlopen(f"{base_url}/v1/models", timeout=30) as reply:
        model = json.loads(reply.read())["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": [7] * 100, "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{base_url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return bool(json.loads(reply.read())["choices"])


def test_serve_starts_it(frozen: Frozen, vllm_command: str, tmp_path: Path) -> None:
    save_frozen(tmp_path / "frozen.json", frozen)
    command = [sys.executable, "-m", "tuner", "serve", str(tmp_path / "frozen.json"), "--vllm", vllm_command, "--"]
    with serving(command, free_port(), tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")) as base_url:
        assert answers(base_url)
        assert SAYS in (tmp_path / "serve.log").read_text()


def test_the_yaml_starts_it_with_the_package_on_the_path(frozen: Frozen, vllm_command: str, tmp_path: Path) -> None:
    text = to_yaml(frozen)
    assert "PYTHONPATH" in text
    (tmp_path / "frozen.yaml").write_text(text)
    command = [vllm_command, "serve", "--config", str(tmp_path / "frozen.yaml")]
    path = os.pathsep.join(p for p in (str(plugin_folder(tmp_path)), os.environ.get("PYTHONPATH", "")) if p)
    with serving(command, free_port(), tmp_path, PYTHONPATH=path) as base_url:
        assert answers(base_url)
        assert SAYS in (tmp_path / "serve.log").read_text()
