"""What is asked of a server before any load, and what is made of its answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.scripted_server import DONE, Asked, Reply, ScriptedServer, stream, text_chunk, usage_chunk
from tuner.domain.profile import Profile
from tuner.domain.workload import SharedPrefixWorkload
from tuner.errors import LoadError, UsageError
from tuner.load.drive import drive
from tuner.load.planner import Planner
from tuner.load.probe import probe
from tuner.load.target import Api, Target
from tuner.web import LARGEST_REPLY_BYTES

KEY = "sk-very-secret"


def shared(**more: Any) -> SharedPrefixWorkload:
    lengths = {"system_prompt_tokens": 48, "user_prompt_tokens": (4, 12), "output_tokens": (2, 5)}
    return SharedPrefixWorkload(**{**lengths, "concurrency": 3, "requests": 12, **more})


async def failure(target: Target) -> LoadError:
    with pytest.raises(LoadError) as caught:
        await asyncio.wait_for(probe(target), 20)
    assert caught.value.hint
    assert KEY not in str(caught.value)
    return caught.value


async def test_facts_of_a_good_server() -> None:
    async with ScriptedServer(max_model_len=4096).running() as server:
        facts = await probe(Target(server.base_url + "/v1"))
        assert len(server.asked) == 1
        assert server.asked[0].body["max_tokens"] == 1
    assert (facts.model, facts.max_model_len, facts.token_ids) == ("scripted", 4096, True)
    assert facts.reports_cached_tokens
    assert not facts.simulated
    assert facts.api == "completions"
    assert facts.label == ""


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("ignore_eos", [True, False])
async def test_the_first_request_says_what_every_other_one_says(api: Api, ignore_eos: bool) -> None:
    async with ScriptedServer().running() as server:
        target = Target(server.base_url, api=api)
        facts = await probe(target, ignore_eos=ignore_eos)
        load = shared(ignore_eos=ignore_eos)
        planner = await Planner.open(target, load, facts, seed=1, base_dir=Path())
        await drive(target, planner.plan("r1", "a1"))
        first, last = server.asked[0].body, server.asked[-1].body
    changing = ("prompt", "messages", "max_tokens")
    assert {k: v for k, v in first.items() if k not in changing} == {k: v for k, v in last.items() if k not in changing}
    assert first.keys() == last.keys()
    assert ("ignore_eos" in first) is ignore_eos
    assert facts.reports_finish


def refusing(field: str, how: str) -> Callable[[ScriptedServer, Asked], Reply]:
    """A gateway that does not know a field."""

    def behave(server: ScriptedServer, asked: Asked) -> Reply:
        if field not in asked.body:
            return stream(server, asked)
        message = json.dumps({"error": {"message": f"Unrecognized request argument supplied: {field}"}}).encode()
        if how == "in the stream":
            return Reply([b"data: " + message + b"\n\n", b"data: [DONE]\n\n"])
        return Reply([message], int(how), "application/json", "length")

    return behave


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("how", ["400", "422", "500", "in the stream"])
async def test_a_server_that_refuses_ignore_eos_is_told_apart_with_the_switch(api: Api, how: str) -> None:
    async with ScriptedServer(refusing("ignore_eos", how)).running() as server:
        error = await failure(Target(server.base_url, api=api))
        facts = await probe(Target(server.base_url, api=api), ignore_eos=False)
    assert error.code == "http_error"
    assert "without `ignore_eos` it answers" in error.message
    assert "Unrecognized request argument" in error.message
    assert "workload.ignore_eos: false" in error.hint
    assert facts.api == api


async def test_a_server_that_refuses_stream_options_is_told_apart() -> None:
    async with ScriptedServer(refusing("stream_options", "400")).running() as server:
        error = await failure(Target(server.base_url))
    assert "without `stream_options` it answers" in error.message
    assert "gateway" in error.hint


async def test_an_answer_that_ends_abnormally_is_no_good_server() -> None:
    bad = [text_chunk("a", "abort"), b"data: [DONE]\n\n"]
    async with ScriptedServer(lambda s, a: Reply(bad)).running() as server:
        error = await failure(Target(server.base_url))
    assert "finish_reason 'abort'" in error.message


async def test_a_load_without_ignore_eos_may_end_anywhere() -> None:
    def behave(server: ScriptedServer, asked: Asked) -> Reply:
        assert "ignore_eos" not in asked.body
        return Reply([text_chunk("a", "stop"), usage_chunk(len(asked.tokens), 1, asked.cached_tokens), DONE])

    async with ScriptedServer(behave).running() as server:
        target = Target(server.base_url)
        load = shared(ignore_eos=False)
        facts = await probe(target, ignore_eos=False)
        planner = await Planner.open(target, load, facts, seed=1, base_dir=Path())
        got = await drive(target, planner.plan("r1", "a1"))
    assert all(r.ok for r in got.records)
    assert got.discard_code in ("", "client_limited")


async def test_cached_tokens_that_are_not_reported() -> None:
    async with ScriptedServer(reports_cached=False).running() as server:
        assert not (await probe(Target(server.base_url))).reports_cached_tokens


async def test_a_server_that_takes_no_token_ids_gets_text_of_the_same_length() -> None:
    async with ScriptedServer(takes_token_ids=False).running() as server:
        target = Target(server.base_url)
        facts = await probe(target)
        assert not facts.token_ids
        planner = await Planner.open(target, shared(), facts, seed=1, base_dir=Path())
        got = await drive(target, planner.plan("r1", "a1"))
    assert planner.labels == ()
    assert all(r.ok and r.prompt_tokens == r.prompt_tokens_planned for r in got.records)


async def test_without_a_tokenizer_lengths_are_estimates_with_a_label() -> None:
    async with ScriptedServer(tokenizer=False).running() as server:
        target = Target(server.base_url)
        planner = await Planner.open(target, shared(), await probe(target), seed=1, base_dir=Path())
        got = await drive(target, planner.plan("r1", "a1"))
    assert "estimates" in planner.labels[0]
    assert all(abs((r.prompt_tokens or 0) - (r.prompt_tokens_planned or 0)) <= 2 for r in got.records)


async def test_chat_lengths_are_exact_with_the_template_counted_in() -> None:
    async with ScriptedServer().running() as server:
        target = Target(server.base_url, api="chat")
        facts = await probe(target)
        planner = await Planner.open(target, shared(), facts, seed=1, base_dir=Path())
        rounds = [await drive(target, planner.plan(key, "a1")) for key in ("r1", "r2")]
        bare = await Planner.open(target, shared(system_prompt_tokens=0), facts, seed=1, base_dir=Path())
        rounds.append(await drive(target, bare.plan("r3", "a1")))
    for got in rounds:
        assert "cached" not in got.discarded
        assert all(r.ok and r.prompt_tokens == r.prompt_tokens_planned for r in got.records)


async def test_what_every_chat_begins_with_is_no_warm_start() -> None:
    """A template that opens with a whole block of its own is cached for every round after the first."""
    async with ScriptedServer(template_tokens=tuple(range(900000, 900020))).running() as server:
        target = Target(server.base_url, api="chat")
        planner = await Planner.open(target, shared(), await probe(target), seed=1, base_dir=Path())
        first, again = [await drive(target, planner.plan(key, "a1")) for key in ("r1", "r1")]
    assert min(r.cached_tokens or 0 for r in first.records) == 16
    assert "cached" not in first.discarded
    assert "cached" in again.discarded


async def test_no_chat_template_falls_back_with_a_label() -> None:
    async with ScriptedServer(chat_template=False).running() as server:
        target = Target(server.base_url, api="chat")
        facts = await probe(target)
        planner = await Planner.open(target, shared(), facts, seed=1, base_dir=Path())
        got = await drive(target, planner.plan("r1", "a1"))
    assert facts.label == "completions instead of chat: no chat template"
    assert facts.label in planner.labels
    assert all(r.ok for r in got.records)


async def test_no_chat_and_no_completions_is_no_chat_template() -> None:
    bad = Reply([b'{"error": {"message": "disabled"}}'], 500, "application/json", "length")
    async with ScriptedServer(lambda s, a: bad, chat_template=False).running() as server:
        error = await failure(Target(server.base_url, api="chat"))
    assert error.code == "no_chat_template"
    assert "chat template" in error.message


async def test_a_wrong_key_is_named_without_its_value() -> None:
    async with ScriptedServer(api_key="right").running() as server:
        error = await failure(Target(server.base_url, api_key=KEY))
        assert error.code == "auth"
        assert "--api-key-env" in error.hint
        assert (await probe(Target(server.base_url, api_key="right"))).model == "scripted"


async def test_nobody_listens() -> None:
    async with ScriptedServer().running() as server:
        gone = server.base_url
    error = await failure(Target(gone))
    assert error.code == "refused"
    assert error.message == f"no connection to {gone}: Connection refused"


@pytest.mark.parametrize("models", [("a", "b"), ()])
async def test_a_server_with_several_models_or_none_has_to_be_told(models: tuple[str, ...]) -> None:
    async with ScriptedServer(models=models).running() as server:
        error = await failure(Target(server.base_url))
        assert error.code == "missing_model"
        assert "--model" in error.hint
        for model in models:
            assert (await probe(Target(server.base_url, model=model))).model == model


async def test_a_model_that_is_not_there_names_the_nearest() -> None:
    async with ScriptedServer(models=("llama-8b", "qwen")).running() as server:
        error = await failure(Target(server.base_url, model="lama-8b"))
    assert error.code == "missing_model"
    assert "llama-8b" in error.hint


@asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[str]:
    """The URL of a server that answers every connection with these bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_something_else_at_that_address() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello") as url:
        assert (await failure(Target(url))).code == "not_openai"


