"""What the tuner and a live scheduler say to each other, whatever carries it. Standard library only.

A command asks an engine to run other settings, or what it has done; the report is its answer to that command.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal, Protocol

from tuner.scheduler.decisions import Budget

VERSION: Final = 1
"""Of these messages; an engine refuses commands of another one."""
LIVE_CLASS: Final = "tuner.scheduler.LiveScheduler"
"""For vLLM's `--scheduler-cls`."""
FOLDER_VARIABLE: Final = "CHUNKTUNE_LIVE"
"""The environment variable that names the folder through which an engine is controlled."""
BUDGET_VARIABLE: Final = "CHUNKTUNE_REUSE_BUDGET"
"""The environment variable with a start's reuse budget as JSON, in place of `--additional-config`: that option is part
of the key of the torch.compile cache (`VllmConfig.compute_hash`, vLLM 0.32), so that each budget would compile anew."""
LIVE_VALUES: Final = (
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "enable_chunked_prefill",
    "scheduler_reserve_full_isl",
    "watermark",
    "max_num_active_seqs",
    "reuse_budget",
)
"""What can be switched, under vLLM's names; `reuse_budget` is a mapping with the names of `Budget`."""
LONGEST_LEASE_S: Final = 86_400.0

Op = Literal["apply", "report"]
State = Literal["applied", "deferred", "refused", "report"]
"""`applied`: it runs. `deferred`: not now, try again. `refused`: never on this start. `report`: an answer to
`report`, or unasked when the lease ran out."""
_STATES: Final = ("applied", "deferred", "refused", "report")


class MessageError(ValueError):
    """A message that is not to be acted on; one sentence."""


