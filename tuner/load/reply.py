"""What a streamed reply says: tokens and their times, how it ended, usage, failures. Pure; runs after the round."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import orjson

from tuner.domain.units import printable
from tuner.load.sse import Event

DONE = b"[DONE]"
NORMAL_ENDS = frozenset(
    {"stop", "length", "tool_calls", "function_call", "eos", "eos_token", "stop_sequence", "end_turn", "max_tokens"}
)
"""Finish reasons of an answer that ended as it should, of vLLM and of other servers; lower case."""
_NO_REASON = ("", "null", "none")


@dataclass(slots=True)
class Choice:
    """One answer of a reply; a request with `n` above 1 has several."""

    times: list[float] = field(default_factory=list)
    """Of each token-bearing delta."""
    empty: list[tuple[int, bool]] = field(default_factory=list)
    """Which of them had no text, by position, and whether they belong to the answer rather than to thoughts."""
    bare_finish_s: float | None = None
    """A delta with nothing but the finish reason."""
    reason: str | None = None


@dataclass(slots=True)
class Reply:
    """One streamed reply, read event by event.

    A token-bearing delta has generated content, reasoning or a tool call; its text may be empty (half a
    UTF-8 character). A delta that only names the role has none. `usage` settles what is in doubt: where it counts
    fewer tokens than there are deltas, empty ones were none (keep-alives), those at the head first; where it counts
    more, an empty delta with a finish reason was one.
    """

    choices: dict[int, Choice] = field(default_factory=dict)
    """By `index`, in the order of their first delta."""
    answer_s: float | None = None
    """First delta with text of the answer itself, in a reply that has deltas of other kinds; see `first_answer_s`."""
    deltas: bool = False
    """It is a chat stream."""
    done: bool = False
    """`[DONE]` was seen."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    keep_alives: int = 0
    """Empty deltas that were no tokens."""

    def take(self, event: Event, at_s: float) -> None:
        """Account for an event that arrived at `at_s`. One without data is none, and so is one of a name that OpenAI's
        API does not have, unless it looks like its own."""
        data, failed = event.data.strip(), event.name == b"error"
        if data == DONE:
            self.done = True
        elif failed or data[:1] == b"{" or (data and event.name in (b"", b"message")):
            self.take_json(event.data, at_s, named_error=failed)

    def take_json(self, data: bytes, at_s: float, *, named_error: bool = False) -> None:
        """Account for the data of an event that is not `[DONE]`."""
        if self.error is not None:
            return
        try:
            message = parse_json(data)
        except (ValueError, RecursionError):
            self.error = f"{'error event' if named_error else 'an event that is no JSON'}: {_text(data)}"
            return
        if not isinstance(message, dict):
            self.error = f"an event that is no object: {_text(data)}"
            return
        try:
            self._message(message, data, at_s, named_error=named_error)
        except (AttributeError, TypeError):
            self.error = f"an event of another shape than OpenAI's: {_text(data)}"

    def _message(self, message: dict[str, Any], data: bytes, at_s: float, *, named_error: bool) -> None:
        choices = message.get("choices")
        if choices:
            for given in choices:
                index = given.get("index") or 0
                choice = self.choices.get(index)
                if choice is None:
                    choice = self.choices[index] = Choice()
                reason = given.get("finish_reason")
                if reason is not None and str(reason).lower() not in _NO_REASON:
                    choice.reason = str(reason)
                text = given.get("text")
                if text:
                    # The common case, not worth another call.
                    choice.times.append(at_s)
                else:
                    self._delta(choice, given, text, at_s)
        elif named_error:
            self.error = f"error event: {error_text(message) or _text(data)}"
            return
        if message.get("error") or message.get("object") == "error":
            self.error = f"error event: {error_text(message) or _text(data)}"
            return
        usage = message.get("usage")
        if usage:
            self._usage(usage)

    def _delta(self, choice: Choice, given: dict[str, Any], text: str | None, at_s: float) -> None:
        """A delta of a chat, or one without text."""
        last = given.get("finish_reason") is not None
        delta = given.get("delta")
        if text is not None or not isinstance(delta, dict):
            if last:
                choice.bare_finish_s = at_s
            elif text is not None:
                choice.empty.append((len(choice.times), True))
                choice.times.append(at_s)
            return
        self.deltas = True
        content = delta.get("content")
        thoughts = [delta.get(key) for key in ("reasoning", "reasoning_content")]
        answer = content or delta.get("tool_calls") or delta.get("function_call") or delta.get("refusal")
        if answer or any(thoughts):
            choice.times.append(at_s)
            if answer and self.answer_s is None:
                self.answer_s = at_s
        elif last:
            choice.bare_finish_s = at_s
        elif "role" not in delta and any(each is not None for each in (content, *thoughts)):
            choice.empty.append((len(choice.times), content is not None and thoughts == [None, None]))
            choice.times.append(at_s)

    def _usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = whole(usage.get("prompt_tokens"), self.prompt_tokens)
        self.output_tokens = whole(usage.get("completion_tokens"), self.output_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            cached = whole(details.get("cached_tokens"), self.cached_tokens)
            # More than the whole prompt is no count of this request.
            self.cached_tokens = cached if cached is None or cached <= (self.prompt_tokens or cached) else None

    def close(self) -> None:
        """The stream ended: settle which deltas were tokens."""
        choices = self.choices.values()
        counted = sum(len(choice.times) for choice in choices)
        if self.output_tokens is not None and counted > self.output_tokens:
            self._drop_empty(counted - self.output_tokens)
        for choice in choices:
            if choice.bare_finish_s is not None and counted < (self.output_tokens or 0):
                choice.times.append(choice.bare_finish_s)
                counted += 1
                if counted == 1:
                    self.answer_s = choice.bare_finish_s
            choice.bare_finish_s = None
        if self.deltas:
            empty = [choice.times[at] for choice in choices for at, answer in choice.empty if answer]
            self.answer_s = min([*empty, *([] if self.answer_s is None else [self.answer_s])], default=None)

    def _drop_empty(self, surplus: int) -> None:
        """Take out the first `surplus` deltas without text, or as many as there are."""
        first = sorted(
            (choice.times[at], index, at) for index, choice in self.choices.items() for at, _ in choice.empty
        )
        gone = {(index, at) for _, index, at in first[:surplus]}
        self.keep_alives = len(gone)
        for index, choice in self.choices.items():
            kept = [at for at in range(len(choice.times)) if (index, at) not in gone]
            places = {old: new for new, old in enumerate(kept)}
            choice.empty = [(places[at], answer) for at, answer in choice.empty if at in places]
            choice.times = [choice.times[at] for at in kept]

    @property
    def token_times(self) -> list[float]:
        """Of every token-bearing delta, in order."""
        return sorted(at_s for choice in self.choices.values() for at_s in choice.times)

    @property
    def gaps_ms(self) -> list[float]:
        """Between successive token-bearing deltas of each choice."""
        return [(b - a) * 1e3 for choice in self.choices.values() for a, b in pairwise(choice.times)]

    @property
    def finish_reason(self) -> str | None:
        """The first that is no normal end, else the first."""
        reasons = [choice.reason for choice in self.choices.values() if choice.reason is not None]
        return next((r for r in reasons if r.lower() not in NORMAL_ENDS), reasons[0] if reasons else None)

    @property
    def finished(self) -> bool:
        """Every choice has a finish reason."""
        return bool(self.choices) and all(choice.reason is not None for choice in self.choices.values())

    @property
    def first_answer_s(self) -> float | None:
        """When the answer began: in a completion with its first token, in a chat perhaps after thinking."""
        if self.deltas:
            return self.answer_s
        return min((choice.times[0] for choice in self.choices.values() if choice.times), default=None)


def parse_json(data: bytes) -> Any:
    """JSON as servers send it. ValueError for anything else.

    What the fast parser refuses gets a second look: half of a surrogate pair, NaN, a number of any length, and bytes
    that are no UTF-8, which a stream of events is to be read around.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data.decode("utf-8", "replace"))


def error_text(message: Any) -> str:
    """The sentence in an OpenAI-style error object, '' when there is none."""
    if not isinstance(message, dict):
        return ""
    error = message.get("error", message)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error.get("type") or ""
    elif error is message or not isinstance(error, str):
        error = message.get("message") or message.get("detail") or ""
    return printable(" ".join(str(error).split())[:300])


def body_text(body: bytes) -> str:
    """What an error reply's body says: its error object's sentence, or its first 300 characters."""
    try:
        return error_text(orjson.loads(body)) or _text(body)
    except orjson.JSONDecodeError:
        return _text(body)


def whole(value: Any, otherwise: int | None = None) -> int | None:
    """A count of a server's reply, 0 or more; `otherwise` where it is none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def _text(data: bytes) -> str:
    return printable(" ".join(data.decode("utf-8", "replace").split())[:300])
