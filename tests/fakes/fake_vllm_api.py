"""The HTTP half of the fake `vllm`: a small server, a prefix cache of hashes, and vLLM's replies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]


class Engine:
    """What runs behind the API: times and a prefix cache."""

    def __init__(self, model: str, options: Json, script: Json, start_number: int) -> None:
        self.model = model
        self.options = options
        self._script = script
        self.max_model_len = int(self.option("max-model-len", 8192))
        self.chunk = int(self.option("max-num-batched-tokens", 8192))
        self.claimed_chunk = script.get("log_chunk", self.chunk)
        self.chunked = self.option("enable-chunked-prefill", True) is not False
        self.prefix_caching = self.option("enable-prefix-caching", True) is not False
        self.block_size = int(self.option("block-size", script.get("block_size", 16)))
        self.kv_tokens = int(script.get("kv_tokens", 200_000))
        self.served_name = str(self.option("served-model-name", model))
        factors = script.get("ttft_factors", [1.0])
        self._factor = factors[start_number % len(factors)]
        self._blocks: set[int] = set()
        self._served = 0
        self.running = 0
        self.queries = self.hits = self.prompt_tokens = self.steps = self.finished = 0
        self.ttft_sum_s = 0.0
        self.live: Any = None
        """`fake_vllm_live.Live` of an engine that was started for tuning."""

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._blocks.clear()

    def option(self, name: str, default: Any) -> Any:
        return self.options.get(name, default)

    def look_up(self, tokens: list[int]) -> tuple[int, bool]:
        """Tokens found in the cache, and whether the first block was known; remembers the prompt."""
        hashes, running = [], 0
        for at in range(0, len(tokens) - self.block_size + 1, self.block_size):
            running = hash((running, tuple(tokens[at : at + self.block_size])))
            hashes.append(running)
        seen = bool(hashes) and hashes[0] in self._blocks
        cached = 0
        if self.prefix_caching:
            for value in hashes[: (len(tokens) - 1) // self.block_size]:
                if value not in self._blocks:
                    break
                cached += self.block_size
            self.queries += len(tokens)
            self.hits += cached
        self.prompt_tokens += len(tokens)
        self._blocks.update(hashes)
        return cached, seen

    def first_token_s(self, prompt: int, cached: int, seen: bool) -> float:
        """How long the first token takes."""
        script = self._script
        self._served += 1
        ms = script.get("ttft_ms_by_chunk", {}).get(str(self.chunk), script.get("ttft_ms", 3.0)) * self._factor
        slow = script.get("first_slow")
        if slow and self._served <= slow["requests"]:
            ms += slow["ms"]
        if "remember" in script:
            ms = script["remember"]["seen_ms" if seen else "unseen_ms"]
        left = prompt - cached
        self.steps += max(1, -(-left // self.chunk))
        while self.live is not None and left > 0:
            self.live.step(min(left, self.chunk), prefill=True, last=left <= self.chunk)
            left -= self.chunk
        return float(ms) / 1000 * script.get("time_scale", 1.0)

    def token_s(self) -> float:
        self.steps += 1
        if self.live is not None:
            self.live.step(1)
        return float(self._script.get("token_ms", 0.5)) / 1000 * self._script.get("time_scale", 1.0)

    def server_info(self) -> Json:
        return {
            "vllm_config": {
                "model_config": {"model": self.model, "max_model_len": self.max_model_len, "revision": None},
                "cache_config": {
                    "block_size": self.block_size,
                    "enable_prefix_caching": self.prefix_caching,
                    "gpu_memory_utilization": self.option("gpu-memory-utilization", 0.92),
                },
                "scheduler_config": {
                    "max_num_batched_tokens": self.claimed_chunk,
                    "max_num_seqs": self.option("max-num-seqs", 256),
                    "enable_chunked_prefill": self.chunked,
                    "long_prefill_token_threshold": self.option("long-prefill-token-threshold", 0),
                },
                "parallel_config": {"tensor_parallel_size": self.option("tensor-parallel-size", 1)},
            }
        }


def metrics(engines: list[Engine]) -> str:
    """A Prometheus page: each series once for every data-parallel engine."""
    lines: list[str] = []
    name_of_model = engines[0].served_name

    def family(name: str, type_: str, **samples: Callable[[Engine], float]) -> None:
        lines.append(f"# HELP {name} {name}\n# TYPE {name} {type_}")
        for suffix, value in samples.items():
            sample = name if suffix == "value" else f"{name}_{suffix}"
            for number, engine in enumerate(engines):
                label = f'{{engine="{number}",model_name="{name_of_model}"}}'
                lines.append(f"{sample}{label} {float(value(engine))}")

    for name, value in (
        ("vllm:prefix_cache_queries", lambda e: e.queries),
        ("vllm:prefix_cache_hits", lambda e: e.hits),
        ("vllm:prompt_tokens", lambda e: e.prompt_tokens),
        ("vllm:num_preemptions", lambda e: 0),
        ("vllm:request_success", lambda e: e.finished),
    ):
        family(name, "counter", total=value, created=lambda e: 1.7e9)
    family("vllm:iteration_tokens_total", "histogram", sum=lambda e: e.prompt_tokens, count=lambda e: e.steps)
    family("vllm:time_to_first_token_seconds", "histogram", sum=lambda e: e.ttft_sum_s, count=lambda e: e.finished)
    family("vllm:kv_cache_usage_perc", "gauge", value=lambda e: min(1.0, e.running * 256 / e.kv_tokens))
    family("vllm:num_requests_running", "gauge", value=lambda e: e.running)
    family("vllm:num_requests_waiting", "gauge", value=lambda e: 0)
    lines.append("# HELP vllm:cache_config_info Information\n# TYPE vllm:cache_config_info gauge")
    for number, engine in enumerate(engines):
        labels = {
            "block_size": engine.block_size,
            "enable_prefix_caching": engine.prefix_caching,
            "engine": number,
            "kv_cache_size_tokens": engine.kv_tokens,
            "num_gpu_blocks": engine.kv_tokens // engine.block_size,
        }
        text = ",".join(f'{name}="{value}"' for name, value in labels.items())
        lines.append(f"vllm:cache_config_info{{{text}}} 1.0")
    return "\n".join(lines) + "\n"


def tokenize(text: str) -> list[int]:
    """One token a word or mark."""
    return [zlib.crc32(w.encode()) % 30_000 + 300 for w in re.findall(r"\w+|[^\w\s]", text)]


class Api:
    """One connection after another, several requests on each."""

    def __init__(self, engines: list[Engine], script: Json, on_request: Callable[[int], bool]) -> None:
        """`engines` are those of data parallelism, one in most cases."""
        self._engines = engines
        self._engine = engines[0]
        self._script = script
        self._on_request = on_request
        self._requests = 0
        self._stalled = False

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ", 2)
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._answer(method, target.partition("?")[0], headers, body, writer):
                    break
        writer.close()

    async def _answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        engine, script = self._engine, self._script
        key = script.get("api_key")
        if key and path.startswith("/v1") and headers.get("authorization") != f"Bearer {key}":
            return await reply(writer, 401, {"error": "Unauthorized"})
        if path == "/health":
            return await reply(writer, 200, "")
        if path == "/version":
            return await reply(writer, 200, {"version": script.get("version", "0.32.0")})
        if path == "/v1/models":
            card = {"id": engine.served_name, "object": "model", "owned_by": "vllm", "root": engine.model}
            return await reply(
                writer, 200, {"object": "list", "data": [{**card, "max_model_len": engine.max_model_len}]}
            )
        if path == "/metrics":
            if script.get("metrics") == "error":
                return await reply(writer, 500, "Internal Server Error")
            return await reply(writer, 200, metrics(self._engines))
        developing = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
        if path == "/server_info" and developing:
            if script.get("server_info") == "error":
                return await reply(writer, 500, "Internal Server Error")
            return await reply(writer, 200, engine.server_info())
        if path == "/reset_prefix_cache" and developing:
            for each in self._engines:
                each.forget()
            return await reply(writer, 200, {"success": True})
        if method == "POST" and path in ("/tokenize", "/v1/completions", "/v1/chat/completions"):
            try:
                asked = json.loads(body)
            except ValueError:
                return await self._refuse(writer, 400, "the body is no JSON")
            if path == "/tokenize":
                tokens = tokenize(asked.get("prompt") or chat_text(asked.get("messages", [])))
                return await reply(
                    writer, 200, {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens}
                )
            rank = int(headers.get("x-data-parallel-rank", self._requests % len(self._engines)))
            return await self._generate(path.endswith("chat/completions"), asked, writer, self._engines[rank])
        return await self._refuse(writer, 404, "Not Found")

    async def _refuse(self, writer: asyncio.StreamWriter, status: int, message: str) -> bool:
        return await reply(writer, status, {"error": {"message": message, "type": "BadRequestError", "code": status}})

    async def _generate(self, chat: bool, asked: Json, writer: asyncio.StreamWriter, engine: Engine) -> bool:
        script = self._script
        if asked.get("model") not in (None, engine.served_name):
            return await self._refuse(writer, 404, f"The model `{asked['model']}` does not exist.")
        if chat and script.get("chat_template") is False:
            return await self._refuse(
                writer,
                400,
                "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat "
                "template if the tokenizer does not define one.",
            )
        prompt = chat_text(asked.get("messages", [])) if chat else asked.get("prompt", "")
        if isinstance(prompt, list) and script.get("token_ids") is False:
            return await self._refuse(writer, 400, "prompt has to be a string")
        tokens = prompt if isinstance(prompt, list) else tokenize(prompt)
        wanted = int(asked.get("max_tokens") or asked.get("max_completion_tokens") or 16)
        if len(tokens) + wanted > engine.max_model_len:
            return await self._refuse(
                writer,
                400,
                f"This model's maximum context length is {engine.max_model_len} tokens. However, you requested "
                f"{wanted} output tokens and your prompt contains at least {len(tokens)} input tokens.",
            )
        if engine.live is not None:
            engine.live.request_comes()
        number = self._requests
        self._requests += 1
        self._stalled = self._stalled or self._on_request(number)
        if self._falls_on("http_error_share", number):
            return await self._refuse(writer, 500, "a fault on demand")
        engine.running += 1
        try:
            return await self._reply_tokens(chat, asked, tokens, wanted, number, writer, engine)
        finally:
            engine.running -= 1

    def _falls_on(self, share: str, number: int) -> bool:
        """Spread evenly over the requests: a share of 0.6 hits 6 of each 10."""
        value = self._script.get(share, 0.0)
        return int((number + 1) * value + 1e-9) > int(number * value + 1e-9)

    async def _reply_tokens(
        self,
        chat: bool,
        asked: Json,
        tokens: list[int],
        wanted: int,
        number: int,
        writer: asyncio.StreamWriter,
        engine: Engine,
    ) -> bool:
        script = self._script
        started_s = time.monotonic()
        cached, seen = engine.look_up(tokens)
        first_s = engine.first_token_s(len(tokens), cached, seen)
        details = asked_details(engine, script)
        usage: Json = {"prompt_tokens": len(tokens), "total_tokens": len(tokens) + wanted, "completion_tokens": wanted}
        if details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if not asked.get("stream"):
            await asyncio.sleep(first_s + wanted * engine.token_s())
            text = " word" * wanted
            choice = {"index": 0, "finish_reason": "length"}
            choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            engine.finished += 1
            return await reply(
                writer, 200, {"id": "cmpl-0", "model": engine.served_name, "choices": [choice], "usage": usage}
            )
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        send = EventSender(writer, chat, engine.served_name)
        if self._falls_on("empty_share", number):
            return await send.done()
        if chat:
            await asyncio.sleep(script.get("role_delay_ms_per_1000_chunk", 0) * engine.chunk / 1e6)
            await send.event({"role": "assistant", "content": ""})
        while self._stalled:
            await asyncio.sleep(0.5)
        await asyncio.sleep(first_s)
        engine.ttft_sum_s += time.monotonic() - started_s
        for at in range(wanted):
            if at:
                await asyncio.sleep(engine.token_s())
            while self._stalled:
                await asyncio.sleep(0.5)
            if at == 2 and self._falls_on("cut_share", number):
                writer.transport.abort()
                return False
            if at == 2 and self._falls_on("error_event_share", number):
                await send.raw({"error": {"message": "a fault on demand", "type": "InternalServerError", "code": 500}})
                return await send.done()
            # The first token may be half a UTF-8 character, with no text to show.
            text = "" if at == 0 else " word"
            await send.event({"content": text} if chat else text, "length" if at == wanted - 1 else None)
        if (asked.get("stream_options") or {}).get("include_usage"):
            await send.raw({"id": "cmpl-0", "object": "chunk", "choices": [], "usage": usage})
        engine.finished += 1
        return await send.done()


def asked_details(engine: Engine, script: Json) -> bool:
    """Whether `usage` tells what was cached."""
    return bool(script.get("cached_tokens", True) and engine.option("enable-prompt-tokens-details", False))


class EventSender:
    """Server-sent events in HTTP chunks."""

    def __init__(self, writer: asyncio.StreamWriter, chat: bool, model: str) -> None:
        self._writer = writer
        self._chat = chat
        self._model = model

    async def event(self, content: Any, finish: str | None = None) -> None:
        choice = {"index": 0, "delta" if self._chat else "text": content, "finish_reason": finish}
        await self.raw({"id": "cmpl-0", "object": "chunk", "model": self._model, "choices": [choice]})

    async def raw(self, value: Json) -> None:
        await self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    async def done(self) -> bool:
        await self._chunk(b"data: [DONE]\n\n")
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()
        return True

    async def _chunk(self, data: bytes) -> None:
        self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self._writer.drain()


async def reply(writer: asyncio.StreamWriter, status: int, body: Json | str) -> bool:
    """A whole reply; True: the connection stays open."""
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    kind = "text/plain; charset=utf-8" if isinstance(body, str) else "application/json"
    head = f"HTTP/1.1 {status} Status\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return True


def chat_text(messages: list[Json]) -> str:
    """The messages as a template would join them."""
    return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in messages)
