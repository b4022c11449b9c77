"""What is asked of the server: prompts, lengths and arrivals."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tuner.domain.base import Document
from tuner.domain.units import Duration, TokenRange, Tokens


class _Arrivals(Document):
    """Closed loop (`concurrency`) or open loop (`rate` a second, Poisson when `burstiness` is 1)."""

    concurrency: Annotated[int, Field(gt=0, le=100_000)] | None = None
    """Closed loop: so many requests at a time, the next one when one ends."""
    rate: PositiveFloat | None = None
    """Open loop: requests a second, sent by the clock."""
    burstiness: PositiveFloat = 1.0
    """Open loop: 1 is Poisson, below it arrivals cluster, above it they even out."""

    @property
    def open_loop(self) -> bool:
        """True when requests are sent by the clock, whatever the server answers."""
        return self.rate is not None


class _Workload(_Arrivals):
    requests: Annotated[int, Field(gt=0, le=10_000_000)]
    """Measured requests a round; the cold burst comes on top."""
    api: Literal["completions", "chat"] = "completions"
    """completions sends token ids, so that lengths are exact; chat goes through the chat template."""
    request_timeout: Duration = 300.0
    """A request that takes longer has failed."""
    ignore_eos: bool = True
    """Whether requests tell the server to go on to their output length. `false` for servers that refuse it or break
    with it: answers then end where the model ends them, and their lengths are reported instead of required."""

    @model_validator(mode="after")
    def _one_arrival(self) -> _Workload:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("say either concurrency (closed loop) or rate (open loop), not both")
        return self

    @property
    def peak_concurrency(self) -> int:
        """Requests the warm-up and the OOM probe keep in flight; for an open loop, a second of arrivals."""
        return self.concurrency if self.concurrency is not None else max(1, round(self.rate or 1))

    @property
    def group_names(self) -> list[str]:
        """Names under which the TTFT of a part of the load is told apart, as in `groups.<name>.p50`."""
        return []

    @property
    def most_output_tokens(self) -> int | None:
        """The longest answer that is asked for; None where a file says."""
        return None

    def cannot_measure(self, metric: str) -> str:
        """Why no round of this load can measure the metric at a path such as `itl_ms.p99`; '' when one can."""
        return unmeasurable(metric, self.most_output_tokens)


def unmeasurable(metric: str, most_output_tokens: int | None) -> str:
    """Why answers of at most so many tokens cannot show a metric; '' when they can."""
    if most_output_tokens == 1 and metric.partition(".")[0] in ("itl_ms", "tpot_ms"):
        return f"{metric} cannot be measured with this load: every answer has one token, and it takes two to time a gap"
    return ""


class SharedPrefixWorkload(_Workload):
    """Requests that share a long system prompt, or one of several."""

    kind: Literal["shared-prefix"] = "shared-prefix"
    system_prompt_tokens: TokenRange
    system_prompts: PositiveInt = 1
    """How many different system prompts a round uses, visited at random."""
    user_prompt_tokens: TokenRange
    output_tokens: TokenRange

    @property
    def most_output_tokens(self) -> int:
        return self.output_tokens[1]

    @property
    def group_names(self) -> list[str]:
        return [f"system-{i}" for i in range(self.system_prompts)] if self.system_prompts > 1 else []


class WorkloadClass(_Arrivals):
    """One kind of request in a mixed load.

    Without an arrival of its own a class takes a share (`weight`) of the workload's arrivals. With
    `concurrency`, `rate` or `visit_every` it runs beside them on its own.
    """

    name: str
    weight: PositiveFloat = 1.0
    system_prompt_tokens: TokenRange = (0, 0)
    tenants: PositiveInt = 1
    """Different system prompts of this class, visited in turn."""
    visit_every: Duration | None = None
    """Mean time from one request of this class to the next, give or take a quarter; tenants take turns."""
    user_prompt_tokens: TokenRange
    output_tokens: TokenRange

    @property
    def own_arrivals(self) -> bool:
        """True when this class is sent beside the workload's arrivals, not out of them."""
        return self.concurrency is not None or self.rate is not None or self.visit_every is not None


class MixedWorkload(_Workload):
    """Weighted classes, such as long documents beside short chats and tenants that go cold."""

    kind: Literal["mixed"] = "mixed"
    classes: Annotated[list[WorkloadClass], Field(min_length=1)]

    @property
    def most_output_tokens(self) -> int:
        return max(c.output_tokens[1] for c in self.classes)

    @property
    def group_names(self) -> list[str]:
        return [c.name for c in self.classes]

    @model_validator(mode="after")
    def _some_class_shares(self) -> MixedWorkload:
        if all(c.own_arrivals for c in self.classes):
            raise ValueError("at least one class has to take the workload's own arrivals")
        return self


class TraceWorkload(_Workload):
    """A trace in the Mooncake format: timestamp, input_length, output_length, hash_ids.

    Equal hash ids become equal blocks of `block_tokens` tokens. The trace's own times are used when
    neither `concurrency` nor `rate` is given; `speed` 2 plays it twice as fast.
    """

    kind: Literal["trace"] = "trace"
    path: str
    block_tokens: Annotated[Tokens, Field(gt=0)] = 512
    """Prompt tokens that one hash id stands for."""
    timestamp_unit: Literal["ms", "s"] | None = None
    """Without it timestamps are read as ms, and refused where they look like seconds."""
    speed: PositiveFloat = 1.0
    max_input_tokens: Annotated[Tokens, Field(ge=0)] = 0
    """Longer prompts are cut to this; 0: never."""

    @model_validator(mode="after")
    def _one_arrival(self) -> TraceWorkload:
        if self.concurrency is not None and self.rate is not None:
            raise ValueError("say concurrency or rate, or neither for the trace's own times")
        return self

    @property
    def open_loop(self) -> bool:
        return self.concurrency is None

    @property
    def peak_concurrency(self) -> int:
        return self.concurrency or 8


class PromptsWorkload(_Workload):
    """OpenAI chat or completion bodies from a file of JSON lines."""

    kind: Literal["prompts"] = "prompts"
    path: str
    output_tokens: TokenRange | None = None
    """Overrides `max_tokens` of the bodies when given."""

    @property
    def most_output_tokens(self) -> int | None:
        return self.output_tokens[1] if self.output_tokens is not None else None


Workload = Annotated[
    SharedPrefixWorkload | MixedWorkload | TraceWorkload | PromptsWorkload, Field(discriminator="kind")
]


def workload_sha256(workload: Document) -> str:
    """Hex digest of the workload's canonical JSON: equal digests, equal loads."""
    text = json.dumps(workload.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
