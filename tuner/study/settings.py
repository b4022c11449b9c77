"""Which settings a profile asks to measure: enumerated, grouped by start, without those that change nothing. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tuner.domain.experiment import Diagnosis, Fingerprint
from tuner.domain.profile import Profile
from tuner.domain.setting import CHUNK_KNOB, ReuseBudget, Scalar, Setting
from tuner.engine.rules import static_rule_violation
from tuner.errors import ProfileError
from tuner.space.knobs import ADAPTIVE_KNOB, CHUNKING_KNOB, LIVE, THRESHOLD_KNOB, is_live
from tuner.space.search_space import SearchSpace, declared_block_size, search_space, setting_of
from tuner.study.problem import Group, Problem

LISTED = 20_000
"""Combinations of a space that are listed; of a larger one Optuna's sampler proposes settings."""
MOST_GROUPS = 64
_GIB = 1 << 30


@dataclass(frozen=True)
class SettingRules:
    """What is known of settings before an engine starts: which are equal, and which vLLM refuses."""

    base: Mapping[str, Scalar]
    """`engine.args` of the profile."""
    default_chunk: int | None
    """What vLLM takes where nobody sets the chunk size; None: not known."""

    @property
    def stock_chunk(self) -> int | None:
        chunk = self.base.get(CHUNK_KNOB)
        return chunk if _is_number(chunk) and isinstance(chunk, int) else self.default_chunk

    def reduced(self, setting: Setting) -> Setting:
        """The setting without the knobs that change nothing, so that settings with the same effect compare equal."""
        knobs, budget = dict(setting.knobs), _reduced_budget(setting.reuse_budget)
        chunk = self.chunk(setting)
        if chunk is not None and not (budget and budget.merge_below) and _at_least(knobs.get(THRESHOLD_KNOB), chunk):
            knobs[THRESHOLD_KNOB] = 0
        threshold = knobs.get(THRESHOLD_KNOB, self.base.get(THRESHOLD_KNOB))
        if not threshold and not (budget and budget.merge_below):
            knobs.pop(ADAPTIVE_KNOB, None)
        seqs = self.base.get("max_num_seqs") if "max_num_seqs" not in knobs else knobs["max_num_seqs"]
        if _is_number(seqs) and knobs.get("max_num_active_seqs") == seqs:
            knobs["max_num_active_seqs"] = None
        knobs = {name: value for name, value in knobs.items() if not _same(value, self._without(name))}
        if set(knobs) == {CHUNK_KNOB} and budget is None and knobs[CHUNK_KNOB] == self.stock_chunk:
            knobs = {}
        return Setting(knobs=knobs, reuse_budget=budget)

    def refusal(self, setting: Setting) -> Diagnosis | None:
        """Why vLLM would refuse it; None when no rule is known that does."""
        return static_rule_violation(setting.engine_args(self.base))

    def chunk(self, setting: Setting) -> int | None:
        """The chunk size that it runs with; None when it is not known before a start."""
        return setting.chunk if CHUNK_KNOB in setting.knobs else self.stock_chunk

    def value(self, setting: Setting, name: str) -> Scalar:
        """What the knob of that name (with the prefix, where it is the budget's) is under this setting."""
        knob = LIVE.get(name)
        if name in setting.knobs:
            return setting.knobs[name]
        if name == CHUNK_KNOB:
            return self.stock_chunk
        if knob is not None and name not in self.base:
            field = name.partition(".")[2]
            budget = setting.reuse_budget
            return knob.off if not field or budget is None else getattr(budget, field)
        return self.base.get(name)

    def _without(self, name: str) -> Scalar:
        knob = LIVE.get(name)
        return self.base.get(name, knob.off if knob else None)


def problem_of(profile: Profile, *, default_chunk: int | None, live: bool) -> Problem:
    """What a search of this profile is asked. ProfileError for values that a knob does not take.

    `default_chunk` is what vLLM is expected to take as chunk size (see `expected_chunk`); `live` says whether settings
    can be switched within a start. A space of more than LISTED combinations has groups without settings: those are
    proposed one by one.
    """
    space = search_space(profile)
    rules = SettingRules(profile.engine.args, default_chunk)
    found: dict[str, Setting] = {}
    refused: dict[str, tuple[Setting, str, str]] = {}
    listed = space.size <= LISTED
    for setting in _combinations(space, listed=listed):
        reduced = rules.reduced(setting)
        violation = rules.refusal(reduced) if listed else None
        if violation is not None:
            refused[reduced.key] = (reduced, violation.code, violation.message)
        else:
            found[reduced.key] = reduced
    return Problem(
        base_args=profile.engine.args,
        groups=_groups(list(found.values()), listed=listed),
        objective=profile.objective,
        constraints=tuple(profile.constraints),
        rounds=profile.rounds,
        references=_references(profile, rules, list(found.values()), live=live),
        live=live,
        refine=profile.space.refine,
        chunk_unit=declared_block_size(profile),
        max_settings=profile.budget.trials,
        time_s=profile.budget.time or None,
        default_chunk=default_chunk,
        infeasible=tuple(refused.values()),
    )


