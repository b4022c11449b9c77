"""Requests that share a long system prompt, or one of several."""

from __future__ import annotations

from tuner.domain.workload import SharedPrefixWorkload
from tuner.load.arrivals import deal, due_times_s, spread
from tuner.load.plan import Arrivals, PlannedRequest
from tuner.load.prompting import Prompter, Text, generator
from tuner.load.workloads.base import until_measured


class SharedPrefixLoad:
    """Every round draws system prompts of its own; every request has a user part of its own."""

    label = ""

    def __init__(self, workload: SharedPrefixWorkload, prompter: Prompter, seed: int) -> None:
        self._workload = workload
        self._prompter = prompter
        self._seed = seed

    def arrivals(self, content_key: str, arrivals_key: str) -> tuple[Arrivals, ...]:
        workload = self._workload
        rng = generator(self._seed, arrivals_key, "lengths")
        cold = workload.concurrency if workload.concurrency is not None else workload.system_prompts
        systems = self._systems(content_key, spread(rng, workload.system_prompt_tokens, workload.system_prompts))
        # The burst and the measured part each cover their ranges evenly.
        users = [n for part in (cold, workload.requests) for n in spread(rng, workload.user_prompt_tokens, part)]
        outputs = [n for part in (cold, workload.requests) for n in spread(rng, workload.output_tokens, part)]
        total = cold + workload.requests
        if workload.rate is None:
            dues: list[float | None] = [None] * total
            visits = deal(rng, [1.0] * len(systems), total)
        else:
            times = generator(self._seed, arrivals_key, "times")
            dues = [*due_times_s(times, workload.rate, workload.burstiness, total)]
            # Each prompt is visited, so that exactly its first visit is cold and `requests` are measured.
            visits = [*range(len(systems)), *deal(rng, [1.0] * len(systems), total - len(systems))]
            if len(systems) > 1:
                rng.shuffle(visits)
        content = generator(self._seed, content_key, "users")
        requests = [
            self._request(systems, visit, self._prompter.draw(content, user), output, due)
            for visit, user, output, due in zip(visits, users, outputs, dues, strict=True)
        ]
        if workload.open_loop:
            requests = until_measured(requests, workload.requests)
        return (Arrivals.of(requests, workload.concurrency),)

    def warm_up(self, key: str) -> tuple[Arrivals, ...]:
        workload = self._workload
        count = workload.peak_concurrency
        systems = self._systems(key, [workload.system_prompt_tokens[1]])
        content = generator(self._seed, key, "users")
        user, output = workload.user_prompt_tokens[1], workload.output_tokens[1]
        requests = [self._request(systems, 0, self._prompter.draw(content, user), output, None) for _ in range(count)]
        return (Arrivals.together(requests),)

    def longest_tokens(self) -> int:
        workload = self._workload
        prompt = self._prompter.total_tokens(workload.system_prompt_tokens[1], workload.user_prompt_tokens[1])
        return prompt + workload.output_tokens[1]

    def _systems(self, key: str, lengths: list[int]) -> list[Text]:
        return [self._prompter.draw(generator(self._seed, key, "system", i), n) for i, n in enumerate(lengths)]

    def _request(self, systems: list[Text], visit: int, user: Text, output: int, due: float | None) -> PlannedRequest:
        system = systems[visit]
        return PlannedRequest(
            body=self._prompter.body(system if system.tokens else None, user, output),
            prompt_tokens=self._prompter.total_tokens(system.tokens, user.tokens),
            output_tokens=output,
            group=f"system-{visit}" if len(systems) > 1 else "",
            prefix=visit if system.tokens else None,
            at_s=due,
        )
