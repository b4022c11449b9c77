"""A recorded trace: who shares what with whom, and when."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tuner.domain.workload import TraceWorkload
from tuner.load.arrivals import due_times_s
from tuner.load.plan import Arrivals, PlannedRequest
from tuner.load.prompting import Prompter, Text, generator
from tuner.load.workloads.trace_file import TraceLine, choose_lines, describe_trace, parse_trace


class TraceLoad:
    """The lines of a trace in their order; every round draws other tokens for the same blocks."""

    def __init__(self, workload: TraceWorkload, prompter: Prompter, seed: int, base_dir: Path) -> None:
        self._workload = workload
        self._prompter = prompter
        self._seed = seed
        self._lines = choose_lines(workload, parse_trace(workload, base_dir))
        self.label = describe_trace(workload, self._lines)
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
