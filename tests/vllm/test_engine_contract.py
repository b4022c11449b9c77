"""The real `vllm serve` on the CPU under the checks that the simulated engine has to pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.engine.serving import CHECKS, OPTIONS, START_FAILURES, Server, failed_start, started
from tuner.sim.tiny_model import make_tiny_model

VLLM = os.environ.get("CHUNKTUNE_TEST_VLLM", "")
pytestmark = pytest.mark.skipif(not VLLM, reason="CHUNKTUNE_TEST_VLLM names no vllm command")
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
START_S = 240.0


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = make_tiny_model(tmp_path_factory.mktemp("model"))
    options = ["--load-format", "dummy", "--enforce-eager", "--gpu-memory-utilization", "0.1"]
    return [VLLM, "serve", str(model), *OPTIONS, *options]


@pytest.fixture(scope="module")
def server(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log: Path = tmp_path_factory.mktemp("vllm") / "engine.log"
    with started(command, ENV, log, START_S) as running:
        yield running


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_it_serves_as_the_contract_says(server: Server, check: Callable[[Server], None]) -> None:
    check(server)


@pytest.mark.parametrize(("options", "code", "says"), START_FAILURES, ids=lambda value: str(value)[:24])
def test_it_refuses_to_start_as_the_contract_says(command: list[str], options: list[str], code: int, says: str) -> None:
    exit_code, output = failed_start([*command, *options], ENV, START_S)
    assert says in output
    assert exit_code == code