async def test_a_redirect_is_named_and_not_followed() -> None:
    """The load follows none, and a key must not travel."""
    async with ScriptedServer().running() as there, ScriptedServer(redirects_to=there.base_url).running() as server:
        error = await failure(Target(server.base_url, api_key=KEY))
        assert there.connections == 0
    assert error.code == "not_openai"
    assert error.message == f"{server.base_url} redirects to {there.base_url}"


async def test_an_answer_that_cannot_be_read_is_not_called_no_connection() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello") as url:
        error = await failure(Target(url))
    assert error.code == "not_openai"
    assert "cannot be read" in error.message


@pytest.mark.parametrize("length", [True, -5, "4096", None, 2.5])
async def test_a_length_that_is_no_count_is_no_limit(length: Any) -> None:
    async with ScriptedServer(model_card={"max_model_len": length}).running() as server:
        assert (await probe(Target(server.base_url))).max_model_len is None


async def test_a_hundred_models_are_not_all_listed() -> None:
    async with ScriptedServer(models=tuple(f"model-{n}" for n in range(1000))).running() as server:
        assert len((await failure(Target(server.base_url))).message) < 400
        assert len((await failure(Target(server.base_url, model="x"))).message) < 400


@pytest.mark.parametrize("bad", [2**63, -1, True, 1.5, "7"])
async def test_ids_that_are_no_tokens_are_no_tokenizer(bad: Any) -> None:
    class Odd(ScriptedServer):
        def tokens_of(self, body: dict[str, Any]) -> list[Any]:
            return [*super().tokens_of(body), bad]

    async with Odd().running() as server:
        facts = await probe(Target(server.base_url))
    assert not facts.token_ids


