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
from tuner.load.prompting import asked_for
from tuner.load.reply import whole
from tuner.load.target import Api, Target
from tuner.load.vocabulary import tokenize
from tuner.web import SIMULATED_OWNER

HELLO = "The first request asks for one token, to see that the server answers as it should."
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
    reports_finish: bool = False
    """Answers say why they ended."""
    simulated: bool = False
    """It is chunktune's own simulated engine."""


async def probe(target: Target, *, ignore_eos: bool = True) -> ServerFacts:
    """One request with all that the load's requests say; `ignore_eos` as the workload has it.

    LoadError with the hint: `refused`, `timeout`, `auth`, `not_openai`, `missing_model`, `no_chat_template`,
    `http_error`.
    """
    async with Questions(target) as questions:
        model, max_model_len, owner = await _model(questions, target)
        prober = _Prober(questions, model, max_model_len, ignore_eos)
        facts = await (prober.chat(target) if target.api == "chat" else prober.completions(""))
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


_WITHOUT = {
    "ignore_eos": "Set workload.ignore_eos: false; answers then end where the model ends them.",
    "stream_options": "Without it a server does not say how many tokens it read and gave. Measure the engine itself "
    "rather than a gateway in front of it.",
}
"""Fields that some servers refuse, and what to do then."""


@dataclass(frozen=True)
class _Prober:
    questions: Questions
    model: str
    max_model_len: int | None
    ignore_eos: bool

    async def completions(self, label: str) -> ServerFacts:
        ids = await tokenize(self.questions, {"model": self.model, "prompt": HELLO, "add_special_tokens": False})
        token_ids = False
        record: RequestRecord | None = None
        if ids is not None:
            record = await self._ask("/v1/completions", {"prompt": ids})
            token_ids = record.error is None and record.prompt_tokens == len(ids)
        if record is None or record.error_code == "http_error":
            record = await self._ask("/v1/completions", {"prompt": HELLO})
        await self._raise_for(record, "/v1/completions", {"prompt": HELLO})
        return self._facts(record, "completions", token_ids=token_ids, label=label)

    async def chat(self, target: Target) -> ServerFacts:
        path = "/v1/chat/completions"
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HELLO}]
        record = await self._ask(path, {"messages": messages})
        if record.error_code == "http_error" and record.status in (400, 422, 500, 404) and _no_template(record):
            try:
                return await self.completions("completions instead of chat: no chat template")
            except LoadError:
                raise LoadError(
                    "no_chat_template",
                    f"{target.base} takes no chat requests: {record.error}",
                    "Give the server a --chat-template, or the profile `workload.api: completions`.",
                ) from None
        await self._raise_for(record, path, {"messages": messages})
        return self._facts(record, "chat")

    def _facts(self, record: RequestRecord, api: Api, *, token_ids: bool = False, label: str = "") -> ServerFacts:
        return ServerFacts(
            model=self.model,
            max_model_len=self.max_model_len,
            token_ids=token_ids,
            reports_cached_tokens=record.cached_tokens is not None,
            reports_finish=record.finish_reason is not None,
            label=label,
            api=api,
        )

    async def _raise_for(self, record: RequestRecord, path: str, prompt: dict[str, Any]) -> None:
        if record.error is None:
            return
        said = f"the server's answer to one request before the load: {record.error}"
        if record.error_code == "auth":
            raise LoadError("auth", said, _KEY_MEND)
        if record.status == 404:
            raise LoadError("missing_model", said, "Choose a model that the server has with --model ID.")
        for name, hint in _WITHOUT.items():
            if (name != "ignore_eos" or self.ignore_eos) and (await self._ask(path, prompt, name)).error is None:
                raise LoadError("http_error", f"{said} (without `{name}` it answers)", hint)
        if record.error_code in ("http_error", "abnormal_end"):
            raise LoadError(
                "http_error", said, "Every request of the load would fail the same way; see the server's log."
            )
        raise LoadError(
            "not_openai",
            said,
            "The load needs an OpenAI-compatible server that streams tokens; see the server's log.",
        )

    async def _ask(self, path: str, prompt: dict[str, Any], without: str = "") -> RequestRecord:
        body = {"model": self.model, **prompt, **asked_for(1, ignore_eos=self.ignore_eos)}
        body.pop(without, None)
        begun_s = monotonic()
        exchange = Exchange(PlannedRequest(b"", None, 1), 0, "warmup", begun_s, 0, False)
        exchange.framer = None
        exchange.status, reply = await self.questions.ask("POST", path, body)
        exchange.times, exchange.pieces = [monotonic()], [reply]
        exchange.end_s = exchange.times[0]
        return exchange.read(secret=self.questions.secret)


def _no_template(record: RequestRecord) -> bool:
    return "chat template" in (record.error or "").lower() or "chat_template" in (record.error or "").lower()
