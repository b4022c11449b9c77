"""An honest server against the same server with a fault: the faulty one is never the better one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.scripted_server import DONE, Asked, Reply, ScriptedServer, event, stream, text_chunk, usage_chunk
from tuner.clock import SYSTEM_CLOCK
from tuner.domain.workload import SharedPrefixWorkload
from tuner.errors import LoadError
from tuner.experiment.events import Silent
from tuner.experiment.store import Store
from tuner.load.probe import HELLO
from tuner.load.target import Target
from tuner.regress.compare import Comparison
from tuner.regress.sides import compare_servers, run_compare, servers_opener
from tuner.regress.verdict import Rules

GATE = ["ttft_ms.p90", "tpot_ms.p50", "e2e_ms.p50", "request_throughput"]
TTFT_S, ITL_S = 0.02, 0.004
OUTPUT = 6
RULES = Rules(stages=1, alarm=0.001, tolerance=0.1)
"""The first cycle decides, so that one round of each is enough; what is noise of a busy machine is not."""
CLIENT = "client_limited"
"""Another process kept this one from sending in time: no verdict either."""
Behave = Callable[[ScriptedServer, Asked], Reply]


def honest(server: ScriptedServer, asked: Asked) -> Reply:
    return stream(server, asked, ttft_s=TTFT_S, itl_s=ITL_S)


def quick(server: ScriptedServer, asked: Asked) -> Reply:
    return stream(server, asked, ttft_s=TTFT_S / 3, itl_s=ITL_S / 3)


def some(every: int, behave: Behave) -> Behave:
    """One request in `every` gets the fault."""
    return lambda server, asked: (behave if asked.number % every == every - 1 else honest)(server, asked)


def in_rounds(behave: Behave) -> Behave:
    """The fault, but for the first requests that only say hello."""

    def either(server: ScriptedServer, asked: Asked) -> Reply:
        hello = HELLO in str(asked.body) or asked.tokens == server.tokens_of({"prompt": HELLO})
        return (honest if hello else behave)(server, asked)

    return either


def tokens(
    asked: Asked, count: int, finish: str | None, *, prompt: int | None = None, told: int | None = None
) -> list[bytes | float]:
    """So many tokens at the honest pace, and a `usage` that says so unless `prompt` or `told` say otherwise."""
    parts: list[bytes | float] = []
    for i in range(count):
        parts += [ITL_S if i else TTFT_S, text_chunk("tok ", finish if i == count - 1 else None)]
    sent = len(asked.tokens) if prompt is None else prompt
    return [*parts, usage_chunk(sent, count if told is None else told, min(asked.cached_tokens, sent)), DONE]


def ends(count: int, finish: str) -> Behave:
    return lambda server, asked: Reply(tokens(asked, count, finish))


def refuses(status: int) -> Behave:
    body = b'{"error": {"message": "overloaded"}}'
    return lambda server, asked: Reply([body], status, "application/json", "length")


def error_for_an_answer(server: ScriptedServer, asked: Asked) -> Reply:
    return Reply([b'{"error": {"message": "queue full"}}'], 200, "application/json", "length")


def breaks_off(server: ScriptedServer, asked: Asked) -> Reply:
    return Reply(tokens(asked, 3, None)[:-2], cut=True)


def empty(server: ScriptedServer, asked: Asked) -> Reply:
    return Reply([usage_chunk(len(asked.tokens), 0, 0), DONE])


def held(parts: list[bytes | float]) -> list[bytes | float]:
    """The same waits, and everything at their end."""
    return [*(p for p in parts if isinstance(p, float)), b"".join(p for p in parts if isinstance(p, bytes))]


def collected(server: ScriptedServer, asked: Asked) -> Reply:
    """A gateway keeps everything back until the end."""
    return Reply(held(honest(server, asked).parts))


def first_then_the_rest(server: ScriptedServer, asked: Asked) -> Reply:
    """A gateway lets the first token through and keeps the others back until the end."""
    parts = honest(server, asked).parts
    return Reply([*parts[:2], *held(parts[2:])])


def keep_alives(server: ScriptedServer, asked: Asked) -> Reply:
    """Empty deltas as soon as the request is there, long before the first token."""
    return Reply([*[text_chunk("")] * 3, *honest(server, asked).parts])


def heartbeats(server: ScriptedServer, asked: Asked) -> Reply:
    return Reply([b"data:\n\n", b": ping\n\n", *honest(server, asked).parts])


def twice(server: ScriptedServer, asked: Asked) -> Reply:
    """Two answers, token by token in turn, where one was asked for."""
    parts: list[bytes | float] = []
    for i in range(OUTPUT):
        finish = "length" if i == OUTPUT - 1 else None
        choices = [{"index": k, "text": "tok ", "finish_reason": finish} for k in (0, 1)]
        parts += [ITL_S if i else TTFT_S, *(event({"choices": [choice]}) for choice in choices)]
    return Reply([*parts, usage_chunk(len(asked.tokens), 2 * OUTPUT, 0), DONE])


def shortened_prompt(server: ScriptedServer, asked: Asked) -> Reply:
    """The gateway cuts the prompt, which makes its prefill quicker."""
    parts = tokens(asked, OUTPUT, "length", prompt=len(asked.tokens) // 3)
    return Reply([TTFT_S / 3, *parts[1:]])


def never_returns(server: ScriptedServer, asked: Asked) -> Reply:
    return Reply([600.0])


def stops_in_the_middle(server: ScriptedServer, asked: Asked) -> Reply:
    return Reply([*tokens(asked, 2, None)[:-2], 600.0])


FEWER = r"answered 100 % and \d\d %"
HELD = "not measured on both sides"
FAULTS: dict[str, tuple[Behave, str]] = {
    "every second is aborted": (some(2, ends(2, "abort")), "too_many_failures"),
    "one in 15 is aborted": (some(15, ends(2, "abort")), FEWER),
    "cut to a third by a stop": (ends(OUTPUT // 3, "stop"), "answers_differ"),
    "cut to a third by a cap": (ends(OUTPUT // 3, "length"), "answers_differ"),
    "every second is cut to a third": (some(2, ends(OUTPUT // 3, "stop")), "answers_differ"),
    "503 for one in 15": (some(15, refuses(503)), FEWER),
    "an error for an answer": (some(15, error_for_an_answer), FEWER),
    "broken off": (some(3, breaks_off), "too_many_failures"),
    "empty": (empty, "too_many_failures"),
    "collected": (collected, HELD),
    "every third is collected": (some(3, collected), HELD),
    "all but the first token collected": (first_then_the_rest, HELD),
    "keep-alives before the first token": (keep_alives, ""),
    "heartbeats": (heartbeats, ""),
    "two answers": (twice, "answers_differ"),
    "prompts shortened": (shortened_prompt, "prompts_differ"),
    "one in 15 never returns": (some(15, never_returns), FEWER),
    "one in 15 stops in the middle": (some(15, stops_in_the_middle), FEWER),
}
"""Each fault, with the code of the failure or words of the verdict that name it."""


async def compared(folder: Path, b: Behave) -> Comparison | LoadError:
    """The verdict on `b` against the honest server, or why there is none."""
    load = SharedPrefixWorkload(
        system_prompt_tokens=(48, 48),
        user_prompt_tokens=(8, 16),
        output_tokens=(OUTPUT, OUTPUT),
        concurrency=3,
        requests=12,
    )
    async with ScriptedServer(honest).running() as first, ScriptedServer(in_rounds(b)).running() as second:
        urls = (first.base_url, second.base_url)
        targets = {side: Target(url, request_timeout_s=0.5) for side, url in zip("AB", urls, strict=True)}
        plan = compare_servers(urls, GATE, RULES, cycles=1)
        opener = servers_opener(targets, load, seed=1, clock=SYSTEM_CLOCK, events=Silent())
        try:
            return await asyncio.wait_for(run_compare(plan, Store(folder), opener, SYSTEM_CLOCK, Silent()), 30)
        except LoadError as error:
            return error


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_faulty_server_is_never_the_better_one(fault: str, tmp_path: Path) -> None:
    behave, named = FAULTS[fault]
    result = await compared(tmp_path, behave)
    if isinstance(result, LoadError):
        assert re.fullmatch(f"{named}|{CLIENT}", result.code), result
        return
    assert result.verdict != "improved"
    assert [name for name in GATE if result.metrics[name].verdict == "improved"] == []
    assert re.search(named, " ".join(row.reason for row in result.metrics.values()))


async def test_a_server_that_is_quicker_without_a_fault_is_better(tmp_path: Path) -> None:
    result = await compared(tmp_path, quick)
    if isinstance(result, LoadError):
        assert result.code == CLIENT, result
        return
    assert result.verdict == result.metrics["e2e_ms.p50"].verdict == "improved"


async def test_the_same_server_is_neither_better_nor_worse(tmp_path: Path) -> None:
    result = await compared(tmp_path, honest)
    if isinstance(result, LoadError):
        assert result.code == CLIENT, result
        return
    assert result.verdict in ("ok", "inconclusive")
    assert result.metrics["failed_requests"].reason.endswith("; answered 100 % and 100 % of what was asked")
