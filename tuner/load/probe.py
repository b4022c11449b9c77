"""One request before any load: is it a server that we can measure, and what does it take?"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from tuner.domain.observation import RequestRecord
from tuner.errors import LoadError
from tuner.load.exchange import Exchange
from tuner.load.http import NOT_OPENAI, Questions, as_object, shortened
from tuner.load.plan import PlannedRequest
from tuner.load.reply import whole
from tuner.load.target import Api, Target
from tuner.load.vocabulary import tokenize
from tuner.web import SIMULATED_OWNER

_HELLO = "The first request asks for one token, to see that the server answers as it should."
_KEY_MEND = "Name the environment variable that holds the key with --api-key-env NAME."


@dataclass(frozen=True)
class ServerFacts:
    """What the probe found out."""

    model: str
    max_model_len: int | None
    token_ids: bool
    """Prompts may be lists of token ids (completions)."""
    reports_cached_tokens: bool
    """`usage` says how many prompt tokens were cached (vLLM: --enable-prompt-tokens-details)."""
    label: str = ""
    """What differs from what was asked, such as 'completions instead of chat: no chat template'."""
    api: Api = "completions"
    """What the load uses."""
    simulated: bool = False
    """It is chunktune's own simulated engine."""


async def probe(target: Target) -> ServerFacts:
    """LoadError with the hint: `refused`, `timeout`, `auth`, `not_openai`, `missing_model`, `no_chat_template`,
    `http_error`."""
    async with Questions(target) as questions:
        model, max_model_len, owner = await _model(questions, target)
        if target.api == "chat":
            facts = await _probe_chat(questions, target, model, max_model_len)
        else:
            facts = await _probe_completions(questions, model, max_model_len, "")
    return replace(facts, simulated=owner == SIMULATED_OWNER)


async def _model(questions: Questions, target: Target) -> tuple[str, int | None, object]:
    """The model's id, its length and its `owned_by`."""
    status, body = await questions.ask("GET", "/v1/models")
    if status in (401, 403):
        raise LoadError("auth", f"{target.base} refuses the key: HTTP {status}: {questions.shown(body)}", _KEY_MEND)
    listing = as_object(body) if status == 200 else None
    data = None if listing is None else listing.get("data")
    if not isinstance(data, list) or not all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in data):
        raise LoadError(
            "not_openai",
            f"{target.base}/v1/models is no list of models: HTTP {status}: {questions.shown(body)}",
            NOT_OPENAI,
        )
    models: dict[str, dict[str, Any]] = {m["id"]: m for m in data}
    wanted = target.model
    if wanted is None:
        roots = [name for name, m in models.items() if not m.get("parent")]
        if len(roots) != 1:
            names = shortened(", ".join(roots)) or "none"
            raise LoadError(
                "missing_model", f"{target.base} has several models, or none: {names}", "Choose one with --model ID."
            )
        wanted = roots[0]
    elif wanted not in models:
        near = difflib.get_close_matches(wanted, models, n=1, cutoff=0.4)
        raise LoadError(
            "missing_model",
            f"{target.base} does not serve {wanted!r}; it serves {shortened(', '.join(models)) or 'nothing'}",
            f"Did you mean {near[0]!r}?" if near else "Choose one of these with --model ID.",
        )
    card = models[wanted]
    return wanted, whole(card.get("max_model_len")) or None, card.get("owned_by")


async def _probe_completions(questions: Questions, model: str, max_model_len: int | None, label: str) -> ServerFacts:
    ids = await tokenize(questions, {"model": model, "prompt": _HELLO, "add_special_tokens": False})
    token_ids = False
    record: RequestRecord | None = None
    if ids is not None:
        record = await _ask_once(questions, "/v1/completions", model, {"prompt": ids})
        token_ids = record.error is None and record.prompt_tokens == len(ids)
    if record is None or record.error_code == "http_error":
        record = await _ask_once(questions, "/v1/completions", model, {"prompt": _HELLO})
    _raise_for(record)
    return ServerFacts(model, max_model_len, token_ids, record.cached_tokens is not None, label, "completions")


async def _probe_chat(questions: Questions, target: Target, model: str, max_model_len: int | None) -> ServerFacts:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": _HELLO}]
    record = await _ask_once(questions, "/v1/chat/completions", model, {"messages": messages})
    if record.error_code == "http_error" and record.status in (400, 422, 500, 404) and _no_template(record):
        label = "completions instead of chat: no chat template"
        try:
            return await _probe_completions(questions, model, max_model_len, label)
        except LoadError:
            raise LoadError(
                "no_chat_template",
                f"{target.base} takes no chat requests: {record.error}",
                "Give the server a --chat-template, or the profile `workload.api: completions`.",
            ) from None
    _raise_for(record)
    return ServerFacts(model, max_model_len, False, record.cached_tokens is not None, "", "chat")


def _no_template(record: RequestRecord) -> bool:
    return "chat template" in (record.error or "").lower() or "chat_template" in (record.error or "").lower()


def _raise_for(record: RequestRecord) -> None:
    if record.error is None:
        return
    said = f"the server's answer to one request before the load: {record.error}"
    if record.error_code == "auth":
        raise LoadError("auth", said, _KEY_MEND)
    if record.status == 404:
        raise LoadError("missing_model", said, "Choose a model that the server has with --model ID.")
    if record.error_code == "http_error":
        raise LoadError("http_error", said, "Every request of the load would fail the same way; see the server's log.")
    raise LoadError(
        "not_openai", said, "The load needs an OpenAI-compatible server that streams tokens; see the server's log."
    )


async def _ask_once(questions: Questions, path: str, model: str, prompt: dict[str, Any]) -> RequestRecord:
    body = {
        "model": model,
        **prompt,
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun_s = monotonic()
    exchange = Exchange(PlannedRequest(b"", None, 1), 0, "warmup", begun_s, 0, False)
    exchange.framer = None
    exchange.status, reply = await questions.ask("POST", path, body)
    exchange.times, exchange.pieces = [monotonic()], [reply]
    exchange.end_s = exchange.times[0]
    return exchange.read(secret=questions.secret)
