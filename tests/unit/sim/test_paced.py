"""How the paced engine's command is made out of `vllm serve`'s."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("aiconfigurator_core", reason="the step-time tables are not installed (extra `sim`)")
MODEL = "meta-llama/Llama-3.1-70B-Instruct"


@pytest.fixture(scope="module")
def serve() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "paced" / "serve.py"
    spec = importlib.util.spec_from_file_location("paced_serve", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(**changes: object) -> argparse.Namespace:
    fields = {"gpu": "h100_sxm", "count": None, "env_count": None, "cost_model": None, "kv_tokens": None}
    more = {"step_time_scale": 1.0, "step_log": None, "vllm": "vllm"}
    return argparse.Namespace(**{**fields, **more, **changes})


def option(argv: list[str], flag: str) -> str:
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


def test_it_serves_the_tiny_model_under_the_asked_name(serve: ModuleType) -> None:
    argv, env = serve.command(arguments(), MODEL, ["--tensor-parallel-size", "4", "--max-num-batched-tokens", "512"])
    assert argv[:2] == ["vllm", "serve"]
    assert (Path(argv[2]) / "config.json").is_file()
    assert option(argv, "--served-model-name") == MODEL
    assert option(argv, "--worker-cls") == "benchmarks.paced.worker.PacedWorker"
    assert option(argv, "--max-num-batched-tokens") == "512"
    assert "--tensor-parallel-size" not in argv
    settings = json.loads(env["CHUNKTUNE_PACED"])
    assert (settings["cost_model"], settings["tp"]) == ("meta-llama/Meta-Llama-3.1-70B", 4)


def test_the_pool_is_the_real_model_s(serve: ModuleType) -> None:
    argv, _ = serve.command(arguments(), MODEL, ["-tp", "4", "--gpu-memory-utilization", "0.9"])
    assert 10_000 < int(option(argv, "--num-gpu-blocks-override")) < 20_000
    small, _ = serve.command(arguments(kv_tokens=20_480), MODEL, ["-tp", "4"])
    assert option(small, "--num-gpu-blocks-override") == "640"
    given, _ = serve.command(arguments(), MODEL, ["-tp", "4", "--num-gpu-blocks-override=1280", "--block-size=16"])
    assert option(given, "--num-gpu-blocks-override") == "640"


def test_blocks_are_a_multiple_of_what_cpu_attention_takes(
    serve: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, _ = serve.command(arguments(), MODEL, ["-tp", "4", "--block-size", "16"])
    assert option(argv, "--block-size") == "32"
    assert "multiples" in capsys.readouterr().err
    argv, _ = serve.command(arguments(), MODEL, ["-tp", "4", "--block-size", "64"])
    assert option(argv, "--block-size") == "64"


def test_the_pretended_gpus_can_be_named_apart_from_the_options(serve: ModuleType) -> None:
    def tp(args: argparse.Namespace, rest: list[str]) -> int:
        return int(json.loads(serve.command(args, MODEL, rest)[1]["CHUNKTUNE_PACED"])["tp"])

    assert tp(arguments(count=4, env_count=8), ["-tp", "2"]) == 4
    assert tp(arguments(env_count=8), ["-tp", "4"]) == 4
    assert tp(arguments(env_count=4), []) == 4


def test_other_options_go_on_as_they_are(serve: ModuleType) -> None:
    rest = ["-tp", "4", "--port", "1", "--served-model-name", "a", "b", "--enable-prompt-tokens-details"]
    argv, _ = serve.command(arguments(), MODEL, rest)
    assert option(argv, "--port") == "1"
    assert "--enable-prompt-tokens-details" in argv
    at = argv.index("--served-model-name")
    assert argv[at + 1 : at + 3] == ["a", "b"]
