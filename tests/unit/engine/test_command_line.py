"""The command and the environment of an engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tuner.domain.setting import ReuseBudget
from tuner.engine.launch import LaunchSpec, command_line, environment
from tuner.errors import UsageError
from tuner.scheduler.messages import BUDGET_VARIABLE, started_budget


def spec(tmp_path: Path, **changes: Any) -> LaunchSpec:
    given: dict[str, Any] = {
        "launcher": ("vllm",),
        "kind": "vllm",
        "model": "m/x",
        "args": {"max_num_batched_tokens": 512, "enable_chunked_prefill": False},
        "env": {},
        "log_path": tmp_path / "engine.log",
        "startup_timeout_s": 1.0,
        "record_dir": tmp_path,
    }
    return LaunchSpec(**{**given, **changes})


def test_command(tmp_path: Path) -> None:
    assert command_line(spec(tmp_path, extra_argv=("--foo",)), 8123) == [
        *("vllm", "serve", "m/x", "--enable-prompt-tokens-details"),
        *("--max-num-batched-tokens", "512", "--no-enable-chunked-prefill", "--foo"),
        *("--host", "127.0.0.1", "--port", "8123", "--served-model-name", "chunktune"),
    ]


def test_a_reuse_budget_becomes_the_plug_in_and_keeps_other_additional_config(tmp_path: Path) -> None:
    budget = ReuseBudget(max_cached_blocks=128)
    argv = command_line(spec(tmp_path, args={"additional_config": '{"x":1}'}, reuse_budget=budget), 1)
    assert argv[argv.index("--scheduler-cls") + 1] == "tuner.scheduler.ReuseBudgetScheduler"
    config = json.loads(argv[argv.index("--additional-config") + 1])
    assert config == {"x": 1, "chunktune": budget.to_json()}


def test_a_budget_that_is_off_is_the_stock_scheduler(tmp_path: Path) -> None:
    assert "--scheduler-cls" not in command_line(spec(tmp_path, reuse_budget=ReuseBudget()), 1)


@pytest.mark.parametrize("key", ["port", "host", "served_model_name", "api_key", "hf_token", "uds"])
def test_options_of_the_engine_room_and_secrets_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(UsageError, match=key) as caught:
        command_line(spec(tmp_path, args={key: "s3cret"}), 1)
    assert "s3cret" not in str(caught.value)


def test_environment(tmp_path: Path) -> None:
    base = {"HTTP_PROXY": "http://p", "VLLM_API_KEY": "k", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HOME": "/a"}
    env = environment(spec(tmp_path, env={"HF_HOME": "/b"}), base)
    assert env["HF_HOME"] == "/b"
    assert env["HTTP_PROXY"] == "http://p"
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["VLLM_LOGGING_LEVEL"] == "INFO"
    assert "VLLM_API_KEY" not in env
    assert "PYTHONPATH" not in env


def test_the_plug_in_folder_holds_the_scheduler_and_nothing_else(tmp_path: Path) -> None:
    env = environment(spec(tmp_path, reuse_budget=ReuseBudget(min_reuse_ratio=0.8)), {"PYTHONPATH": "/theirs"})
    folder, _, rest = env["PYTHONPATH"].partition(os.pathsep)
    assert rest == "/theirs"
    assert sorted(p.name for p in (Path(folder) / "tuner").iterdir()) == ["__init__.py", "scheduler"]
    assert [p.name for p in Path(folder).iterdir()] == ["tuner"]
    assert "PYTHONPATH" not in environment(spec(tmp_path, kind="sim", reuse_budget=ReuseBudget(min_reuse_ratio=1)), {})


def test_while_searching_a_budget_goes_by_the_environment_and_compiles_nothing_anew(tmp_path: Path) -> None:
    budget = ReuseBudget(min_reuse_ratio=0.8)
    searching = spec(tmp_path, reuse_budget=budget, budget_in_environment=True)
    argv = command_line(searching, 1)
    assert argv[argv.index("--scheduler-cls") + 1] == "tuner.scheduler.ReuseBudgetScheduler"
    assert "--additional-config" not in argv
    env = environment(searching, {BUDGET_VARIABLE: "{}"})
    assert started_budget({"chunktune": {}}, env).min_reuse_ratio == 0.8
    frozen = spec(tmp_path, reuse_budget=budget)
    argv = command_line(frozen, 1)
    given = json.loads(argv[argv.index("--additional-config") + 1])
    env = environment(frozen, {BUDGET_VARIABLE: "{}"})
    assert BUDGET_VARIABLE not in env
    assert started_budget(given, env).min_reuse_ratio == 0.8


def test_a_live_start_gets_the_live_scheduler_and_no_budget_of_its_own(tmp_path: Path) -> None:
    live = spec(tmp_path, live=True, reuse_budget=ReuseBudget(min_reuse_ratio=0.8))
    argv = command_line(live, 1)
    assert argv[argv.index("--scheduler-cls") + 1] == "tuner.scheduler.LiveScheduler"
    assert "--additional-config" not in argv
    folder = Path(environment(live, {})["PYTHONPATH"])
    assert (folder / "tuner" / "scheduler" / "live.py").is_file()


def test_a_scheduler_of_the_profile_s_own_cannot_be_switched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="scheduler_cls"):
        command_line(spec(tmp_path, live=True, args={"scheduler_cls": "mine.Scheduler"}), 1)


@pytest.mark.parametrize(("given", "kept"), [("tcp://10.43.0.7:8000", False), ("29500", True), ("", False)])
def test_the_port_that_kubernetes_sets_for_a_service_named_vllm_is_taken_out(
    tmp_path: Path, given: str, kept: bool
) -> None:
    assert ("VLLM_PORT" in environment(spec(tmp_path), {"VLLM_PORT": given})) is kept


def test_data_parallel_engines_get_as_long_to_start_as_any_start_may_take(tmp_path: Path) -> None:
    name = "VLLM_ENGINE_READY_TIMEOUT_S"
    assert environment(spec(tmp_path, startup_timeout_s=1800.5), {})[name] == "5402"
    assert environment(spec(tmp_path, env={name: "77"}), {})[name] == "77"


def test_the_form_of_the_log_is_vllms_own(tmp_path: Path) -> None:
    """Causes and effective values are read from it."""
    base = {"VLLM_LOGGING_PREFIX": "[x] ", "VLLM_CONFIGURE_LOGGING": "0", "VLLM_LOGGING_CONFIG_PATH": "/json.cfg"}
    assert not set(base) & set(environment(spec(tmp_path, env=base), base))
