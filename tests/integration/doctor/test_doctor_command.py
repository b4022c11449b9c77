"""The command against fake servers and a fake `vllm`."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.command import chunktune
from tests.fakes.scripted_server import DONE, Asked, Reply, ScriptedServer, stream, text_chunk, usage_chunk
from tests.unit.doctor.test_sense import profile
from tuner.doctor import Request, examine
from tuner.doctor.line import Line
from tuner.engine.launch import LaunchSpec, RunningEngine, free_port, launched

FAKE = Path(__file__).parents[2] / "fakes" / "fake_vllm.py"
Serve = Callable[..., AbstractAsyncContextManager[RunningEngine]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    @asynccontextmanager
    async def start(args: dict[str, Any] | None = None, **script: Any) -> AsyncIterator[RunningEngine]:
        spec = LaunchSpec(
            launcher=(sys.executable, str(FAKE)),
            kind="vllm",
            model="fake/model",
            args=args or {},
            env={"FAKE_VLLM": json.dumps({"ttft_ms": 20, **script})},
            log_path=tmp_path / "engine.log",
            startup_timeout_s=30,
            record_dir=tmp_path / "records",
        )
        async with launched(spec) as engine:
            yield engine

    return start


async def look(url: str, **more: Any) -> dict[str, Line]:
    return {line.check: line for line in await examine(Request(profile(**more), url=url))}


async def test_a_healthy_server(serve: Serve) -> None:
    async with serve() as engine:
        for url in (engine.base_url, engine.base_url + "/v1/"):
            lines = await look(url)
            assert {line.status for line in lines.values() if line.check != "jitter"} == {"ok"}
            assert "found 64 of them cached" in lines["prefix caching"].message


@pytest.mark.parametrize(
    "usage",
    [
        ["x"],
        "x",
        {"prompt_tokens": "many", "prompt_tokens_details": []},
        {"prompt_tokens": -3, "prompt_tokens_details": {"cached_tokens": "all"}},
    ],
)
async def test_usage_of_another_shape_is_nothing_known(usage: Any) -> None:
    async with ScriptedServer(whole_usage=usage).running() as server:
        lines = await look(server.base_url)
    assert "cannot be told" in lines["prefix caching"].message


def collected(server: ScriptedServer, asked: Asked) -> Reply:
    """A gateway that passes an answer on once it is whole."""
    parts = stream(server, asked).parts
    return Reply([0.2, b"".join(p for p in parts if isinstance(p, bytes))])


def capped(server: ScriptedServer, asked: Asked) -> Reply:
    given = min(3, int(asked.body["max_tokens"]))
    tokens = [text_chunk("a")] * (given - 1)
    return Reply([*tokens, text_chunk("b", "stop"), usage_chunk(len(asked.tokens), given, 0), DONE])


def aborting(server: ScriptedServer, asked: Asked) -> Reply:
    if asked.body["max_tokens"] == 1:
        return stream(server, asked)
    return Reply([text_chunk("a"), text_chunk("b", "abort"), usage_chunk(len(asked.tokens), 2, 0), DONE])


def without_ignore_eos(server: ScriptedServer, asked: Asked) -> Reply:
    if "ignore_eos" not in asked.body:
        return stream(server, asked)
    return Reply([b'{"error": {"message": "unknown field"}}'], 400, "application/json", "length")


@pytest.mark.parametrize(
    ("behave", "check", "says"),
    [
        (collected, "stream", "in one piece"),
        (capped, "stream", "32 tokens were asked for with `ignore_eos`, 3 were given"),
        (aborting, "stream", "'abort'"),
        (without_ignore_eos, "first request", "without `ignore_eos` it answers"),
    ],
)
async def test_what_one_streamed_request_shows(behave: Any, check: str, says: str) -> None:
    async with ScriptedServer(behave).running() as server:
        line = (await look(server.base_url))[check]
    assert line.status == "wrong"
    assert says in line.message
    assert line.hint


async def test_an_honest_stream() -> None:
    async with ScriptedServer(lambda s, a: stream(s, a, ttft_s=0.01, itl_s=0.01)).running() as server:
        lines = await look(server.base_url)
    assert lines["stream"].status == "ok"
    assert "32 tokens in 32 pieces" in lines["stream"].message


async def test_prefix_caching_that_is_off(serve: Serve) -> None:
    async with serve({"enable_prefix_caching": False}) as engine:
        assert (await look(engine.base_url))["prefix caching"].status == "wrong"


async def test_a_pool_that_is_too_small(serve: Serve) -> None:
    async with serve(kv_tokens=4000) as engine:
        assert (await look(engine.base_url))["memory for the cache"].status == "wrong"


async def test_no_metrics_no_cached_tokens_no_token_ids(serve: Serve) -> None:
    async with serve(metrics="error", cached_tokens=False, token_ids=False) as engine:
        lines = await look(engine.base_url)
        assert {lines[c].status for c in ("metrics", "cached tokens", "token ids")} == {"warning"}


async def test_no_chat_template(serve: Serve) -> None:
    async with serve(chat_template=False) as engine:
        assert (await look(engine.base_url, api="chat"))["chat template"].status == "warning"


async def test_an_error_body_where_choices_was_expected(serve: Serve) -> None:
    async with serve(http_error_share=1.0) as engine:
        line = (await look(engine.base_url))["first request"]
        assert line.status == "wrong"
        assert "a fault on demand" in line.message


async def test_nobody_listens() -> None:
    line = (await look(f"http://127.0.0.1:{free_port()}"))["connection"]
    assert line.status == "wrong"


def run(*words: str, **env: str) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        done = chunktune("doctor", *words)
    return done.code, done.out, done.err


def test_json_of_this_machine(tmp_path: Path) -> None:
    code, out, err = run("--engine", "sim", "--json", "--out", str(tmp_path), HF_TOKEN="hf_verysecret")
    lines = json.loads(out)
    assert code == (3 if any(line["status"] == "wrong" for line in lines) else 0)
    assert all(set(line) == {"check", "status", "message", "hint"} for line in lines)
    assert all(line["hint"] for line in lines if line["status"] != "ok")
    assert "verysecret" not in out + err


def test_more_ranks_than_the_simulated_machine_has_gpus(tmp_path: Path) -> None:
    words = ["llama-8b", "--engine", "sim", "--json", "--out", str(tmp_path)]
    code, out, _ = run(*words, "--set", "engine.args.tensor_parallel_size=2")
    line = next(line for line in json.loads(out) if line["check"] == "gpu count")
    assert (code, line["status"]) == (3, "wrong")
    code, out, _ = run(*words, "--set", "engine.args.tensor_parallel_size=2", "--set", "hardware.count=2")
    line = next(line for line in json.loads(out) if line["check"] == "gpu count")
    assert line["status"] == "ok"


def test_a_vllm_that_lacks_an_option_and_the_plug_in(tmp_path: Path) -> None:
    script = json.dumps({"unknown_options": ["max-num-seqs"]})
    code, out, _ = run("--vllm", str(FAKE), "--json", "--out", str(tmp_path), FAKE_VLLM=script)
    lines = {line["check"]: line for line in json.loads(out)}
    assert code == 3
    assert lines["vllm"]["status"] == "ok"
    assert lines["vllm options"]["status"] == "wrong"
    assert "max-num-seqs" in lines["vllm options"]["message"]
    assert lines["scheduler plug-in"]["status"] in ("warning", "wrong")


def test_a_vllm_that_is_not_there(tmp_path: Path) -> None:
    code, out, err = run("--vllm", str(tmp_path / "nowhere"), "--out", str(tmp_path))
    assert code == 3
    assert "nowhere" in out
    assert "Traceback" not in err
