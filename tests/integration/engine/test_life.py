"""For each way to end: no process, no port, no record is left, whatever the engine does about it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.engine.conftest import FAKE, MakeSpec
from tuner.clock import FakeClock
from tuner.engine.launch import LaunchSpec, launched, port_is_free
from tuner.errors import EngineError, UsageError

LeftOver = Callable[[], list[int]]
STUBBORN = {"core": "stubborn", "ignore_term": True}


def assert_nothing_left(spec: LaunchSpec, port: int | None, left_over: LeftOver) -> None:
    assert left_over() == []
    assert list(spec.record_dir.glob("engine-*")) == []
    assert port is None or port_is_free(port)


@pytest.mark.parametrize("core", ["none", "polite", "stubborn", "escaping"])
@pytest.mark.parametrize("ignore_term", [False, True])
async def test_success(make_spec: MakeSpec, left_over: LeftOver, core: str, ignore_term: bool) -> None:
    spec = make_spec(core=core, ignore_term=ignore_term)
    async with launched(spec) as engine:
        assert engine.exited() is None
        assert len(engine.process_ids()) == (1 if core == "none" else 2)
        assert sorted(left_over()) == sorted(engine.process_ids())
        assert engine.start_s > 0
        assert not port_is_free(engine.port)
        port = engine.port
    assert_nothing_left(spec, port, left_over)


async def test_an_error_of_our_own(make_spec: MakeSpec, left_over: LeftOver) -> None:
    spec = make_spec(**STUBBORN)
    ports = []

    async def serve() -> None:
        async with launched(spec) as engine:
            ports.append(engine.port)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await serve()
    assert_nothing_left(spec, ports[0], left_over)


async def test_a_failed_start_with_its_workers_still_there(make_spec: MakeSpec, left_over: LeftOver) -> None:
    spec = make_spec(core="stubborn", start=[{"log": "no_free_memory", "exit": 1, "after_s": 0.3}])
    with pytest.raises(EngineError) as caught:
        async with launched(spec):
            pytest.fail("it never was ready")
    assert caught.value.diagnosis.code == "no_free_memory"
    assert caught.value.diagnosis.log_path == str(spec.log_path)
    assert str(spec.log_path) in caught.value.hint
    assert_nothing_left(spec, None, left_over)


async def test_what_a_slow_start_is_doing_is_told_every_minute(make_spec: MakeSpec, left_over: LeftOver) -> None:
    spec = make_spec(timeout_s=150.0, start=[{"hang": True}], core="polite")
    told: list[str] = []
    with pytest.raises(EngineError, match="nothing moved for 2 min 30 s"):
        async with launched(spec, FakeClock(), on_wait=told.append):
            pytest.fail("it never was ready")
    assert len(told) >= 2
    assert told[0].startswith("not ready after 1 min 00 s")
    assert_nothing_left(spec, None, left_over)


async def test_a_start_that_hangs(make_spec: MakeSpec, left_over: LeftOver) -> None:
    spec = make_spec(timeout_s=0.8, start=[{"hang": True}], **STUBBORN)
    with pytest.raises(EngineError) as caught:
        async with launched(spec):
            pytest.fail("it never was ready")
    assert caught.value.diagnosis.code == "startup_timeout"
    assert "Waiting for 1 local, 0 remote core engine" in caught.value.message
    assert_nothing_left(spec, None, left_over)


async def test_a_slow_start_within_its_deadline(make_spec: MakeSpec) -> None:
    async with launched(make_spec(ready_after_s=40, time_scale=0.02)) as engine:
        assert engine.start_s > 0.8


async def test_an_exit_is_seen_long_before_the_deadline(make_spec: MakeSpec, left_over: LeftOver) -> None:
    spec = make_spec(timeout_s=3600, start=[{"after_s": 0.2, "exit": 1, "text": "ValueError: nope"}])
    with pytest.raises(EngineError) as caught:
        async with asyncio.timeout(30), launched(spec):
            pytest.fail("it never was ready")
    assert caught.value.diagnosis.code == "unknown"
    assert "nope" in caught.value.message
    assert_nothing_left(spec, None, left_over)


@pytest.mark.parametrize("during", ["start", "load"])
@pytest.mark.parametrize("times", [1, 3])
async def test_cancelled(make_spec: MakeSpec, left_over: LeftOver, during: str, times: int) -> None:
    spec = make_spec(ready_after_s=30 if during == "start" else 0, **STUBBORN)
    ready = asyncio.Event()

    async def serve() -> None:
        async with launched(spec):
            ready.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(serve())
    if during == "load":
        await asyncio.wait_for(ready.wait(), 20)
    else:
        while len(left_over()) < 2:
            await asyncio.sleep(0.05)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_nothing_left(spec, None, left_over)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"exit": 0}, "engine_died"),
        ({"exit": 1, "log": "cuda_oom_under_load"}, "cuda_oom"),
        ({"signal": int(signal.SIGKILL)}, "engine_died"),
        ({"kill_core": True}, "engine_died"),
    ],
)
async def test_an_end_nobody_asked_for(
    make_spec: MakeSpec, left_over: LeftOver, fault: dict[str, object], code: str
) -> None:
    spec = make_spec(core="stubborn", load=[{"after_requests": 0, **fault}])
    async with launched(spec) as engine:
        request = asyncio.create_task(_one_request(engine.port, engine.model_id))
        diagnosis = await asyncio.wait_for(engine.wait_died(), 20)
        assert diagnosis.code == code
        assert engine.exited() == diagnosis
        request.cancel()
    assert_nothing_left(spec, None, left_over)


async def _one_request(port: int, model: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = f'{{"model":"{model}","prompt":[1,2,3],"max_tokens":2}}'.encode()
    head = f"POST /v1/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    try:
        writer.write(head + body)
        await reader.read(10)
    except ConnectionError:
        pass
    finally:
        writer.close()


async def test_the_effective_configuration_is_read_back(make_spec: MakeSpec) -> None:
    spec = make_spec(args={"max_num_batched_tokens": 1024, "max_num_seqs": 64, "block_size": 32}, kv_tokens=9999)
    async with launched(spec) as engine:
        assert engine.effective.args["max_num_batched_tokens"] == 1024
        assert engine.effective.args["max_num_seqs"] == 64
        assert engine.effective.block_size == 32
        assert engine.effective.kv_cache_tokens == 9999
        assert engine.effective.vllm_version == "0.32.0"


async def test_another_value_than_asked_for_is_an_error(make_spec: MakeSpec, left_over: LeftOver) -> None:
    spec = make_spec(log_chunk=2048)
    with pytest.raises(EngineError) as caught:
        async with launched(spec):
            pytest.fail("it does not run what was asked for")
    assert caught.value.diagnosis.code == "not_as_asked"
    assert "max_num_batched_tokens is 2048, asked for was 512" in caught.value.message
    assert_nothing_left(spec, None, left_over)


async def test_the_memory_is_waited_for(make_spec: MakeSpec) -> None:
    looks: list[int] = []

    def back() -> bool:
        looks.append(1)
        return len(looks) >= 3

    async with launched(make_spec(), memory_is_back=back):
        assert looks == []
    assert len(looks) == 3


async def test_a_stranger_on_the_port_is_not_mistaken_for_the_engine(
    make_spec: MakeSpec, left_over: LeftOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with launched(make_spec()) as stranger:
        monkeypatch.setattr("tuner.engine.launch.free_port", lambda: stranger.port)
        spec = make_spec()
        with pytest.raises(EngineError) as caught:
            async with launched(spec):
                pytest.fail("the stranger answered")
        assert caught.value.diagnosis.code == "port_in_use"
        assert stranger.exited() is None
    assert left_over() == []


async def test_a_missing_command_is_wrong_usage(make_spec: MakeSpec, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-such-vllm"):
        async with launched(make_spec(launcher=(str(tmp_path / "no-such-vllm"),))):
            pytest.fail("there is nothing to start")


async def test_proxy_variables_do_not_hide_the_engine(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with launched(make_spec()) as engine:
        assert engine.exited() is None


def test_a_port_is_free_when_nobody_listens_on_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free(port)
    assert port_is_free(port)


async def test_a_server_that_a_daemon_keeps_alive_is_called_not_stopped(
    make_spec: MakeSpec, tmp_path: Path, left_over: LeftOver
) -> None:
    """A launcher hands its command to somebody else, as `docker run` does, and ends without ending the server."""
    order = tmp_path / "order.json"
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import json, os, sys, time\n"
        f"open({str(order)!r} + '.new', 'w').write(json.dumps(sys.argv[1:]))\n"
        f"os.rename({str(order)!r} + '.new', {str(order)!r})\n"
        "time.sleep(120)\n"
    )
    spec = make_spec(launcher=(sys.executable, str(launcher)))

    async def daemon() -> subprocess.Popen[bytes]:
        while not order.exists():
            await asyncio.sleep(0.02)
        command = [sys.executable, str(FAKE), *json.loads(order.read_text())]
        env = {**os.environ, **spec.env, "VLLM_SERVER_DEV_MODE": "1"}
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    server = asyncio.ensure_future(daemon())
    try:
        with pytest.raises(EngineError, match="still answers") as caught:
            async with launched(spec) as engine:
                assert engine.pid != server.result().pid
        assert caught.value.diagnosis.code == "not_stopped"
    finally:
        (await server).kill()
        server.result().wait()
    assert left_over() == []
