"""An OpenAI-compatible server whose every byte a test decides: splits, pauses, cuts, lies.

It has a tokenizer (a word is a token), a prefix cache that remembers blocks of 16 tokens, `usage`, and counts of
what it saw. A test gives `behave(asked)`; without one it streams `max_tokens` tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

BLOCK = 16
MODEL = "scripted"


@dataclass
class Asked:
    """A request as the server saw it."""

    number: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    tokens: list[Any]
    cached_tokens: int
    at_s: float
    in_flight: int


@dataclass
class Reply:
    """What to answer: bytes to send, and seconds to wait between them."""

    parts: list[bytes | float]
    status: int = 200
    content_type: str = "text/event-stream"
    framing: str = "chunked"
    """`chunked`, `close` (no length, the end of the connection is the end), `length`."""
    cut: bool = False
    """Close the connection before the end of the response."""
    keep_alive: bool = True
    silent_close: bool = False
    """Close the connection behind a whole response that did not say so, as an idle timeout does."""
    split: Callable[[bytes], list[bytes]] = lambda data: [data]
    """How the bytes on the wire are cut into writes."""
    extra_head: str = ""


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text_chunk(text: str, finish: str | None = None) -> bytes:
    return event({"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def chat_chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return event(
        {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    )


def usage_chunk(prompt: int, completion: int, cached: int | None = None) -> bytes:
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"choices": [], "usage": usage})


DONE = b"data: [DONE]\n\n"

Behave = Callable[["ScriptedServer", Asked], Reply | Awaitable[Reply]]


def stream(server: ScriptedServer, asked: Asked, *, ttft_s: float = 0.0, itl_s: float = 0.0) -> Reply:
    """The honest reply: `max_tokens` tokens, usage, [DONE]."""
    count = int(asked.body.get("max_tokens") or 16)
    chat = "messages" in asked.body
    parts: list[bytes | float] = []
    if chat:
        parts.append(chat_chunk({"role": "assistant", "content": ""}))
    for i in range(count):
        wait = itl_s if i else ttft_s
        finish = "length" if i == count - 1 else None
        if wait:
            parts.append(wait)
        parts.append(chat_chunk({"content": "tok "}, finish) if chat else text_chunk("tok ", finish))
    parts.append(usage_chunk(len(asked.tokens), count, asked.cached_tokens if server.reports_cached else None))
    parts.append(DONE)
    return Reply(parts)


@dataclass
class ScriptedServer:
    """Listens on a free port of 127.0.0.1 while `running()` is entered."""

    behave: Behave = stream
    tokenizer: bool = True
    reports_cached: bool = True
    max_model_len: int | None = 32768
    models: tuple[str, ...] = (MODEL,)
    api_key: str | None = None
    chat_template: bool = True
    takes_token_ids: bool = True
    model_card: dict[str, Any] = field(default_factory=dict)
    """Put over each model of /v1/models."""
    whole_usage: Any = None
    """`usage` of replies that are not streamed; None: the honest one."""
    redirects_to: str = ""
    """Every request is sent there."""
    template_tokens: tuple[int, ...] = (900001, 900002, 900003)
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    proxied: int = 0
    in_flight: int = 0
    max_in_flight: int = 0
    base_url: str = ""
    _cache: set[tuple[Any, ...]] = field(default_factory=set)
    _vocabulary: dict[str, int] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _readers: list[asyncio.StreamReader] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ScriptedServer]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)

    async def until_alone(self) -> None:
        """Until every client has closed its connections, also those that wait for an answer."""
        while not all(reader.at_eof() or reader.exception() for reader in self._readers):
            await asyncio.sleep(0.01)

    def tokens_of(self, body: dict[str, Any]) -> list[Any]:
        """A word is a token; the chat template adds three tokens in front and two a message."""
        if "messages" in body:
            found: list[Any] = list(self.template_tokens)
            for message in body["messages"]:
                found += [910000, *self._words(str(message.get("content") or "")), 910001]
            return found
        prompt = body.get("prompt")
        return list(prompt) if isinstance(prompt, list) else self._words(str(prompt))

    def _words(self, text: str) -> list[int]:
        return [self._vocabulary.setdefault(word, 1000 + len(self._vocabulary)) for word in text.split()]

    def _remember(self, tokens: list[Any]) -> int:
        cached = 0
        missed = False
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            block = tuple(tokens[:end])
            if block in self._cache and not missed:
                cached = end
            else:
                missed = True
                self._cache.add(block)
        return cached

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self._readers.append(reader)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        if "://" in path:
            # Asked as a proxy: the whole address stands in the request line.
            self.proxied += 1
            path = "/" + path.split("/", 3)[3]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            return await self._json(writer, 401, {"error": {"message": f"bad key {headers.get('authorization')}"}})
        if self.redirects_to:
            head = f"Location: {self.redirects_to}{path}\r\n"
            return await send(writer, Reply([b""], 307, framing="length", extra_head=head))
        body = json.loads(raw) if raw else {}
        if method == "GET" and path == "/v1/models":
            card = {"object": "model", "max_model_len": self.max_model_len, **self.model_card}
            data = [{"id": m, **card} for m in self.models]
            return await self._json(writer, 200, {"object": "list", "data": data})
        if path == "/tokenize" and self.tokenizer:
            tokens = self.tokens_of(body)
            return await self._json(writer, 200, {"count": len(tokens), "tokens": tokens, "max_model_len": 1})
        if path == "/v1/chat/completions" and not self.chat_template:
            message = "As of transformers v4.44, default chat template is no longer allowed"
            return await self._json(writer, 400, {"error": {"message": message, "code": 400}})
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return await self._json(writer, 404, {"detail": "Not Found"})
        if isinstance(body.get("prompt"), list) and not self.takes_token_ids:
            return await self._json(writer, 400, {"error": {"message": "prompt must be a string"}})
        return await self._complete(writer, path, headers, body)

    async def _complete(
        self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str], body: dict[str, Any]
    ) -> bool:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            tokens = self.tokens_of(body)
            asked = Asked(
                number=len(self.asked),
                path=path,
                headers=headers,
                body=body,
                tokens=tokens,
                cached_tokens=self._remember(tokens),
                at_s=asyncio.get_running_loop().time(),
                in_flight=self.in_flight,
            )
            self.asked.append(asked)
            if not body.get("stream"):
                usage = self.whole_usage or {"prompt_tokens": len(tokens), "completion_tokens": 1}
                return await self._json(writer, 200, {"choices": [{"index": 0, "text": "x"}], "usage": usage})
            reply = self.behave(self, asked)
            if not isinstance(reply, Reply):
                reply = await reply
            return await send(writer, reply)
        finally:
            self.in_flight -= 1

    async def _json(self, writer: asyncio.StreamWriter, status: int, value: Any) -> bool:
        parts: list[bytes | float] = [json.dumps(value).encode()]
        return await send(writer, Reply(parts, status, "application/json", "length"))


async def send(writer: asyncio.StreamWriter, reply: Reply) -> bool:
    """Write a reply; whether the connection stays."""
    head = f"HTTP/1.1 {reply.status} X\r\nContent-Type: {reply.content_type}\r\n{reply.extra_head}"
    if reply.framing == "chunked":
        head += "Transfer-Encoding: chunked\r\n"
    elif reply.framing == "length":
        head += f"Content-Length: {sum(len(p) for p in reply.parts if isinstance(p, bytes))}\r\n"
    if not reply.keep_alive or reply.framing == "close":
        head += "Connection: close\r\n"
    pending = head.encode() + b"\r\n"
    for part in reply.parts:
        if isinstance(part, float):
            await _write(writer, pending, reply.split)
            pending = b""
            await asyncio.sleep(part)
            continue
        pending += b"%x\r\n%b\r\n" % (len(part), part) if reply.framing == "chunked" else part
        await _write(writer, pending, reply.split)
        pending = b""
    if reply.framing == "chunked" and not reply.cut:
        pending += b"0\r\n\r\n"
    await _write(writer, pending, reply.split)
    return not reply.cut and reply.keep_alive and not reply.silent_close and reply.framing != "close"


async def _write(writer: asyncio.StreamWriter, data: bytes, split: Callable[[bytes], list[bytes]]) -> None:
    pieces = split(data) if data else []
    for number, piece in enumerate(pieces):
        writer.write(piece)
        await writer.drain()
        if number < len(pieces) - 1:
            await asyncio.sleep(0)
