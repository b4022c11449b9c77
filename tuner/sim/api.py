"""vLLM's HTTP API over a `LiveEngine`: the endpoints, bodies and errors that clients and the tuner use."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from tuner.sim import bpe
from tuner.sim.live import Delta, LiveEngine
from tuner.sim.metrics import metrics_text
from tuner.sim.options import VERSION
from tuner.web import SIMULATED_OWNER

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refused(Exception):
    """A request that gets an error body."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def bad_request(message: str, param: str | None = None) -> Refused:
    return Refused(400, "BadRequestError", message, param)


@dataclass(frozen=True)
class Ask:
    """A request body, checked."""

    model: str
    prompt: list[int]
    max_tokens: int
    stop_after: int | None
    stream: bool
    usage: bool
    usage_each: bool


class Api:
    """The handlers. `settings` are what the options say about the front end."""

    def __init__(
        self,
        engine: LiveEngine,
        *,
        token_details: bool,
        force_usage: bool,
        api_keys: Sequence[str],
        dev_mode: bool,
        server_info: dict[str, Any],
    ) -> None:
        self._engine = engine
        self._names = engine.plan.served_names
        self._details = token_details
        self._force_usage = force_usage
        self._keys = tuple(api_keys)
        self._dev_mode = dev_mode
        self._server_info = server_info
        self._created = int(time.time())

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._errors], client_max_size=256 << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/chunktune/memory", self._memory)
        if self._dev_mode:
            app.router.add_get("/server_info", self._info)
            app.router.add_post("/reset_prefix_cache", self._reset)
        return app

    # --- plain answers -------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def _models(self, request: web.Request) -> web.Response:
        data: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": SIMULATED_OWNER,
                "root": self._engine.plan.model,
                "parent": None,
                "max_model_len": self._engine.plan.scheduler.max_model_len,
                "permission": [],
            }
            for name in self._names
        ]
        return _json({"object": "list", "data": data})

    async def _metrics(self, request: web.Request) -> web.Response:
        text = metrics_text(self._engine, self._names[0], float(self._created))
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    async def _memory(self, request: web.Request) -> web.Response:
        plan, memory = self._engine.plan, self._engine.plan.memory
        used = memory.weights_bytes + memory.activation_bytes + plan.kv_bytes
        utilization = self._engine.utilization()
        devices = [
            {
                "device": f"sim-{number}",
                "used_bytes": min(used, memory.total_bytes),
                "total_bytes": memory.total_bytes,
                "utilization": utilization,
            }
            for number in range(plan.tp)
        ]
        breakdown = {
            "weights_bytes": memory.weights_bytes,
            "activation_peak_bytes": memory.activation_bytes,
            "kv_pool_bytes": plan.kv_bytes,
            "kv_in_use_peak_bytes": int(plan.kv_bytes * self._engine.take_peak_usage()),
        }
        return _json({"devices": devices, "breakdown": breakdown})

    async def _info(self, request: web.Request) -> web.Response:
        return _json(self._server_info)

    async def _reset(self, request: web.Request) -> web.Response:
        return _json({"success": self._engine.core.reset_prefix_cache()})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _json_body(request)
        self._known_model(body)
        if "messages" in body:
            ids = bpe.encode(chat_prompt(body["messages"]), add_special_tokens=False)
        elif isinstance(body.get("prompt"), str):
            ids = bpe.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))
        else:
            raise bad_request("Either prompt or messages must be provided.", "prompt")
        length = self._engine.plan.scheduler.max_model_len
        return _json({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": None})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await _json_body(request)
        self._known_model(body)
        return _json({"prompt": bpe.decode(_token_ids(body.get("tokens")))})

    # --- generation ----------------------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await _json_body(request)
        self._known_model(body)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            ids = bpe.encode(prompt, add_special_tokens=body.get("add_special_tokens", True))
        elif prompt:
            ids = _token_ids(prompt)
        else:
            ids = []
        if not ids:
            raise bad_request(
                "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt"
            )
        ask = self._ask(body, ids, body.get("max_tokens", 16))
        return await self._answer(request, ask, _CompletionWords(ask.model))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await _json_body(request)
        self._known_model(body)
        ids = bpe.encode(chat_prompt(body.get("messages")), add_special_tokens=False)
        ask = self._ask(body, ids, body.get("max_completion_tokens", body.get("max_tokens")))
        return await self._answer(request, ask, _ChatWords(ask.model))

    async def _answer(self, request: web.Request, ask: Ask, words: _Words) -> web.StreamResponse:
        deltas = self._engine.generate(ask.prompt, ask.max_tokens, ask.stop_after)
        if not ask.stream:
            return await self._whole(ask, words, [delta async for delta in deltas])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        opening = words.opening()
        if opening is not None:
            await response.write(_event(opening))
        last: Delta | None = None
        try:
            async for last in deltas:
                chunk = words.chunk(bpe.decode([last.token]), last.finished)
                if ask.usage_each:
                    chunk["usage"] = self._usage(ask, last)
                await response.write(_event(chunk))
            if ask.usage and last is not None:
                await response.write(_event({**words.frame(), "choices": [], "usage": self._usage(ask, last)}))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except ConnectionResetError:
            pass
        finally:
            await deltas.aclose()
        return response

    async def _whole(self, ask: Ask, words: _Words, deltas: list[Delta]) -> web.Response:
        last = deltas[-1]
        text = bpe.decode([delta.token for delta in deltas])
        return _json({**words.whole(text, last.finished), "usage": self._usage(ask, last)})

    def _usage(self, ask: Ask, last: Delta) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": len(ask.prompt),
            "total_tokens": len(ask.prompt) + last.output_tokens,
            "completion_tokens": last.output_tokens,
        }
        if self._details:
            usage["prompt_tokens_details"] = {"cached_tokens": last.cached_tokens}
        return usage

    # --- checks --------------------------------------------------------------------------------------------------

    def _known_model(self, body: dict[str, Any]) -> None:
        model = body.get("model")
        if model is not None and model not in self._names:
            names = ", ".join(self._names)
            raise Refused(404, "NotFoundError", f"The model `{model}` does not exist. Valid aliases: {names}.", "model")

    def _ask(self, body: dict[str, Any], prompt: list[int], max_tokens: Any) -> Ask:
        length = self._engine.plan.scheduler.max_model_len
        if len(prompt) >= length:
            raise bad_request(
                f"This model's maximum context length is {length} tokens. However, your prompt contains "
                f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. Please reduce "
                f"the length of the input prompt. (parameter=input_tokens, value={len(prompt)})",
                "input_tokens",
            )
        room = length - len(prompt)
        if max_tokens is None:
            max_tokens = room
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int):
            raise bad_request(f"Input should be a valid integer, unable to parse {max_tokens!r}", "max_tokens")
        if max_tokens < 1:
            raise bad_request(f"max_tokens must be at least 1, got {max_tokens}. (parameter=max_tokens)", "max_tokens")
        options = body.get("stream_options") or {}
        ignore_eos = bool(body.get("ignore_eos"))
        return Ask(
            model=body.get("model") or self._names[0],
            prompt=prompt,
            max_tokens=min(max_tokens, room),
            stop_after=None if ignore_eos else max(1, body.get("min_tokens") or 0, 16 + hash(tuple(prompt)) % 241),
            stream=bool(body.get("stream")),
            usage=bool(options.get("include_usage")) or self._force_usage,
            usage_each=bool(options.get("continuous_usage_stats")),
        )

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if self._keys and request.path.startswith("/v1") and not self._authorized(request):
                return _json({"error": "Unauthorized"}, status=401)
            return await handler(request)
        except Refused as refused:
            return _json(refused.body, status=refused.status)
        except web.HTTPException as error:
            return _json({"detail": error.reason}, status=error.status)

    def _authorized(self, request: web.Request) -> bool:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and token in self._keys