async def test_a_reply_without_end_is_not_kept() -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while sent < 4 * LARGEST_REPLY_BYTES:
                writer.write(b"x" * (1 << 20))
                sent += 1 << 20
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(flood, "127.0.0.1", 0) as other:
        error = await failure(Target(f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"))
    assert error.code == "not_openai"
    assert "longer than 64 MiB" in error.message
    assert sent < 2 * LARGEST_REPLY_BYTES


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_what_the_server_says_to_one_request_is_shown(api: Api) -> None:
    bad = Reply([f'{{"error": {{"message": "no KV left for {KEY}"}}}}'.encode()], 500, "application/json", "length")
    async with ScriptedServer(lambda s, a: bad).running() as server:
        error = await failure(Target(server.base_url, api=api, api_key=KEY))
    assert error.code == "http_error"
    assert "no KV left" in error.message


async def test_a_stream_that_fails_is_seen_before_the_load() -> None:
    async with ScriptedServer(lambda s, a: Reply([b"data: [DONE]\n\n"])).running() as server:
        error = await failure(Target(server.base_url))
    assert "without a single token" in error.message


async def test_a_workload_that_does_not_fit_is_refused() -> None:
    async with ScriptedServer(max_model_len=60).running() as server:
        target = Target(server.base_url)
        with pytest.raises(UsageError, match=re.escape("takes 65 tokens")) as caught:
            await Planner.open(target, shared(), await probe(target), seed=1, base_dir=Path())
    assert "max_model_len" in caught.value.hint


@pytest.mark.parametrize("name", ["tenants", "prompts", "trace", "mixed", "long-documents"])
async def test_every_ready_load_can_be_driven(name: str) -> None:
    """The ready profiles' workloads, played small and fast."""
    folder = Path(__file__).parents[3] / "profiles"
    profile = Profile.model_validate(yaml.safe_load((folder / f"{name}.yaml").read_text()))
    update: dict[str, Any] = {"requests": 12}
    if name == "trace":
        update["speed"] = 50.0
    workload = profile.workload.model_copy(update=update)
    async with ScriptedServer(lambda s, a: stream(s, a, ttft_s=0.002)).running() as server:
        target = Target(server.base_url, api=workload.api)
        planner = await Planner.open(target, workload, await probe(target), seed=1, base_dir=folder)
        warm = await asyncio.wait_for(drive(target, planner.warm_up("w")), 60)
        got = await asyncio.wait_for(drive(target, planner.plan("r1", "a1")), 60)
    assert all(r.ok for r in warm.records)
    assert [r.error for r in got.records if r.error] == []
    assert sum(r.phase == "measured" for r in got.records) >= 12
    assert all(r.prompt_tokens_planned in (None, r.prompt_tokens) for r in got.records)
