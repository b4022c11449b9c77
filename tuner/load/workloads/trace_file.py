"""The file of a recorded trace: lines, and whether their units can be meant. Pure but for reading it.

The format is that of the traces published with 'Mooncake: A KVCache-centric Disaggregated Architecture for LLM
Serving' (Qin et al., 2024): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`, one id for each block
of `block_tokens` tokens of the prompt; equal ids, equal blocks. What does not look like that is refused before
anything starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.domain.units import format_duration
from tuner.domain.workload import TraceWorkload
from tuner.errors import FileFormatError, UsageError
from tuner.load.reply import whole
from tuner.load.workloads.files import read_lines

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
MOST_A_SECOND = 100.0
"""Requests: more than one node serves; timestamps in seconds that are read as ms give a thousand times too many."""
LONGEST_S = 86_400.0
"""Of one round."""
MISFITS_ALLOWED = 0.05
"""Share of lines whose ids may be too many or too few for their length."""
_EPOCH_S = (1e9, 4e9)
"""Seconds since 1970, of the years 2001 to 2096."""


@dataclass(frozen=True)
class TraceLine:
    """One request of a trace."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def parse_trace(workload: TraceWorkload, base_dir: Path) -> list[TraceLine]:
    """Every line, ordered by time from 0. FileFormatError names the line and field; UsageError for units that cannot
    be meant."""
    rows = read_lines(workload.path, base_dir, known=FIELDS)
    own_times = workload.concurrency is None and workload.rate is None
    times = [_timestamp(where, row, required=own_times) for where, row in rows]
    if own_times:
        _check_times(workload, times)
    unit_s = 1.0 if workload.timestamp_unit == "s" else 1e-3
    start = min(times)
    lines: list[TraceLine] = []
    for (where, row), time in zip(rows, times, strict=True):
        hash_ids = row.get("hash_ids", [])
        if not isinstance(hash_ids, list) or not all(isinstance(h, int) and not isinstance(h, bool) for h in hash_ids):
            raise FileFormatError(f"{where}: hash_ids is no list of whole numbers")
        tokens, output = _whole(row, "input_length", where), _whole(row, "output_length", where)
        lines.append(TraceLine((time - start) * unit_s / workload.speed, tokens, output, tuple(hash_ids)))
    check_blocks(workload, lines)
    if workload.max_input_tokens:
        lines = [replace(line, input_tokens=min(line.input_tokens, workload.max_input_tokens)) for line in lines]
    return sorted(lines, key=lambda line: line.at_s)


def _timestamp(where: str, row: dict[str, Any], *, required: bool) -> float:
    time = row.get("timestamp")
    if time is None and not required:
        return 0.0
    if time is None:
        raise FileFormatError(
            f"{where} has no timestamp: when is it to be sent?",
            "Set workload.rate or workload.concurrency, or give every line a `timestamp` in ms.",
        )
    if isinstance(time, bool) or not isinstance(time, int | float) or time < 0:
        raise FileFormatError(f"{where}: timestamp is no time in milliseconds: {time!r}")
    return float(time)


def _check_times(workload: TraceWorkload, times: Sequence[float]) -> None:
    """UsageError where these timestamps cannot be what the workload says they are."""
    span, gaps = max(times) - min(times), len(times) - 1
    if gaps and not span:
        raise UsageError(
            f"all {len(times)} lines of {workload.path} have one timestamp, so all would be sent at once",
            "Set workload.rate or workload.concurrency.",
        )
    per_unit = gaps / span if gaps else 0.0
    a_second = per_unit * (1 if workload.timestamp_unit == "s" else 1000)
    if workload.timestamp_unit is None:
        since_1970 = _EPOCH_S[0] <= min(times) <= _EPOCH_S[1]
        if since_1970 or a_second > MOST_A_SECOND:
            raise UsageError(
                f"{workload.path}: timestamps read as ms give {a_second:,.0f} requests a second, read as seconds "
                f"{per_unit:.3g}" + (", and they are seconds since 1970" if since_1970 else ""),
                "Set workload.timestamp_unit to s or ms, or play the trace by workload.rate or workload.concurrency.",
            )
    lasts_s = workload.requests / a_second / workload.speed if a_second else 0.0
    if lasts_s > LONGEST_S:
        raise UsageError(
            f"{workload.path}: at its own times, {per_unit:.3g} requests per {workload.timestamp_unit or 'ms'}, one "
            f"round of {workload.requests} requests takes {lasts_s / 86_400:.0f} days",
            "Timestamps are in ms; convert them, raise workload.speed, or set workload.rate or workload.concurrency.",
        )