@dataclass(frozen=True)
class Command:
    """What the tuner wants. A value that is not named, or None, goes back to that of the start."""

    nonce: str
    """New for each command; the answer carries it."""
    op: Op
    values: Mapping[str, Any] = field(default_factory=dict)
    lease_s: float = 0.0
    """Of `apply`: after so many seconds the engine goes back to the settings of its start."""

    def to_json(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Command:
        """MessageError when it is not a command of this version."""
        raw = _object(data, "the command")
        version = raw.pop("version", None)
        if version != VERSION:
            raise MessageError(f"the command has version {version!r}, this engine knows {VERSION}")
        names = {each.name for each in fields(cls)}
        if set(raw) != names:
            raise MessageError(f"a command has {', '.join(sorted(names))}, this one has {', '.join(sorted(raw))}")
        nonce, op, values, lease_s = raw["nonce"], raw["op"], raw["values"], raw["lease_s"]
        if not isinstance(nonce, str) or not 1 <= len(nonce) <= 64:
            raise MessageError("the nonce of a command has 1 to 64 characters")
        if op not in ("apply", "report"):
            raise MessageError(f"the command is {op!r}, this engine knows apply and report")
        if not isinstance(values, dict) or (op == "report" and values):
            raise MessageError("only a command to apply has values, and they are an object")
        shortest_s = 0.0 if op == "report" else 1e-3
        if not is_number(lease_s) or not shortest_s <= lease_s <= LONGEST_LEASE_S:
            raise MessageError(f"the lease is a number of seconds up to {LONGEST_LEASE_S:g}, not {lease_s!r}")
        return cls(nonce, op, values, float(lease_s))


@dataclass(frozen=True)
class Report:
    """What one engine answers. `applied` and `boot` have those of LIVE_VALUES that this engine can switch."""

    nonce: str
    """Of the command that this answers; '' where none could be read."""
    engine: int
    """The data-parallel index."""
    state: State
    reason: str
    """One sentence where there is something to say, else ''."""
    applied: Mapping[str, Any]
    """What the scheduler runs now, read from its own attributes."""
    boot: Mapping[str, Any]
    """What it ran when it started."""
    stock_chunk: int | None
    """The `max_num_batched_tokens` that this vLLM would choose itself; None where it does not say."""
    budget_supported: bool
    budget_reason: str
    """Why a reuse budget cannot be served here, else ''."""
    lease_left_s: float
    counters: Mapping[str, float]
    """Since the first request after the last switch: those of `StepCounts`, and the reuse budget's."""

    def to_json(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Report:
        """MessageError when it is not a report of this version."""
        raw = _object(data, "the report")
        if raw.pop("version", None) != VERSION or set(raw) != {each.name for each in fields(cls)}:
            raise MessageError("the report is of another version")
        report = cls(**raw)
        sound = (
            report.state in _STATES
            and all(isinstance(each, str) for each in (report.nonce, report.reason, report.budget_reason))
            and all(isinstance(each, dict) for each in (report.applied, report.boot, report.counters))
            and all(is_number(each) for each in (report.lease_left_s, *report.counters.values()))
            and (report.stock_chunk is None or is_whole(report.stock_chunk))
            and is_whole(report.engine)
            and isinstance(report.budget_supported, bool)
        )
        if not sound:
            raise MessageError("the report is damaged")
        return report


class Channel(Protocol):
    """How an engine gets commands and answers them."""

    def take(self) -> Command | None:
        """A command that was not taken before, or None. MessageError for one that is not to be trusted."""
        ...

    def put(self, report: Report) -> None:
        """Answer. Never raises: what cannot be delivered is lost."""
        ...


@dataclass(frozen=True)
class Limits:
    """What a start has fixed: sizes of buffers, and what vLLM would refuse at a start of its own."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


def refusal(values: Mapping[str, Any], limits: Limits) -> str:
    """Why these values cannot run within `limits`, in one sentence; '' when they can. `values` may be incomplete."""
    for name, value in values.items():
        wrong = _wrong_type(name, value)
        if wrong:
            return wrong
    chunk = values.get("max_num_batched_tokens", limits.max_num_batched_tokens)
    threshold = values.get("long_prefill_token_threshold", 0)
    active = values.get("max_num_active_seqs", limits.max_num_seqs)
    if chunk > limits.max_num_batched_tokens:
        return f"max_num_batched_tokens {chunk} is above {limits.max_num_batched_tokens}, which this start is sized for"
    if chunk < limits.max_num_seqs:
        return f"max_num_batched_tokens {chunk} is below max_num_seqs {limits.max_num_seqs}"
    if values.get("enable_chunked_prefill") is False and chunk < limits.max_model_len:
        return (
            f"without chunked prefill max_num_batched_tokens {chunk} has to be at least "
            f"max_model_len {limits.max_model_len}"
        )
    if threshold > limits.max_model_len:
        return f"long_prefill_token_threshold {threshold} is above max_model_len {limits.max_model_len}"
    if active > limits.max_num_seqs:
        return f"max_num_active_seqs {active} is above max_num_seqs {limits.max_num_seqs}"
    return ""


_WHOLE_FROM: Final = {"max_num_batched_tokens": 1, "long_prefill_token_threshold": 0, "max_num_active_seqs": 1}
_SWITCHES: Final = (
    "long_prefill_token_threshold_adaptive",
    "enable_chunked_prefill",
    "scheduler_reserve_full_isl",
)


def _wrong_type(name: str, value: Any) -> str:
    if name in _WHOLE_FROM:
        least = _WHOLE_FROM[name]
        right = is_whole(value) and value >= least
        return "" if right else f"{name} is a whole number from {least}, not {value!r}"
    if name in _SWITCHES:
        return "" if isinstance(value, bool) else f"{name} is true or false, not {value!r}"
    if name == "watermark":
        return "" if is_number(value) and 0 <= value < 1 else f"watermark is a number from 0 to below 1, not {value!r}"
    if name != "reuse_budget":
        return f"{name} cannot be switched live"
    try:
        budget_of(value)
    except ValueError as error:
        return f"reuse_budget: {error}"
    return ""


def budget_of(value: Any) -> Budget:
    """The budget of a `reuse_budget` value; None and {} are off. ValueError says what is wrong with it."""
    if value is None:
        return Budget()
    if not isinstance(value, Mapping):
        raise ValueError(f"it is an object, not {value!r}")
    return Budget.from_mapping(value)


def started_budget(additional_config: Any, environment: Mapping[str, str]) -> Budget:
    """The budget that an engine was started with; ValueError says what is wrong with it."""
    text = environment.get(BUDGET_VARIABLE)
    if text is not None:
        return budget_of(json.loads(text))
    return budget_of(additional_config.get("chunktune") if isinstance(additional_config, dict) else None)


def is_whole(value: Any) -> bool:
    """Whether this is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether this is a finite number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        raw = json.loads(data)
    except ValueError:
        raise MessageError(f"{what} is not JSON") from None
    if not isinstance(raw, dict):
        raise MessageError(f"{what} is not a JSON object")
    return raw