def expected_chunk(profile: Profile, fingerprint: Fingerprint, sim: str | None = None) -> int | None:
    """The chunk size that `vllm serve` takes on this machine when it is not told any (vLLM 0.32, `arg_utils.py`).

    `sim` is what the simulated engine is told to pretend, as JSON.
    """
    args = profile.engine.args
    tp, pp = args.get("tensor_parallel_size", 1), args.get("pipeline_parallel_size", 1)
    if fingerprint.engine == "sim":
        gpu = str((json.loads(sim) if sim else {}).get("gpu", profile.hardware.gpu))
        chunk = 2048 if gpu.startswith(("a100", "l40", "a10", "l4")) else 8192
    elif not fingerprint.gpus:
        chunk = 2048 * (tp if isinstance(tp, int) else 1) * (pp if isinstance(pp, int) else 1)
    else:
        memory = fingerprint.gpus[0].get("memory_bytes") or 0
        a100 = "a100" in str(fingerprint.gpus[0].get("name", "")).lower()
        chunk = 16384 if memory >= 160 * _GIB else 8192 if memory >= 70 * _GIB and not a100 else 2048
    if args.get("performance_mode") == "throughput":
        chunk *= 2
    length, seqs = args.get("max_model_len"), args.get("max_num_seqs")
    if not isinstance(length, int) or length < 1:
        return chunk if args.get(CHUNKING_KNOB) is not False else None
    if args.get(CHUNKING_KNOB) is False:
        chunk = max(chunk, length)
    return min(chunk, seqs * length) if isinstance(seqs, int) and fingerprint.engine == "vllm" else chunk


def _combinations(space: SearchSpace, *, listed: bool) -> Iterator[Setting]:
    """Every combination; of a space too large to list, those of its boot knobs."""
    if not listed:
        space = SearchSpace(tuple(d for d in space.dimensions if not is_live(d.name)))
        if space.size > MOST_GROUPS:
            raise ProfileError(
                f"space: its options that need a start of their own have {space.size:,} combinations, and at most "
                f"{MOST_GROUPS} are measured in a space this large",
                "Give fewer values to " + ", ".join(d.name for d in space.dimensions) + ".",
            )
    yield from (setting_of(values) for values in space.combinations())


def _groups(settings: list[Setting], *, listed: bool) -> tuple[Group, ...]:
    """By boot knobs, the group that stock is in first."""
    boots: dict[str, dict[str, Scalar]] = {Setting().key: {}}
    members: dict[str, list[Setting]] = {Setting().key: []}
    for setting in settings:
        boot = {name: value for name, value in setting.knobs.items() if not is_live(name)}
        key = Setting(knobs=boot).key
        boots.setdefault(key, boot)
        if listed and not setting.is_stock:
            members.setdefault(key, []).append(setting)
        else:
            members.setdefault(key, [])
    return tuple(Group(boots[key], tuple(members[key])) for key in boots)


def _references(profile: Profile, rules: SettingRules, settings: list[Setting], *, live: bool) -> tuple[Setting, ...]:
    """`no_chunking`, where the model length is known and no longer than the largest chunk that is measured anyway.

    Without chunking vLLM wants the longest prompt to fit into one step.
    """
    length = profile.engine.args.get("max_model_len")
    if "no_chunking" not in profile.references or not isinstance(length, int) or length < 1:
        return ()
    largest = max((c for c in [rules.stock_chunk, *map(rules.chunk, settings)] if c is not None), default=0)
    if live and length > largest:
        return ()
    reference = Setting(knobs={CHUNKING_KNOB: False, CHUNK_KNOB: max(length, rules.stock_chunk or 0)})
    return () if rules.refusal(reference) else (reference,)


def _reduced_budget(budget: ReuseBudget | None) -> ReuseBudget | None:
    if budget is None or budget.off:
        return None
    if budget.min_reuse_ratio:
        return budget
    return ReuseBudget(**budget.model_dump(exclude={"max_hold_ms", "yield_chunk_tokens"}))


def _same(one: Scalar, other: Scalar) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _is_number(value: Scalar) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at_least(value: Scalar, limit: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= limit
