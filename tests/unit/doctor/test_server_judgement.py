"""What is made of a server's answers."""

from __future__ import annotations

import pytest

from tests.unit.doctor.test_sense import profile
from tuner.doctor.line import ok, wrong
from tuner.doctor.server import explain, judge_caching, judge_jitter, judge_metrics, judge_pool, needed_tokens
from tuner.errors import LoadError
from tuner.load.target import Target
from tuner.telemetry.families import Snapshot, parse


@pytest.mark.parametrize(
    ("cached", "reported", "says", "status"),
    [
        (64, True, True, "ok"),
        (0, True, None, "wrong"),
        (None, False, True, "ok"),
        (None, False, False, "wrong"),
        (None, False, None, "warning"),
        (64, True, False, "wrong"),
    ],
)
def test_caching(cached: int | None, reported: bool, says: bool | None, status: str) -> None:
    assert judge_caching(cached, 65, reported, says).status == status


def test_a_401_says_what_to_check() -> None:
    line = explain(LoadError("auth", "HTTP 401"), Target("http://h:1"), {})
    assert line.status == "wrong"
    for word in ("--api-key-env", "/v1", "--model"):
        assert word in line.hint


@pytest.mark.parametrize(
    ("url", "words"), [("http://far.example:8000", "went to that proxy"), ("http://127.0.0.1:8000", "ignored")]
)
def test_a_refused_connection_names_a_left_over_proxy(url: str, words: str) -> None:
    line = explain(LoadError("refused", "no"), Target(url), {"HTTP_PROXY": "http://user:secret@127.0.0.1:9"})
    assert words in line.hint
    assert "HTTP_PROXY" in line.hint
    assert "secret" not in line.hint


def test_the_pool_against_the_load() -> None:
    needed = needed_tokens(profile())
    assert needed == 2048 + 32 * (128 + 24)
    assert judge_pool(needed, needed).status == "ok"
    assert judge_pool(needed - 1, needed).status == "wrong"
    assert judge_pool(None, needed).status == "warning"


def test_jitter_names_the_first_suspect_in_order() -> None:
    steady = [50.0, 51, 52, 50, 49, 50, 51, 50]
    assert judge_jitter(steady, []).status == "ok"
    assert judge_jitter([*steady[:6], 300.0], []).status == "wrong"  # one was not answered
    jumpy = [50.0, 51, 200, 50, 300, 50, 51, 50]
    line = judge_jitter(jumpy, [ok("prefix caching", "on"), wrong("prefix length", "too short", "Share more.")])
    assert line.status == "warning"
    assert line.hint.index("prefix caching") < line.hint.index("block size") < line.hint.index("memory for the cache")
    assert "too short" in line.hint
    assert judge_jitter([0.5, 0.6, 0.5, 3.0, 4.0, 0.5, 0.5, 0.5], []).status == "ok"  # too fast to matter


def test_other_load_and_preemptions() -> None:
    snapshot = parse(
        "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3\n"
        "# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total 2\n"
    )
    assert isinstance(snapshot, Snapshot)
    assert [(line.check, line.status) for line in judge_metrics(snapshot)] == [
        ("metrics", "ok"),
        ("other load", "warning"),
        ("preemptions", "warning"),
    ]
