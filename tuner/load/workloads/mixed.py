"""Weighted classes of requests, and classes that arrive beside them."""

from __future__ import annotations

from itertools import count

from numpy.random import Generator

from tuner.domain.workload import MixedWorkload, WorkloadClass
from tuner.errors import UsageError
from tuner.load.arrivals import deal, due_times_s, endless_due_s, endless_spread, spread
from tuner.load.plan import Arrivals, PlannedRequest
from tuner.load.prompting import Prompter, Text, generator
from tuner.load.workloads.base import until_measured

VISIT_BURSTINESS = 16.0
"""Gaps between visits scatter by a quarter: at a fixed pace visits keep step with a closed loop beside them, and their
TTFT hangs on the phase that a round happens to have."""


class MixedLoad:
    """Classes without arrivals of their own share the workload's; the others run beside them until those are done."""

    label = ""

    def __init__(self, workload: MixedWorkload, prompter: Prompter, seed: int) -> None:
        names = [c.name for c in workload.classes]
        if len(set(names)) < len(names):
            raise UsageError(f"workload.classes: two classes have one name: {', '.join(names)}", "Name each its own.")
        self._workload = workload
        self._prompter = prompter
        self._seed = seed
        self._sharing = [c for c in workload.classes if not c.own_arrivals]
        self._beside = [c for c in workload.classes if c.own_arrivals]
        numbers = count()
        self._prefixes = {(c.name, t): next(numbers) for c in workload.classes for t in range(c.tenants)}

    def arrivals(self, content_key: str, arrivals_key: str) -> tuple[Arrivals, ...]:
        return (
            self._lead(content_key, arrivals_key),
            *(self._own(content_key, arrivals_key, c) for c in self._beside),
        )

    def _lead(self, content_key: str, arrivals_key: str) -> Arrivals:
        workload = self._workload
        classes = self._sharing
        rng = generator(self._seed, arrivals_key, "lengths")
        weights = [c.weight for c in classes]
        firsts = sum(c.tenants for c in classes if c.system_prompt_tokens[1])
        cold = workload.concurrency if workload.concurrency is not None else firsts
        # The burst and the measured part each have every class in proportion.
        parts = [deal(rng, weights, cold), deal(rng, weights, workload.requests)]
        picks = [pick for part in parts for pick in part]
        lengths = [self._lengths(rng, classes, part) for part in parts]
        users_outputs = [pair for part in lengths for pair in part]
        dues: list[float | None] = [None] * len(picks)
        if workload.rate is not None:
            times = generator(self._seed, arrivals_key, "times")
            dues = [*due_times_s(times, workload.rate, workload.burstiness, len(picks))]
        visits = [0] * len(classes)
        content = generator(self._seed, content_key, "users")
        systems = {c.name: self._systems(content_key, arrivals_key, c) for c in classes}
        requests: list[PlannedRequest] = []
        for pick, (user, output), due in zip(picks, users_outputs, dues, strict=True):
            cls = classes[pick]
            tenant = visits[pick] % cls.tenants
            visits[pick] += 1
            text = self._prompter.draw(content, user)
            requests.append(self._request(cls, systems[cls.name][tenant], tenant, text, output, due))
        if workload.open_loop:
            requests = until_measured(requests, workload.requests)
        return Arrivals.of(requests, workload.concurrency)

    def _lengths(self, rng: Generator, classes: list[WorkloadClass], picks: list[int]) -> list[tuple[int, int]]:
        """User and output tokens of each pick, spread evenly within each class."""
        totals = [picks.count(i) for i in range(len(classes))]
        users = [iter(spread(rng, c.user_prompt_tokens, n)) for c, n in zip(classes, totals, strict=True)]
        outputs = [iter(spread(rng, c.output_tokens, n)) for c, n in zip(classes, totals, strict=True)]
        return [(next(users[i]), next(outputs[i])) for i in picks]

    def _own(self, content_key: str, arrivals_key: str, cls: WorkloadClass) -> Arrivals:
        """Endless: a closed loop, a rate, or a visit every so often."""
        systems = self._systems(content_key, arrivals_key, cls)
        starts = generator(self._seed, arrivals_key, cls.name, "lengths").random(2)
        dues: list[float] = []
        due_source = None
        rate, burstiness = cls.rate, cls.burstiness
        if cls.visit_every is not None:
            rate, burstiness = 1.0 / cls.visit_every, VISIT_BURSTINESS
        if rate is not None:
            times = generator(self._seed, arrivals_key, cls.name, "times")
            due_source = endless_due_s(times, rate, burstiness)

        def request(i: int) -> PlannedRequest:
            due: float | None = None
            if due_source is not None:
                while len(dues) <= i:
                    dues.append(next(due_source))
                due = dues[i]
            user = endless_spread(float(starts[0]), cls.user_prompt_tokens, i)
            output = endless_spread(float(starts[1]), cls.output_tokens, i)
            text = self._prompter.draw(generator(self._seed, content_key, cls.name, "user", i), user)
            return self._request(cls, systems[i % cls.tenants], i % cls.tenants, text, output, due)

        return Arrivals(
            request=request, count=None, concurrency=cls.concurrency, firsts_are_cold=cls.concurrency is None
        )

    def warm_up(self, key: str) -> tuple[Arrivals, ...]:
        """Every class at its longest, in the proportions of the burst, and each at least once."""
        rng = generator(self._seed, key, "lengths")
        picks = [
            self._sharing[i] for i in deal(rng, [c.weight for c in self._sharing], self._workload.peak_concurrency)
        ]
        for cls in self._beside:
            picks += [cls] * (cls.concurrency or 1)
        picks += [cls for cls in self._workload.classes if cls not in picks]
        content = generator(self._seed, key, "users")
        requests = [
            self._request(
                cls,
                self._prompter.draw(generator(self._seed, key, cls.name, "system", 0), cls.system_prompt_tokens[1]),
                0,
                self._prompter.draw(content, cls.user_prompt_tokens[1]),
                cls.output_tokens[1],
                None,
            )
            for cls in picks
        ]
        return (Arrivals.together(requests),)

    def longest_tokens(self) -> int:
        return max(
            self._prompter.total_tokens(c.system_prompt_tokens[1], c.user_prompt_tokens[1]) + c.output_tokens[1]
            for c in self._workload.classes
        )

    def _systems(self, content_key: str, arrivals_key: str, cls: WorkloadClass) -> list[Text]:
        rng = generator(self._seed, arrivals_key, cls.name, "systems")
        lengths = spread(rng, cls.system_prompt_tokens, cls.tenants)
        return [
            self._prompter.draw(generator(self._seed, content_key, cls.name, "system", t), n)
            for t, n in enumerate(lengths)
        ]

    def _request(
        self, cls: WorkloadClass, system: Text, tenant: int, user: Text, output: int, due: float | None
    ) -> PlannedRequest:
        return PlannedRequest(
            body=self._prompter.body(system if system.tokens else None, user, output),
            prompt_tokens=self._prompter.total_tokens(system.tokens, user.tokens),
            output_tokens=output,
            group=cls.name,
            prefix=self._prefixes[cls.name, tenant] if system.tokens else None,
            at_s=due,
        )