def check_blocks(workload: TraceWorkload, lines: Sequence[TraceLine]) -> None:
    """UsageError where ids and lengths say that one id stands for another number of tokens than `block_tokens`."""
    told = [line for line in lines if line.hash_ids]
    misfits = [line for line in told if not _fits(line, workload.block_tokens)]
    if len(misfits) <= MISFITS_ALLOWED * len(told):
        return
    line = misfits[0]
    seen = (
        f"{workload.path}: a prompt of {line.input_tokens:,} tokens has {len(line.hash_ids)} hash ids, "
        f"with workload.block_tokens {workload.block_tokens} it has {-(-line.input_tokens // workload.block_tokens)}"
    )
    found = block_size(told)
    if found is not None:
        raise UsageError(f"{seen}; one id stands for {found} tokens", f"Set workload.block_tokens: {found}.")
    if any(len(line.hash_ids) > -(-line.input_tokens // workload.block_tokens) for line in misfits):
        raise UsageError(
            f"{seen}; so it is for {len(misfits)} of {len(told)} lines, and no block size fits them all",
            "One id stands for each whole block of a prompt, and one more for the rest.",
        )


def _fits(line: TraceLine, block: int) -> bool:
    """As many ids as blocks, with or without one for the rest that fills no block."""
    return len(line.hash_ids) in (line.input_tokens // block, -(-line.input_tokens // block))


def block_size(lines: Sequence[TraceLine]) -> int | None:
    """Tokens of one id, a power of two or else any number, that nearly all lines fit; None where there is none."""
    ratios = sorted(line.input_tokens / len(line.hash_ids) for line in lines)
    middle = ratios[len(ratios) // 2]
    powers = [1 << n for n in range(18) if middle / 4 <= 1 << n <= middle * 4]
    for block in (*powers, round(ratios[-1])):
        if block and sum(not _fits(line, block) for line in lines) <= MISFITS_ALLOWED * len(lines):
            return block
    return None


def describe_trace(workload: TraceWorkload, lines: Sequence[TraceLine]) -> str:
    """Rate, lengths and sharing of the lines that a round plays."""
    prompts = [line.input_tokens for line in lines]
    outputs = [line.output_tokens for line in lines]
    seen: set[int] = set()
    found = 0
    for line in lines:
        for number, hash_id in enumerate(line.hash_ids):
            if hash_id not in seen:
                break
            found += min(workload.block_tokens, max(0, line.input_tokens - number * workload.block_tokens))
        seen.update(line.hash_ids)
    span_s = lines[-1].at_s
    if workload.concurrency is not None:
        pace = f"{workload.concurrency} at a time"
    elif workload.rate is not None:
        pace = f"{workload.rate:g} a second"
    else:
        pace = f"{(len(lines) - 1) / span_s:.3g} a second over {format_duration(span_s)}" if span_s else "one"
    return (
        f"the trace: {len(lines)} requests, {pace}; prompts of {min(prompts):,} to {max(prompts):,} tokens (mean "
        f"{sum(prompts) / len(lines):,.0f}), answers of {min(outputs):,} to {max(outputs):,} (mean "
        f"{sum(outputs) / len(lines):,.0f}); {100 * found / sum(prompts):.0f} % of prompt tokens were sent before"
    )


def choose_lines(workload: TraceWorkload, lines: list[TraceLine]) -> list[TraceLine]:
    """So many first lines that `requests` of them are measured; UsageError when there are too few."""
    if workload.concurrency is not None:
        needed = workload.concurrency + workload.requests
        have = max(0, len(lines) - workload.concurrency)
        chosen = lines[:needed]
        enough = len(lines) >= needed
    else:
        shared = Counter(line.hash_ids[0] for line in lines if line.hash_ids)
        seen: set[int] = set()
        have = 0
        chosen = []
        for line in lines:
            if have == workload.requests:
                break
            chosen.append(line)
            first = line.hash_ids[0] if line.hash_ids else None
            if first is None or shared[first] < 2 or first in seen:
                have += 1
            else:
                seen.add(first)
        enough = have == workload.requests
    if not enough:
        raise UsageError(
            f"workload.requests is {workload.requests}, but {workload.path} with {len(lines)} lines has only {have} "
            "to measure beside the cold ones",
            f"Set workload.requests to {have} or fewer, or use a longer trace."
            if have
            else "Use a longer trace, or a smaller concurrency.",
        )
    return chosen


def _whole(row: dict[str, Any], name: str, where: str) -> int:
    number = row.get(name)
    if number is None:
        raise FileFormatError(f"{where} has no {name}", f"It has {', '.join(row) or 'nothing'}; rename what is meant.")
    tokens = whole(number)
    if not tokens:
        raise FileFormatError(f"{where}: {name} is no whole number of at least 1: {number!r}")
    return tokens
