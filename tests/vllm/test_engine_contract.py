"""The real `vllm serve` on the CPU under the checks that the simulated engine has to pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.engine.serving import CHECKS, OPTIONS, START_FAILURES, Server, failed_start, started
from tuner.engine.diagnosis import diagnose

ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
START_S = 300.0
CAUSES = ("invalid_combination", "invalid_combination", "kv_cache_too_small", "unknown_option")
"""What we say to each of START_FAILURES."""


@pytest.fixture(scope="module")
def command(vllm_command: str, float32_model: str) -> list[str]:
    options = ["--load-format", "dummy", "--enforce-eager", "--gpu-memory-utilization", "0.1"]
    return [vllm_command, "serve", float32_model, *OPTIONS, *options]


@pytest.fixture(scope="module")
def server(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log: Path = tmp_path_factory.mktemp("vllm") / "engine.log"
    with started(command, ENV, log, START_S) as running:
        yield running


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_it_serves_as_the_contract_says(server: Server, check: Callable[[Server], None]) -> None:
    check(server)


@pytest.mark.parametrize(("failure", "cause"), list(zip(START_FAILURES, CAUSES, strict=True)))
def test_it_refuses_to_start_as_the_contract_says(
    command: list[str], failure: tuple[list[str], int, str], cause: str
) -> None:
    options, code, says = failure
    exit_code, output = failed_start([*command, *options], ENV, START_S)
    assert says in output
    assert exit_code == code
    assert diagnose(output.splitlines(), exit_code, phase="start").code == cause
