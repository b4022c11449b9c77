"""A recorded trace in the Mooncake format: who shares what with whom, and when.

The format is that of the traces published with 'Mooncake: A KVCache-centric Disaggregated Architecture for LLM
Serving' (Qin et al., 2024): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`, one id for each block
of `block_tokens` tokens of the prompt; equal ids, equal blocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.domain.workload import TraceWorkload
from tuner.errors import FileFormatError, UsageError
from tuner.load.arrivals import due_times_s
from tuner.load.plan import Arrivals, PlannedRequest
from tuner.load.prompting import Prompter, Text, generator
from tuner.load.workloads.files import read_lines


@dataclass(frozen=True)
class TraceLine:
    """One request of a trace."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


class TraceLoad:
    """The lines of a trace in their order; every round draws other tokens for the same blocks."""

    label = ""

    def __init__(self, workload: TraceWorkload, prompter: Prompter, seed: int, base_dir: Path) -> None:
        self._workload = workload
        self._prompter = prompter
        self._seed = seed
        self._lines = choose_lines(workload, parse_trace(workload, base_dir))
        shared = Counter(line.hash_ids[0] for line in self._lines if line.hash_ids)
        self._shared = {hash_id for hash_id, n in shared.items() if n > 1}

    def arrivals(self, content_key: str, arrivals_key: str) -> tuple[Arrivals, ...]:
        workload = self._workload
        lines = self._lines
        dues: list[float | None] = [line.at_s for line in lines]
        if workload.concurrency is not None:
            dues = [None] * len(lines)
        elif workload.rate is not None:
            times = generator(self._seed, arrivals_key, "times")
            dues = [*due_times_s(times, workload.rate, workload.burstiness, len(lines))]
        blocks: dict[int, Text] = {}
        requests = [
            self._request(content_key, i, line, due, blocks)
            for i, (line, due) in enumerate(zip(lines, dues, strict=True))
        ]
        return (Arrivals.of(requests, workload.concurrency),)

    def warm_up(self, key: str) -> tuple[Arrivals, ...]:
        longest = max(self._lines, key=lambda line: line.input_tokens + line.output_tokens)
        count = self._workload.peak_concurrency
        requests = [self._request(f"{key}/{i}", i, longest, None, {}) for i in range(count)]
        return (Arrivals.together(requests),)

    def longest_tokens(self) -> int:
        return max(self._prompter.total_tokens(0, line.input_tokens) + line.output_tokens for line in self._lines)

    def _request(
        self, key: str, index: int, line: TraceLine, due: float | None, blocks: dict[int, Text]
    ) -> PlannedRequest:
        size = self._workload.block_tokens
        left = line.input_tokens
        parts: list[Text] = []
        for hash_id in line.hash_ids:
            if left <= 0:
                break
            if left >= size:
                if hash_id not in blocks:
                    blocks[hash_id] = self._prompter.draw(generator(self._seed, key, "block", hash_id), size)
                parts.append(blocks[hash_id])
            else:
                parts.append(self._prompter.draw(generator(self._seed, key, "block", hash_id), left))
            left -= parts[-1].tokens
        if left > 0:
            parts.append(self._prompter.draw(generator(self._seed, key, "own", index), left))
        prompt = self._prompter.join(parts)
        first = line.hash_ids[0] if line.hash_ids else None
        return PlannedRequest(
            body=self._prompter.body(None, prompt, line.output_tokens),
            prompt_tokens=self._prompter.total_tokens(0, line.input_tokens),
            output_tokens=line.output_tokens,
            prefix=first if first in self._shared else None,
            at_s=due,
        )


def parse_trace(workload: TraceWorkload, base_dir: Path) -> list[TraceLine]:
    """Every line, ordered by time from 0; FileFormatError names the line and field."""
    lines: list[TraceLine] = []
    for number, value in read_lines(workload.path, base_dir):
        where = f"{workload.path}, line {number}"
        tokens = _whole(value, "input_length", where, 1)
        if workload.max_input_tokens:
            tokens = min(tokens, workload.max_input_tokens)
        hash_ids = value.get("hash_ids", [])
        if not isinstance(hash_ids, list) or not all(isinstance(h, int) and not isinstance(h, bool) for h in hash_ids):
            raise FileFormatError(f"{where}: hash_ids is no list of whole numbers")
        at_ms = value.get("timestamp", 0)
        if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or at_ms < 0:
            raise FileFormatError(f"{where}: timestamp is no time in milliseconds: {at_ms!r}")
        output = _whole(value, "output_length", where, 1)
        lines.append(TraceLine(at_ms / 1000 / workload.speed, tokens, output, tuple(hash_ids)))
    lines.sort(key=lambda line: line.at_s)
    start = lines[0].at_s
    return [TraceLine(line.at_s - start, line.input_tokens, line.output_tokens, line.hash_ids) for line in lines]


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


def _whole(value: dict[str, Any], name: str, where: str, least: int) -> int:
    number = value.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise FileFormatError(f"{where}: {name} is no whole number of at least {least}: {number!r}")
    return number
