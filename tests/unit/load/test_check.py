"""Files of loads are checked before anything starts: units, sizes, misspelt keys, and what they can show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuner.domain.workload import PromptsWorkload, SharedPrefixWorkload, TraceWorkload
from tuner.errors import FileFormatError, UsageError
from tuner.load.check import check_workload
from tuner.load.workloads.trace_file import TraceLine, block_size

Row = dict[str, Any]


def trace(folder: Path, rows: list[Row], **more: Any) -> TraceWorkload:
    (folder / "t.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return TraceWorkload(**{"path": "t.jsonl", "requests": 10, "block_tokens": 16, **more})


def conversations(n: int = 40, gap: float = 250, block: int = 16, **more: Any) -> list[Row]:
    """Prompts of 320 tokens and more, three blocks shared; `gap` between timestamps."""
    rows = []
    for i in range(n):
        length = 320 + 7 * i
        ids = [1, 2, 3, *range(1000 * i, 1000 * i - 3 + -(-length // block))]
        rows.append({"timestamp": i * gap, "input_length": length, "output_length": 8, "hash_ids": ids, **more})
    return rows


def test_an_honest_trace_is_told(tmp_path: Path) -> None:
    said = check_workload(trace(tmp_path, conversations()), tmp_path)
    assert "11 requests, 4 a second over 2 s" in said
    assert "prompts of 320 to 390 tokens (mean 355)" in said
    assert "12 % of prompt tokens were sent before" in said


@pytest.mark.parametrize(("given", "meant"), [(512, 16), (16, 512), (512, 64), (16, 256), (512, 48)])
def test_ids_that_stand_for_another_number_of_tokens_say_for_how_many(tmp_path: Path, given: int, meant: int) -> None:
    rows = conversations(block=meant)
    for row in rows:
        row["input_length"] *= 20
        row["hash_ids"] = list(range(-(-row["input_length"] // meant)))
    with pytest.raises(UsageError, match=f"one id stands for {meant} tokens") as caught:
        check_workload(trace(tmp_path, rows, block_tokens=given), tmp_path)
    assert caught.value.hint == f"Set workload.block_tokens: {meant}."
    assert check_workload(trace(tmp_path, rows, block_tokens=meant), tmp_path)


def test_ids_of_whole_blocks_alone_fit_too() -> None:
    lines = [TraceLine(0, n, 1, tuple(range(n // 64))) for n in (100, 200, 300, 1000)]
    assert block_size(lines) == 64


def test_ids_that_fit_no_block_size_are_refused(tmp_path: Path) -> None:
    rows = conversations()
    for i, row in enumerate(rows):
        row["hash_ids"] = list(range(5 + 40 * (i % 7)))
    with pytest.raises(UsageError, match="no block size fits them all"):
        check_workload(trace(tmp_path, rows), tmp_path)


def test_ids_of_the_shared_part_alone_are_a_trace(tmp_path: Path) -> None:
    rows = conversations()
    for i, row in enumerate(rows):
        row["hash_ids"] = [1, 2, 3][: 1 + i % 3]
    assert check_workload(trace(tmp_path, rows), tmp_path)


def test_timestamps_in_seconds_are_refused_with_both_readings(tmp_path: Path) -> None:
    rows = conversations(gap=2.25)
    with pytest.raises(UsageError, match=r"read as ms give 444 requests a second, read as seconds 0\.444") as caught:
        check_workload(trace(tmp_path, rows), tmp_path)
    assert "workload.timestamp_unit" in caught.value.hint
    assert "0.444 a second over 22 s" in check_workload(trace(tmp_path, rows, timestamp_unit="s"), tmp_path)
    assert "444 a second" in check_workload(trace(tmp_path, rows, timestamp_unit="ms"), tmp_path)


def test_seconds_since_1970_are_known_for_what_they_are(tmp_path: Path) -> None:
    rows = conversations(gap=30)
    for row in rows:
        row["timestamp"] += 1_700_000_000
    with pytest.raises(UsageError, match="seconds since 1970"):
        check_workload(trace(tmp_path, rows), tmp_path)
    for row in rows:
        row["timestamp"] = 1_700_000_000_000 + 250 * (row["timestamp"] - 1_700_000_000) / 30
    assert "4 a second" in check_workload(trace(tmp_path, rows), tmp_path)


def test_a_round_that_takes_days_is_refused(tmp_path: Path) -> None:
    """Microseconds, say."""
    with pytest.raises(UsageError, match="takes 29 days"):
        check_workload(trace(tmp_path, conversations(gap=250_000_000)), tmp_path)


def test_no_time_is_looked_at_that_is_not_used(tmp_path: Path) -> None:
    for more in ({"rate": 5.0}, {"concurrency": 2}):
        assert check_workload(trace(tmp_path, conversations(gap=2.25), **more), tmp_path)


@pytest.mark.parametrize("which", ["all", "one", "null"])
def test_lines_without_a_timestamp_need_a_rate_or_a_concurrency(tmp_path: Path, which: str) -> None:
    rows = conversations()
    for row in rows[5:6] if which == "one" else rows:
        if which == "null":
            row["timestamp"] = None
        else:
            del row["timestamp"]
    with pytest.raises(FileFormatError, match=f"line {6 if which == 'one' else 1} has no timestamp") as caught:
        check_workload(trace(tmp_path, rows), tmp_path)
    assert "workload.rate or workload.concurrency" in caught.value.hint
    assert "5 a second" in check_workload(trace(tmp_path, rows, rate=5.0), tmp_path)
    assert "2 at a time" in check_workload(trace(tmp_path, rows, concurrency=2), tmp_path)


def test_one_timestamp_for_all_lines_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="would be sent at once"):
        check_workload(trace(tmp_path, conversations(gap=0)), tmp_path)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("timestamps", "timestamp"),
        ("input_len", "input_length"),
        ("output_lenght", "output_length"),
        ("hash_id", "hash_ids"),
    ],
)
def test_a_misspelt_key_names_the_nearest(tmp_path: Path, wrong: str, right: str) -> None:
    rows = conversations()
    rows[2][wrong] = rows[2].pop(right)
    with pytest.raises(FileFormatError, match=f"line 3: unknown key '{wrong}'") as caught:
        check_workload(trace(tmp_path, rows), tmp_path)
    assert caught.value.hint == f"Did you mean {right!r}?"


def test_a_key_under_another_name_is_asked_for(tmp_path: Path) -> None:
    rows = conversations()
    for row in rows:
        row["num_prefill_tokens"] = row.pop("input_length")
    with pytest.raises(FileFormatError, match="line 1 has no input_length") as caught:
        check_workload(trace(tmp_path, rows), tmp_path)
    assert "num_prefill_tokens" in caught.value.hint


def test_other_keys_and_a_byte_order_mark_are_no_error(tmp_path: Path) -> None:
    workload = trace(tmp_path, conversations(type="text", turn=1, chat_id=7))
    (tmp_path / "t.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "t.jsonl").read_bytes())
    assert check_workload(workload, tmp_path)


def prompts(folder: Path, *bodies: Row, **more: Any) -> PromptsWorkload:
    (folder / "p.jsonl").write_text("\n".join(json.dumps(body) for body in bodies))
    return PromptsWorkload(**{"path": "p.jsonl", "requests": 2, "concurrency": 1, **more})


@pytest.mark.parametrize(
    ("wrong", "right"), [("max_token", "max_tokens"), ("temprature", "temperature"), ("promt", "prompt")]
)
def test_a_misspelt_field_of_a_body_names_the_nearest(tmp_path: Path, wrong: str, right: str) -> None:
    body = {"prompt": "x", "max_tokens": 4, "temperature": 0}
    body[wrong] = body.pop(right)
    with pytest.raises(FileFormatError, match=f"line 1: unknown key '{wrong}'") as caught:
        check_workload(prompts(tmp_path, body), tmp_path)
    assert caught.value.hint == f"Did you mean {right!r}?"


@pytest.mark.parametrize("n", [0, -1, "4", 2.5, [2]])
def test_a_number_of_answers_that_is_none_is_named(tmp_path: Path, n: Any) -> None:
    with pytest.raises(FileFormatError, match="line 2: n is no number of answers"):
        check_workload(prompts(tmp_path, {"prompt": "x"}, {"prompt": "y", "n": n}), tmp_path)


def test_bodies_that_ask_for_several_answers_are_said(tmp_path: Path) -> None:
    assert "1 of 2 bodies" in check_workload(prompts(tmp_path, {"prompt": "x"}, {"prompt": "y", "n": 4}), tmp_path)


@pytest.mark.parametrize("metric", ["itl_ms.p99", "tpot_ms.mean"])
def test_a_metric_that_no_round_can_measure_is_refused(tmp_path: Path, metric: str) -> None:
    rows = conversations(output_length=1)
    loads = [
        trace(tmp_path, rows),
        prompts(tmp_path, {"prompt": "x", "max_tokens": 1}, {"prompt": "y", "max_tokens": 1}),
        PromptsWorkload(path="p.jsonl", requests=1, concurrency=1, output_tokens=1),
        SharedPrefixWorkload(
            system_prompt_tokens=64, user_prompt_tokens=8, output_tokens=1, concurrency=1, requests=1
        ),
    ]  # fmt: skip
    for load in loads:
        with pytest.raises(UsageError, match=f"{metric} cannot be measured with this load"):
            check_workload(load, tmp_path, ["ttft_ms.p90", metric])
        check_workload(load, tmp_path, ["ttft_ms.p90", "failed_requests"])


def test_two_tokens_are_enough(tmp_path: Path) -> None:
    rows = conversations(output_length=1)
    rows[0]["output_length"] = 2
    assert check_workload(trace(tmp_path, rows), tmp_path, ["itl_ms.p99"])
    assert check_workload(prompts(tmp_path, {"prompt": "x"}, output_tokens=(1, 2)), tmp_path, ["tpot_ms.p50"])
    assert check_workload(prompts(tmp_path, {"prompt": "x"}), tmp_path, ["tpot_ms.p50"])
