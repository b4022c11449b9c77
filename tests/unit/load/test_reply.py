"""Which delta carries a token, what `usage` settles, what is a failure."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tuner.load.reply import Reply, body_text, error_text
from tuner.load.sse import Event


def read(*messages: Any, name: bytes = b"") -> Reply:
    """Message i arrives at second i; '[DONE]' stands for itself."""
    reply = Reply()
    for at_s, message in enumerate(messages):
        data = message.encode() if isinstance(message, str) else json.dumps(message).encode()
        reply.take(Event(data, name), float(at_s))
    reply.close()
    return reply


def delta(finish: str | None = None, **content: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": finish}]}


def text(value: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": finish}]}


def usage(completion: int, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": completion, **more}}


@pytest.mark.parametrize(
    "role",
    [{"role": "assistant"}, {"role": "assistant", "content": ""}, {"role": "assistant", "content": None}, {}],
)
def test_a_delta_with_only_a_role_is_no_token(role: dict[str, Any]) -> None:
    reply = read(delta(**role), delta(content="hi"), delta("stop"), usage(1), "[DONE]")
    assert reply.token_times == [1.0]
    assert reply.done
    assert reply.finished


def test_a_role_beside_text_is_a_token() -> None:
    assert read(delta(role="assistant", content="hi")).token_times == [0.0]


def test_an_empty_text_is_a_token() -> None:
    assert read(delta(role="assistant", content=""), delta(content=""), delta(content="é")).token_times == [1.0, 2.0]
    assert read(text(""), text("é")).token_times == [0.0, 1.0]


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_thoughts_are_tokens_and_the_answer_is_timed_apart(key: str) -> None:
    reply = read(delta(role="assistant", content=""), delta(**{key: "hm"}), delta(**{key: ""}), delta(content="42"))
    assert reply.token_times == [1.0, 2.0, 3.0]
    assert reply.first_answer_s == 3.0


def test_a_tool_call_is_a_token_and_an_answer() -> None:
    reply = read(delta(role="assistant"), delta(tool_calls=[{"index": 0, "function": {"name": "f"}}]))
    assert reply.token_times == [1.0]
    assert reply.first_answer_s == 1.0


def test_the_finishing_delta_is_a_token_only_when_usage_says_so() -> None:
    assert read(text("a"), text("", "stop"), usage(1)).token_times == [0.0]
    assert read(text("a"), text("", "stop"), usage(2)).token_times == [0.0, 1.0]
    assert read(text("", "length"), usage(1)).token_times == [0.0]
    assert read(delta(role="assistant"), delta("length"), usage(1)).token_times == [1.0]
    assert read(text("a", "length"), usage(1)).token_times == [0.0]


def test_counts_come_from_usage_whatever_the_deltas_held() -> None:
    reply = read(text("three tokens here"), usage(3, prompt_tokens_details={"cached_tokens": 4}))
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens) == (7, 3, 4)
    assert len(reply.token_times) == 1


def test_null_details_are_not_zero() -> None:
    assert read(usage(1, prompt_tokens_details=None)).cached_tokens is None


def test_usage_on_every_chunk_keeps_the_last() -> None:
    first = {**text("a"), "usage": {"prompt_tokens": 7, "completion_tokens": 1}}
    assert read(first, {**text("b"), "usage": {"prompt_tokens": 7, "completion_tokens": 2}}).output_tokens == 2


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "out of memory", "code": 500}},
        {"error": "out of memory"},
        {"object": "error", "message": "out of memory"},
        {"choices": [], "error": {"message": "out of memory"}},
    ],
)
def test_an_error_in_the_stream_is_an_error(error: dict[str, Any]) -> None:
    reply = read(text("a"), text("b"), error, "[DONE]")
    assert reply.error is not None
    assert "out of memory" in reply.error
    assert len(reply.token_times) == 2


def test_an_event_named_error_is_one_whatever_it_says() -> None:
    assert "boom" in (read("boom", name=b"error").error or "")
    assert "boom" in (read({"message": "boom"}, name=b"error").error or "")


def test_what_is_no_json_is_an_error() -> None:
    assert "<html>" in (read("<html>").error or "")
    assert read("[1]").error is not None


@pytest.mark.parametrize(
    "message", [{"choices": "x"}, {"choices": [1]}, {"choices": 7}, {"choices": [], "usage": "x"}], ids=str
)
def test_json_of_another_shape_is_an_error(message: dict[str, Any]) -> None:
    assert "another shape" in (read(message).error or "")


def test_null_error_is_none() -> None:
    assert read({**text("a"), "error": None}).error is None


def test_error_sentences_are_found() -> None:
    assert error_text({"error": {"message": "a\n b"}}) == "a b"
    assert error_text({"detail": "Not Found"}) == "Not Found"
    assert error_text({"message": "m"}) == "m"
    assert body_text(b"<h1>502</h1>") == "<h1>502</h1>"
