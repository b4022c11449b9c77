"""What a streamed reply says: tokens and their times, usage, failures. Pure; runs after the round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from tuner.domain.units import printable
from tuner.load.sse import Event

DONE = b"[DONE]"


@dataclass(slots=True)
class Reply:
    """One streamed reply, read event by event.

    A token-bearing delta has generated content, reasoning or a tool call; its text may be empty (half a
    UTF-8 character). A delta that only names the role has none. An empty delta with a finish reason is a
    token only when `usage` counts more tokens than the deltas before it can explain.
    """

    token_times: list[float] = field(default_factory=list)
    answer_s: float | None = None
    """First delta of the answer itself, in a reply that has deltas of other kinds; see `first_answer_s`."""
    deltas: bool = False
    """It is a chat stream."""
    finished: bool = False
    """A finish reason was seen."""
    done: bool = False
    """`[DONE]` was seen."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    details: bool = False
    """`usage` had `prompt_tokens_details`."""
    error: str | None = None
    _bare_finish_s: float | None = None

    def take(self, event: Event, at_s: float) -> None:
        """Account for an event that arrived at `at_s`."""
        if event.data == DONE:
            self.done = True
            return
        self.take_json(event.data, at_s, named_error=event.name == b"error")

    def take_json(self, data: bytes, at_s: float, *, named_error: bool = False) -> None:
        """Account for the data of an event that is not `[DONE]`."""
        if self.error is not None:
            return
        try:
            message = orjson.loads(data)
        except orjson.JSONDecodeError:
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
            for choice in choices:
                text = choice.get("text")
                if text:
                    # The common case, not worth another call.
                    self.token_times.append(at_s)
                    if choice.get("finish_reason") is not None:
                        self.finished = True
                else:
                    self._choice(choice, text, at_s)
        elif named_error:
            self.error = f"error event: {error_text(message) or _text(data)}"
            return
        if message.get("error") or message.get("object") == "error":
            self.error = f"error event: {error_text(message) or _text(data)}"
            return
        usage = message.get("usage")
        if usage:
            self._usage(usage)

    def _choice(self, choice: dict[str, Any], text: str | None, at_s: float) -> None:
        reason = choice.get("finish_reason")
        if reason is not None:
            self.finished = True
        if text is not None:
            if reason is None:
                self.token_times.append(at_s)
            else:
                self._bare_finish_s = at_s
            return
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            if reason is not None:
                self._bare_finish_s = at_s
            return
        self.deltas = True
        content = delta.get("content")
        answer = bool(content or delta.get("tool_calls") or delta.get("function_call") or delta.get("refusal"))
        thought = delta.get("reasoning") or delta.get("reasoning_content")
        if answer or thought:
            self.token_times.append(at_s)
        elif reason is not None:
            self._bare_finish_s = at_s
        elif "role" not in delta and any(
            delta.get(key) is not None for key in ("content", "reasoning", "reasoning_content")
        ):
            self.token_times.append(at_s)
            answer = content is not None and delta.get("reasoning") is None and delta.get("reasoning_content") is None
        if answer and self.answer_s is None:
            self.answer_s = at_s

    def _usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = whole(usage.get("prompt_tokens"), self.prompt_tokens)
        self.output_tokens = whole(usage.get("completion_tokens"), self.output_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.details = True
            self.cached_tokens = whole(details.get("cached_tokens"), self.cached_tokens)

    def close(self) -> None:
        """The stream ended: settle whether the finishing delta carried the last token."""
        if self._bare_finish_s is not None and (self.output_tokens or 0) > len(self.token_times):
            if not self.token_times:
                self.answer_s = self._bare_finish_s
            self.token_times.append(self._bare_finish_s)
        self._bare_finish_s = None

    @property
    def first_answer_s(self) -> float | None:
        """When the answer began: in a completion with its first token, in a chat perhaps after thinking."""
        if self.deltas:
            return self.answer_s
        return self.token_times[0] if self.token_times else None


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
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def _text(data: bytes) -> str:
    return printable(" ".join(data.decode("utf-8", "replace").split())[:300])
