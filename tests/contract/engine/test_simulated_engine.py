"""The simulated engine serves as `vllm serve` does; `tests/vllm` puts the same checks to the real one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.engine.serving import CHECKS, OPTIONS, START_FAILURES, Server, failed_start, started
from tuner.load.probe import probe
from tuner.load.target import Target

pytest.importorskip("aiconfigurator_core", reason="the step-time tables are not installed (extra `sim`)")

COMMAND = [sys.executable, "-m", "tuner.sim", "serve", "meta-llama/Llama-3.1-8B-Instruct", *OPTIONS]
ENV = {"CHUNKTUNE_SIM": '{"gpu": "h100_sxm", "speed": 5}'}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log: Path = tmp_path_factory.mktemp("sim") / "engine.log"
    with started(COMMAND, ENV, log, 60) as running:
        yield running


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_it_serves_as_vllm_does(server: Server, check: Callable[[Server], None]) -> None:
    check(server)


@pytest.mark.parametrize(("options", "code", "says"), START_FAILURES, ids=lambda value: str(value)[:24])
def test_it_refuses_to_start_as_vllm_does(options: list[str], code: int, says: str) -> None:
    exit_code, output = failed_start([*COMMAND, *options], ENV, 60)
    assert says in output
    assert exit_code == code


async def test_it_says_what_it_is(server: Server) -> None:
    """`bench` and `compare` of a URL label its numbers by that."""
    assert (await probe(Target(f"http://127.0.0.1:{server.port}"))).simulated


def test_memory_is_told_by_part(server: Server) -> None:
    status, memory = server.call("GET", "/chunktune/memory")
    assert status == 200
    [device] = memory["devices"]
    assert device["device"] == "sim-0"
    parts = memory["breakdown"]
    assert parts["weights_bytes"] + parts["activation_peak_bytes"] + parts["kv_pool_bytes"] == device["used_bytes"]
    assert 0 < device["used_bytes"] < device["total_bytes"]
    assert 0 <= parts["kv_in_use_peak_bytes"] <= parts["kv_pool_bytes"]


def test_prefill_chunks_are_counted(server: Server) -> None:
    before = server.metrics()
    server.complete([5] * 200, 1)
    after = server.metrics()
    assert after["chunktune:prefills_total"] - before["chunktune:prefills_total"] == 1
    assert after["chunktune:prefill_chunks_total"] - before["chunktune:prefill_chunks_total"] in (3, 4)


def test_a_key_is_asked_for(tmp_path: Path) -> None:
    with started([*COMMAND, "--api-key", "contract"], ENV, tmp_path / "engine.log", 60) as guarded:
        assert guarded.call("GET", "/v1/models")[0] == 401
        assert guarded.call("GET", "/health")[0] == 200


def test_without_the_tables_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "aiconfigurator_core.py").write_text("raise ImportError('not here')\n")
    exit_code, output = failed_start(COMMAND, {**ENV, "PYTHONPATH": str(tmp_path)}, 60)
    assert exit_code == 1
    assert "chunktune[sim]" in output
    assert "Traceback" not in output
