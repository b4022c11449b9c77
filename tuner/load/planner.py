"""Rounds for one server: built once, then a plan for each round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tuner.domain.workload import MixedWorkload, PromptsWorkload, SharedPrefixWorkload, TraceWorkload
from tuner.errors import UsageError
from tuner.load.http import Questions
from tuner.load.plan import RoundPlan
from tuner.load.probe import ServerFacts
from tuner.load.prompting import Prompter
from tuner.load.rendering import Asked, ask_prompter
from tuner.load.target import Target
from tuner.load.workloads.base import Load
from tuner.load.workloads.mixed import MixedLoad
from tuner.load.workloads.prompts import PromptsLoad
from tuner.load.workloads.shared_prefix import SharedPrefixLoad
from tuner.load.workloads.trace import TraceLoad

AnyWorkload = SharedPrefixWorkload | MixedWorkload | TraceWorkload | PromptsWorkload


class Planner:
    """Makes the plan of each round. The same seed and keys give the same bytes for the same server.

    A content key must be new to the server: content that it has seen would be answered from its cache, and the
    round be discarded. Who measures a server that outlives the run puts something of the run's own into the key.
    """

    def __init__(self, workload: AnyWorkload, asked: Asked, load: Load, facts: ServerFacts) -> None:
        self._workload = workload
        self._asked = asked
        self._load = load
        self._facts = facts
        self.labels = tuple(label for label in (facts.label, asked.label, load.label) if label)
        """What the reader of the numbers has to know about this load."""

    @classmethod
    async def open(
        cls, target: Target, workload: AnyWorkload, facts: ServerFacts, *, seed: int, base_dir: Path
    ) -> Planner:
        """Asks the server for its tokens. `base_dir` is where the workload's relative paths begin.

        UsageError when a prompt with its output does not fit the server's model length.
        """
        async with Questions(target) as questions:
            asked = await ask_prompter(questions, facts)
        prompter = replace(asked.prompter, ignore_eos=workload.ignore_eos)
        planner = cls(workload, asked, make_load(workload, prompter, seed, base_dir), facts)
        planner.refuse_too_long()
        return planner

    def refuse_too_long(self) -> None:
        """UsageError when the longest request cannot be served."""
        limit = self._facts.max_model_len
        longest = self._load.longest_tokens()
        if limit is not None and longest is not None and longest > limit:
            raise UsageError(
                f"the workload's longest request takes {longest} tokens with its output, the server at most {limit}",
                "Raise max_model_len (engine.args of the profile, or --max-model-len of a server that runs), or "
                "make the workload's prompts or outputs shorter.",
            )

    def plan(self, content_key: str, arrivals_key: str) -> RoundPlan:
        """A measured round with content of its own.

        Rounds with an equal `arrivals_key` have the same lengths, classes, tenants and times, so that they can be
        compared in pairs.
        """
        return RoundPlan(
            key=content_key,
            path=self._path,
            arrivals=self._load.arrivals(content_key, arrivals_key),
            cached_allowance=self._asked.shared_tokens,
            reports_cached_tokens=self._facts.reports_cached_tokens,
            reports_finish=self._facts.reports_finish,
            exact_prompts=self._asked.exact,
            exact_answers=self._workload.ignore_eos,
            labels=self.labels,
        )

    def warm_up(self, key: str) -> RoundPlan:
        """The longest prompts at full concurrency, on a prefix of their own; nothing of it is measured."""
        return RoundPlan(
            key=key,
            path=self._path,
            arrivals=self._load.warm_up(key),
            phase="warmup",
            must_start_cold=False,
            reports_cached_tokens=self._facts.reports_cached_tokens,
            reports_finish=self._facts.reports_finish,
            labels=self.labels,
        )

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self._facts.api == "chat" else "/v1/completions"


def make_load(workload: AnyWorkload, prompter: Prompter, seed: int, base_dir: Path) -> Load:
    """The load of a workload's kind. FileFormatError or UsageError for a file that does not fit."""
    if isinstance(workload, SharedPrefixWorkload):
        return SharedPrefixLoad(workload, prompter, seed)
    if isinstance(workload, MixedWorkload):
        return MixedLoad(workload, prompter, seed)
    if isinstance(workload, TraceWorkload):
        return TraceLoad(workload, prompter, seed, base_dir)
    return PromptsLoad(workload, prompter, seed, base_dir)
