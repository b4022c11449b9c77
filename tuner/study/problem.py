"""What a search is asked: settings, how they group into starts, what is better, and what is allowed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tuner.domain.experiment import SettingId
from tuner.domain.profile import Constraint, Objective
from tuner.domain.setting import STOCK, Scalar, Setting


@dataclass(frozen=True)
class Group:
    """Settings that one start can measure: they agree in every boot knob."""

    boot: dict[str, Scalar]
    """The boot knobs and their values; empty for the group that stock is in."""
    settings: tuple[Setting, ...]
    """Distinct, inert combinations already left out; stock, which every start measures, is not among them."""


@dataclass(frozen=True)
class Problem:
    """One study's question."""

    base_args: dict[str, Scalar]
    """`engine.args` of the profile."""
    groups: tuple[Group, ...]
    objective: Objective
    constraints: tuple[Constraint, ...] = ()
    rounds: int = 3
    """Least cycles before a setting may be eliminated, and least rounds of each setting in a final start."""
    references: tuple[Setting, ...] = ()
    """Measured beside the others and never the winner; without stock."""
    live: bool = True
    """False: each start measures one setting."""
    refine: bool = True
    chunk_unit: int = 16
    """The block size that the profile sets, else 16: every chunk size is a multiple."""
    max_settings: int = 64
    """Most settings measured, refinement included, stock and references not."""
    time_s: float | None = None
    """Budget of the whole sweep, in seconds."""
    default_chunk: int | None = None
    """What vLLM is expected to take as chunk size when it is not told any; None: not known."""
    seed: int = 0
    """Draws the order of settings in each cycle, and of groups in the finals."""
    infeasible: tuple[tuple[Setting, str, str], ...] = field(default=())
    """Settings of the space that a rule refuses before any start: the setting, the cause code, the sentence."""

    @property
    def stock(self) -> Setting:
        return STOCK


class Registry(Protocol):
    """Where settings get their ids: Optuna's study in a sweep, a counter in tests and benchmarks."""

    def id_of(self, setting: Setting) -> SettingId:
        """The same id for the same setting, always; `stock` for stock. A new setting becomes a trial."""
        ...

    def propose(self, group: Group, count: int) -> list[Setting]:
        """At most so many settings that were not measured yet, for a space too large to enumerate.

        The same ones until one of them is measured: asking changes nothing.
        """
        ...
