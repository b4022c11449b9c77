"""How prompts are written for one server: found out by asking it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from tuner.errors import LoadError
from tuner.load.http import Questions, as_object
from tuner.load.probe import ServerFacts
from tuner.load.prompting import Prompter, Text
from tuner.load.vocabulary import Vocabulary, ask_vocabulary, tokenize
from tuner.load.words import WORDS

_SAMPLE = 40
"""Words in a text whose length is counted to learn what comes on top."""


@dataclass(frozen=True)
class Asked:
    """A prompter, and what it is good for."""

    prompter: Prompter
    shared_tokens: int = 0
    """Tokens that every prompt begins with, whatever its content."""
    label: str = ""
    exact: bool = True
    """The server counts as many prompt tokens as are planned."""


async def ask_prompter(questions: Questions, facts: ServerFacts) -> Asked:
    """Token ids where the server takes them, else text of exact length, else text of estimated length."""
    vocabulary = await ask_vocabulary(questions, facts.model)
    if vocabulary is not None and facts.api == "completions" and facts.token_ids:
        return Asked(Prompter(facts.model, "completions", vocabulary, ids=True))
    if vocabulary is not None and vocabulary.words:
        exact = await _exact_text(questions, facts, vocabulary)
        if exact is not None:
            return exact
    return await _estimated_text(questions, facts)


async def _exact_text(questions: Questions, facts: ServerFacts, vocabulary: Vocabulary) -> Asked | None:
    """None where counted lengths do not come out even (then the words are no tokens of their own here)."""
    draft = Prompter(facts.model, facts.api, vocabulary, ids=False)
    tops: list[int] = []
    for with_system in (False, True):
        found: list[int] = []
        for factor in (1, 2):
            system = _sample(vocabulary, _SAMPLE * factor, 0) if with_system else None
            user = _sample(vocabulary, _SAMPLE * factor, 1)
            tokens = await tokenize(questions, _countable(draft, system, user))
            if tokens is None:
                return None
            found.append(len(tokens) - user.tokens - (system.tokens if system else 0))
        if found[0] != found[1] or found[0] < 0:
            return None
        tops.append(found[0])
    shared = 0
    if facts.api == "chat":
        a = await tokenize(questions, _countable(draft, _sample(vocabulary, _SAMPLE, 0), _sample(vocabulary, 4, 1)))
        b = await tokenize(questions, _countable(draft, _sample(vocabulary, _SAMPLE, 2), _sample(vocabulary, 4, 3)))
        shared = _common(a or [], b or [])
    prompter = Prompter(facts.model, facts.api, vocabulary, ids=False, overhead=tops[0], overhead_system=tops[1])
    return Asked(prompter, shared)


def _sample(vocabulary: Vocabulary, tokens: int, which: int) -> Text:
    draft = Prompter("", "completions", vocabulary, ids=False)
    return draft.draw(np.random.default_rng(which), tokens)


def _countable(prompter: Prompter, system: Text | None, user: Text) -> dict[str, Any]:
    body: dict[str, Any] = orjson.loads(prompter.body(system, user, 1))
    return {key: body[key] for key in ("model", "prompt", "messages") if key in body}


def _common(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


async def _estimated_text(questions: Questions, facts: ServerFacts) -> Asked:
    """Tokens a word and what comes on top, from what the server counts for two texts."""
    vocabulary = Vocabulary((), WORDS)
    draft = Prompter(facts.model, facts.api, vocabulary, ids=False)
    counts: list[int] = []
    sizes = (_SAMPLE, _SAMPLE * 4)
    path = "/v1/chat/completions" if facts.api == "chat" else "/v1/completions"
    for size in sizes:
        body = {**_countable(draft, None, _sample(vocabulary, size, 1)), "max_tokens": 1, "temperature": 0}
        try:
            _, reply = await questions.ask("POST", path, body)
        except LoadError:
            break
        usage = (as_object(reply) or {}).get("usage")
        prompt_tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if isinstance(prompt_tokens, int):
            counts.append(prompt_tokens)
    ratio, top = 1.3, 0
    if len(counts) == 2 and counts[1] > counts[0]:
        ratio = (counts[1] - counts[0]) / (sizes[1] - sizes[0])
        top = max(0, round(counts[0] - ratio * sizes[0]))
    prompter = Prompter(
        facts.model,
        facts.api,
        Vocabulary((), WORDS, ratio),
        ids=False,
        overhead=top,
        overhead_system=top,
    )
    return Asked(prompter, 0, "prompt lengths are estimates: the server has no usable /tokenize", exact=False)
