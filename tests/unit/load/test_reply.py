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


def choice(index: int, text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "finish_reason": finish}]}


def test_gaps_are_between_tokens_of_one_choice() -> None:
    """Two answers in turn, each with a token every two seconds."""
    told = [choice(i % 2, "a", "length" if i > 3 else None) for i in range(6)]
    reply = read(*told, usage(6), "[DONE]")
    assert reply.gaps_ms == [2000.0] * 4
    assert reply.token_times == [float(i) for i in range(6)]
    assert reply.finished


def test_choices_in_one_event_are_told_apart() -> None:
    both = {"choices": [{"index": i, "text": "a"} for i in range(3)]}
    assert read(both, both, usage(6)).gaps_ms == [1000.0] * 3


def test_an_end_belongs_to_its_choice() -> None:
    reply = read(choice(0, "a", "length"), choice(1, "a"), usage(2), "[DONE]")
    assert not reply.finished
    assert reply.finish_reason == "length"
    assert read(choice(0, "a", "length"), choice(1, "a", "abort")).finish_reason == "abort"


@pytest.mark.parametrize("said", ["", "null", "None"])
def test_a_finish_reason_that_says_nothing_is_none(said: str) -> None:
    assert read(text("a", said)).finish_reason is None


@pytest.mark.parametrize(
    "keep_alive", [text(""), delta(content=""), delta(reasoning_content=""), delta(role="assistant", content="")]
)
def test_empty_deltas_before_the_first_token_are_none_when_usage_says_so(keep_alive: dict[str, Any]) -> None:
    token = text if "text" in keep_alive["choices"][0] else lambda word: delta(content=word)
    reply = read(keep_alive, keep_alive, keep_alive, token("a"), token("b"), usage(2))
    assert reply.token_times == [3.0, 4.0]
    assert reply.first_answer_s == 3.0


def test_keep_alives_among_the_tokens_go_too() -> None:
    reply = read(text(""), text("a"), text(""), text("b"), text(""), usage(2))
    assert reply.token_times == [1.0, 3.0]
    assert reply.keep_alives == 3


def test_an_empty_token_stays_a_token_behind_keep_alives() -> None:
    """Half a character: three deltas without text, two of them more than `usage` counts."""
    reply = read(text(""), text(""), text(""), text("é"), usage(2))
    assert reply.token_times == [2.0, 3.0]


def test_deltas_with_text_are_never_dropped() -> None:
    assert read(text("a"), text("b"), text("c"), usage(1)).token_times == [0.0, 1.0, 2.0]


def test_thoughts_after_keep_alives_do_not_begin_the_answer() -> None:
    reply = read(delta(content=""), delta(reasoning="hm"), delta(content="42"), usage(2))
    assert reply.token_times == [1.0, 2.0]
    assert reply.first_answer_s == 2.0


@pytest.mark.parametrize(
    "event",
    [
        Event(b""),
        Event(b" "),
        Event(b"\n"),
        Event(b"", b"ping"),
        Event(b"keep-alive", b"ping"),
        Event(b"ok", b"status"),
    ],
    ids=str,
)
def test_an_event_without_data_or_of_another_name_is_no_event(event: Event) -> None:
    reply = Reply()
    reply.take(event, 0.0)
    assert reply == Reply()


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices": [{"text": "\\ud83d", "finish_reason": null}]}',
        b'{"choices": [{"text": "a", "logprobs": {"token_logprobs": [-Infinity, NaN]}}]}',
        b'{"choices": [{"text": "caf\xc3"}]}',
        b'  {"choices": [{"text": "a"}], "id": 123456789012345678901234567890}  ',
        b'{\n"choices":\n[{"text":"a"}]}',
    ],
    ids=["half a pair", "not finite", "half a character", "a long number", "several lines"],
)
def test_json_that_servers_send_is_read(data: bytes) -> None:
    reply = Reply()
    reply.take(Event(data), 1.0)
    assert reply.error is None
    assert reply.token_times == [1.0]


def test_json_without_end_is_an_error_and_no_crash() -> None:
    for data in (b"{" * 100_000, b"[" * 100_000, b'{"a": ' * 50_000):
        reply = Reply()
        reply.take_json(data, 0.0)
        assert "no JSON" in (reply.error or "")


def test_a_count_may_be_written_with_a_point_and_more_cached_than_sent_is_none() -> None:
    told = {"prompt_tokens": 7.0, "completion_tokens": 2.0, "prompt_tokens_details": {"cached_tokens": 9}}
    reply = read(text("a"), {"choices": [], "usage": told})
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens) == (7, 2, None)
