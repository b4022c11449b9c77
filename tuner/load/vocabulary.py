"""What prompts are made of: tokens that the server's own tokenizer gave, or words where it has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tuner.errors import LoadError
from tuner.load.http import Questions, as_object
from tuner.load.words import OPENING, WORDS

_REPEATS: Final = 4
_ENOUGH: Final = 24
"""Fewer different tokens than this, and two prompts could begin alike by chance."""
_MOST_TOKENS: Final = 2**31
"""No vocabulary is nearly as large; ids beyond are no ids."""
_ABSENT: Final = (404, 405, 501)


@dataclass(frozen=True)
class Vocabulary:
    """Token ids, and words that are one token each when a space stands before them."""

    ids: tuple[int, ...]
    """() where the server has no tokenizer to ask."""
    words: tuple[str, ...]
    tokens_per_word: float = 1.0
    """Other than 1 only where lengths are estimated."""


async def ask_vocabulary(questions: Questions, model: str) -> Vocabulary | None:
    """From `/tokenize`; None where the server has none, or one that says too little."""
    text = OPENING + "".join(f" {word}" * _REPEATS for word in WORDS)
    ids = await tokenize(questions, {"model": model, "prompt": text, "add_special_tokens": False})
    if ids is None:
        return None
    single = single_token_words(ids, WORDS)
    distinct = tuple(sorted(set(ids)))
    if len(distinct) < _ENOUGH:
        return None
    return Vocabulary(distinct, single if len(single) >= _ENOUGH else ())


async def tokenize(questions: Questions, body: dict[str, Any]) -> list[int] | None:
    """The server's tokens of a prompt or of messages; None where it does not answer in that form."""
    try:
        status, reply = await questions.ask("POST", "/tokenize", body)
    except LoadError as error:
        if error.code == "timeout":
            return None
        raise
    answer = as_object(reply) if status == 200 else None
    tokens = None if answer is None else answer.get("tokens")
    if isinstance(tokens, list) and tokens and all(type(t) is int and 0 <= t < _MOST_TOKENS for t in tokens):
        return tokens
    return None


def single_token_words(ids: list[int], words: tuple[str, ...]) -> tuple[str, ...]:
    """Which words are one token, given the tokens of an opening and each word `_REPEATS` times over. Pure.

    A word of m tokens shows as a run of m ids that repeats; the first run is looked for behind the opening.
    """
    found: list[str] = []
    for opening in range(1, 9):
        found = []
        at = opening
        for word in words:
            length = _period(ids, at)
            if length is None:
                break
            if length == 1:
                found.append(word)
            at += length * _REPEATS
        if at == len(ids):
            return tuple(found)
    return ()


def _period(ids: list[int], at: int) -> int | None:
    for length in range(1, 17):
        run = ids[at : at + length]
        if len(run) == length and ids[at : at + length * _REPEATS] == run * _REPEATS:
            return length
    return None
