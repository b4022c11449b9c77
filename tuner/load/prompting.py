"""Token counts become request bodies."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import orjson

from tuner.load.target import Api
from tuner.load.vocabulary import Vocabulary
from tuner.load.words import OPENING


def generator(seed: int, *what: object) -> np.random.Generator:
    """A generator of its own for each thing that is drawn: the same arguments, the same numbers, anywhere."""
    digest = hashlib.sha256("\x1f".join(map(str, (seed, *what))).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


def asked_for(output_tokens: int, *, ignore_eos: bool) -> dict[str, object]:
    """What every request of a load says beside model and prompt."""
    more = {"ignore_eos": True} if ignore_eos else {}
    return {
        "max_tokens": output_tokens,
        "temperature": 0,
        **more,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass(frozen=True)
class Text:
    """So many tokens of content, drawn already: JSON ids for a token-id prompt, else plain words."""

    tokens: int
    json_ids: bytes = b""
    words: str = ""


@dataclass(frozen=True)
class Prompter:
    """Renders bodies for one server. A prompt is a system part and a user part, each of an exact length.

    With `ids` the prompt is a list of token ids. Otherwise it is text of words that are one token each; then
    `overhead` (beginning of text, chat template) comes on top of the two lengths and is counted in.
    """

    model: str
    api: Api
    vocabulary: Vocabulary
    ids: bool
    overhead: int = 0
    """Tokens on top of a user part alone."""
    overhead_system: int = 0
    """Tokens on top of both parts."""
    ignore_eos: bool = True
    """Answers go on to their output length."""

    def draw(self, rng: np.random.Generator, tokens: int) -> Text:
        """Fresh content of `tokens` tokens; fewer tokens from an equal generator are a beginning of more."""
        if tokens <= 0:
            return Text(0)
        if self.ids:
            pool = self._pool
            return Text(tokens, json_ids=orjson.dumps(pool[rng.integers(0, len(pool), tokens)].tolist())[1:-1])
        words = self.vocabulary.words
        count = max(1, round(tokens / self.vocabulary.tokens_per_word))
        drawn = rng.integers(0, len(words), count - 1).tolist()
        return Text(tokens, words=" ".join([OPENING, *(words[i] for i in drawn)]))

    @cached_property
    def _pool(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.asarray(self.vocabulary.ids, dtype=np.int64)

    def join(self, parts: list[Text]) -> Text:
        """One text of several, one after the other."""
        kept = [p for p in parts if p.tokens]
        return Text(
            sum(p.tokens for p in kept),
            json_ids=b",".join(p.json_ids for p in kept) if self.ids else b"",
            words=" ".join(p.words for p in kept),
        )

    def total_tokens(self, system_tokens: int, user_tokens: int) -> int:
        """What the server will count for a prompt of these two parts."""
        overhead = self.overhead_system if system_tokens else self.overhead
        return system_tokens + user_tokens + overhead

    def body(self, system: Text | None, user: Text, output_tokens: int) -> bytes:
        """The request's JSON."""
        fixed = {"model": self.model, **asked_for(output_tokens, ignore_eos=self.ignore_eos)}
        if self.ids:
            prompt = self.join([p for p in (system, user) if p is not None]).json_ids
            return b'%b,"prompt":[%b]}' % (orjson.dumps(fixed)[:-1], prompt)
        shared = system.words if system is not None else ""
        if self.api == "chat":
            messages = [{"role": "user", "content": user.words}]
            if shared:
                messages.insert(0, {"role": "system", "content": shared})
            return orjson.dumps({**fixed, "messages": messages})
        return orjson.dumps({**fixed, "prompt": f"{shared} {user.words}" if shared else user.words})