class _Words:
    """How one endpoint words its bodies."""

    id_prefix = ""
    chunk_object = ""
    whole_object = ""

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = f"{self.id_prefix}-{uuid.uuid4().hex[:16]}"
        self._created = int(time.time())

    def frame(self) -> dict[str, Any]:
        return {"id": self._id, "object": self.chunk_object, "created": self._created, "model": self._model}

    def opening(self) -> dict[str, Any] | None:
        """An event before the first token."""
        return None

    def chunk(self, text: str, finished: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def whole(self, text: str, finished: str | None) -> dict[str, Any]:
        raise NotImplementedError


class _CompletionWords(_Words):
    id_prefix = "cmpl"
    chunk_object = whole_object = "text_completion"

    def chunk(self, text: str, finished: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finished, "stop_reason": None}
        return {**self.frame(), "choices": [choice]}

    def whole(self, text: str, finished: str | None) -> dict[str, Any]:
        return self.chunk(text, finished)


class _ChatWords(_Words):
    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self) -> dict[str, Any]:
        return self._delta({"role": "assistant", "content": ""}, None)

    def chunk(self, text: str, finished: str | None) -> dict[str, Any]:
        return self._delta({"content": text}, finished)

    def _delta(self, delta: dict[str, Any], finished: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finished}
        return {**self.frame(), "choices": [choice]}

    def whole(self, text: str, finished: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finished, "stop_reason": None}
        return {**self.frame(), "object": self.whole_object, "choices": [choice]}


def chat_prompt(messages: Any) -> str:
    """What the tiny model's chat template makes of the messages."""
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a non-empty list", "messages")
    lines = []
    for message in messages:
        if not isinstance(message, dict) or "role" not in message:
            raise bad_request("each message needs a role and a content", "messages")
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
        lines.append(f"{message['role']}: {content}\n")
    return "".join(lines) + "assistant:"


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise bad_request("prompt must be a string or a list of token ids", "prompt")
    limit = vocabulary_size()
    for token in value:
        if not 0 <= token < limit:
            raise bad_request(f"Token id {token} is out of vocabulary")
    return value


def vocabulary_size() -> int:
    return len(bpe.vocabulary())


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


async def _json_body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except json.JSONDecodeError as error:
        raise Refused(400, "Bad Request", f"1 validation error:\n  JSON decode error: {error}", "body") from None
    if not isinstance(body, dict):
        raise bad_request("Input should be a valid dictionary", "body")
    return body
