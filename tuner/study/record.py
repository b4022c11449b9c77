"""The study in Optuna's words: each setting is a trial, and where the space is too large a sampler proposes the next.

The record lives in memory and is brought to the storage at certain moments, so that a locked or vanished storage never
stands in the way of a measurement. Only this, storage.py and importance.py know Optuna.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from tuner.clock import Clock
from tuner.domain.experiment import STOCK_ID, Results, Round, SettingId, SettingState
from tuner.domain.measurement import Measurement, metric
from tuner.domain.profile import Profile
from tuner.domain.setting import CHUNK_KNOB, Scalar, Setting
from tuner.errors import UsageError
from tuner.space.knobs import is_live
from tuner.space.search_space import Dimension, SearchSpace, search_space, setting_of
from tuner.study.problem import Group, Problem
from tuner.study.settings import LISTED, SettingRules
from tuner.study.storage import RETRY_FOR_S, StorageAddress, opened, patiently

ENUMERATION: Final = "enumeration"
_SETTING_ATTR = "setting"
_STARTUP = 8
_ASKS = 64
_STARTS = "starts"
"""Constraint that a setting violates when the engine refuses it."""


@dataclass
class _Entry:
    """One trial; `rounds` are its kept rounds by cycle."""

    setting: Setting | None
    """None: a number whose setting nobody knows any more."""
    state: SettingState | None = None
    """None: still in question."""
    cause: str = ""
    reference: bool = False
    rounds: dict[int, list[Measurement]] = field(default_factory=dict)


class Record:
    """Optuna's study of a sweep; a `Registry` for its design."""

    def __init__(
        self,
        address: StorageAddress,
        name: str,
        profile: Profile,
        problem: Problem,
        results: Results,
        *,
        seed: int,
        clock: Clock,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._address = address
        self._name = name
        self._problem = problem
        self._space = search_space(profile)
        self._rules = SettingRules(problem.base_args, problem.default_chunk)
        self._results = results
        self._seed = seed
        self._clock = clock
        self._say = say
        self._entries: list[_Entry] = []
        self._number_of: dict[str, int] = {}
        self._writing = threading.Lock()

    async def open(self) -> None:
        """Take up what the storage and the rounds on disk say. StorageAway, UsageError: see storage.py."""
        known = await patiently(self._read, self._address, self._clock, wait_for_missing=False, say=self._say)
        for number, setting in sorted({**known, **_defined(self._results)}.items()):
            self._add(number, setting)
        for row in self._results.rounds:
            self.note(row)

    async def save(self, *, retry_for_s: float = RETRY_FOR_S) -> None:
        """Bring the storage up to date. StorageAway when it stays locked or unreachable."""
        await patiently(self._write, self._address, self._clock, retry_for_s=retry_for_s, say=self._say)

    @property
    def sampler(self) -> str:
        """How settings are chosen: `enumeration`, or the name of Optuna's sampler."""
        listed = sum(len(group.settings) for group in self._problem.groups)
        sampled = self._space.size > LISTED or listed > self._problem.max_settings
        return optuna.samplers.TPESampler.__name__ if sampled else ENUMERATION

    def id_of(self, setting: Setting) -> SettingId:
        """The number of its trial, the same always; `stock` for stock. A new setting becomes a trial."""
        if setting.is_stock:
            return STOCK_ID
        number = self._number_of.get(setting.key)
        if number is None:
            number = len(self._entries)
            self._add(number, setting)
        return number

    def settings(self) -> dict[SettingId, Setting]:
        """What each id stands for, stock among them."""
        found: dict[SettingId, Setting] = {STOCK_ID: Setting()}
        return found | {number: e.setting for number, e in enumerate(self._entries) if e.setting is not None}

    def propose(self, group: Group, count: int) -> list[Setting]:
        """At most so many settings of the group that were not measured yet: those that have a trial already, then
        new ones from Optuna's sampler, which knows the values so far."""
        found = [e.setting for e in self._entries if e.setting is not None and self._waits(e, group)][:count]
        while len(found) < count:
            setting = self._sampled(group, {s.key for s in found})
            if setting is None:
                break
            found.append(setting)
        return found

    def _waits(self, entry: _Entry, group: Group) -> bool:
        setting = entry.setting
        asked = setting is not None and not entry.reference and entry.state is None and not entry.rounds
        return asked and setting is not None and _boot(setting) == group.boot

    def _sampled(self, group: Group, proposed: set[str]) -> Setting | None:
        live = SearchSpace(tuple(d for d in self._space.dimensions if is_live(d.name)))
        study = self._shadow(group, live, seed=self._seed + len(self._entries) + len(proposed))
        for _ in range(_ASKS):
            trial = study.ask(_orders(live))
            values = {d.name: d.values[trial.params[d.name]] for d in live.dimensions}
            found = self._rules.reduced(setting_of({**group.boot, **values}))
            if self._is_new(found, proposed) and self._rules.refusal(found) is None:
                return found
            study.tell(trial, state=TrialState.FAIL)
        return next((s for s in group.settings if self._is_new(s, proposed)), None)

    def _is_new(self, setting: Setting, proposed: set[str]) -> bool:
        return not setting.is_stock and setting.key not in self._number_of and setting.key not in proposed

    def note(self, row: Round) -> None:
        """A round that was measured."""
        if row.kept and isinstance(row.setting, int) and row.setting < len(self._entries):
            self._entries[row.setting].rounds.setdefault(row.cycle, []).append(row.measurement)

    def settle(self, states: Mapping[SettingId, tuple[SettingState, str]], *, finished: bool) -> None:
        """What became of settings, with the cause; the next `save` tells Optuna, and what was told once stays.

        Until the study is `finished`, those that were measured are still in question.
        """
        for name, (state, cause) in states.items():
            if isinstance(name, int) and name < len(self._entries) and (finished or state != "measured"):
                self._entries[name].state, self._entries[name].cause = state, cause

    def _add(self, number: int, setting: Setting) -> None:
        while len(self._entries) <= number:
            self._entries.append(_Entry(None))
        references = {r.key for r in self._problem.references}
        self._entries[number] = _Entry(setting, reference=setting.key in references)
        self._number_of[setting.key] = number

    # --- the storage ---

    def _read(self) -> dict[int, Setting]:
        with opened(self._address) as storage:
            try:
                study = optuna.load_study(storage=storage, study_name=self._name)
            except KeyError:
                return {}
            return {t.number: found for t in study.get_trials(deepcopy=False) if (found := _setting_in(t)) is not None}

    def _write(self) -> None:
        with self._writing, opened(self._address) as storage:
            study = self._study(storage)
            trials = study.get_trials(deepcopy=False)
            self._check_ours(trials)
            for number, entry in enumerate(self._entries):
                if number >= len(trials):
                    study.add_trial(self._as_trial(entry))
                elif not trials[number].state.is_finished():
                    self._update(storage, study, trials[number], entry)

    def _study(self, storage: optuna.storages.BaseStorage) -> optuna.Study:
        sampler = optuna.samplers.TPESampler(seed=self._seed)
        try:
            return optuna.load_study(storage=storage, study_name=self._name, sampler=sampler)
        except KeyError:
            pass
        objective = self._problem.objective
        study = optuna.create_study(
            storage=storage, study_name=self._name, sampler=sampler, directions=objective.directions
        )
        with warnings.catch_warnings():
            # The names are for optuna-dashboard only; nothing of ours depends on the experimental call.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(objective.metrics)
        return study

    def _check_ours(self, trials: list[FrozenTrial]) -> None:
        for trial in trials:
            known = self._entries[trial.number].setting if trial.number < len(self._entries) else None
            there = _setting_in(trial)
            if there is not None and (known is None or there.key != known.key):
                raise UsageError(
                    f"the Optuna study {self._name!r} in {self._address} holds trials of another sweep",
                    "Give this one another name (--study) or another --storage.",
                )

    def _as_trial(self, entry: _Entry) -> FrozenTrial:
        state, values = self._told(entry), self._values(entry)
        if entry.setting is None:
            return create_trial(state=TrialState.FAIL, user_attrs={"state": "unknown"})
        params, distributions = self._params(entry.setting)
        return create_trial(
            state=state,
            values=values if state is TrialState.COMPLETE else None,
            params=params,
            distributions=distributions,
            user_attrs=self._attributes(entry),
            intermediate_values=self._by_cycle(entry) if state.is_finished() else None,
            constraints=self._violations(entry) if state.is_finished() else None,
        )

    def _update(
        self, storage: optuna.storages.BaseStorage, study: optuna.Study, frozen: FrozenTrial, entry: _Entry
    ) -> None:
        state = self._told(entry)
        if frozen.state == TrialState.WAITING and state != TrialState.WAITING:
            storage.set_trial_state_values(frozen._trial_id, TrialState.RUNNING)
        if not state.is_finished():
            return
        trial = optuna.Trial(study, frozen._trial_id)
        for name, value in self._attributes(entry).items():
            trial.set_user_attr(name, value)
        for name, violation in self._violations(entry).items():
            if name not in frozen.constraints:
                trial.set_constraint(name, violation)
        for cycle, value in self._by_cycle(entry).items():
            if cycle not in frozen.intermediate_values:
                trial.report(value, cycle)
        study.tell(trial, values=self._values(entry) if state is TrialState.COMPLETE else None, state=state)

    def _told(self, entry: _Entry) -> TrialState:
        """The state that Optuna is told; a complete trial needs values."""
        if entry.setting is None or entry.state == "failed":
            return TrialState.FAIL
        if entry.state in ("eliminated", "infeasible"):
            return TrialState.PRUNED
        if entry.state is None:
            return TrialState.RUNNING if entry.rounds else TrialState.WAITING
        return TrialState.FAIL if self._values(entry) is None else TrialState.COMPLETE

    def _attributes(self, entry: _Entry) -> dict[str, Any]:
        setting = entry.setting or Setting()
        found: dict[str, Any] = {_SETTING_ATTR: setting.to_json(), "label": setting.label}
        found |= {"state": entry.state} if entry.state else {}
        found |= {"cause": entry.cause} if entry.cause else {}
        return found | ({"reference": True} if entry.reference else {})

    def _values(self, entry: _Entry) -> list[float] | None:
        """Medians over the kept rounds; None where an objective was never measured."""
        return _medians(entry, self._problem.objective.metrics)

    def _violations(self, entry: _Entry) -> dict[str, float]:
        if entry.state == "infeasible":
            return {_STARTS: 1.0}
        found = {}
        for constraint in self._problem.constraints:
            value = _medians(entry, [constraint.metric])
            if value is not None:
                found[str(constraint)] = constraint.excess(value[0])
        return found

    def _by_cycle(self, entry: _Entry) -> dict[int, float]:
        """The objective by cycle; Optuna takes such values of a single objective only."""
        if len(self._problem.objective.metrics) > 1:
            return {}
        path = self._problem.objective.metrics[0]
        by_cycle = {c: [v for m in found if (v := metric(m, path)) is not None] for c, found in entry.rounds.items()}
        return {cycle: median(values) for cycle, values in sorted(by_cycle.items()) if values}

    def _params(self, setting: Setting) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """Every knob of the space with the value that it has under this setting."""
        params = {d.name: self._rules.value(setting, d.name) for d in self._space.dimensions}
        defaults = {d.name: self._rules.value(Setting(), d.name) for d in self._space.dimensions}
        distributions = {d.name: _distribution(d, defaults[d.name], params[d.name]) for d in self._space.dimensions}
        return params, distributions

    # --- proposals ---

    def _shadow(self, group: Group, live: SearchSpace, seed: int) -> optuna.Study:
        """A study in memory of what is known of the group, over the order of each knob's values."""
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=sampler, directions=self._problem.objective.directions)
        orders = _orders(live)
        for entry in self._entries:
            if entry.setting is None or entry.reference or _boot(entry.setting) != group.boot:
                continue
            params = {d.name: _position(d, self._rules.value(entry.setting, d.name)) for d in live.dimensions}
            values = self._values(entry)
            state = TrialState.RUNNING if values is None else TrialState.COMPLETE
            if entry.state in ("infeasible", "failed"):
                state, values = (TrialState.PRUNED if entry.state == "infeasible" else TrialState.FAIL), None
            constraints = self._violations(entry) if state.is_finished() else None
            study.add_trial(
                create_trial(state=state, values=values, params=params, distributions=orders, constraints=constraints)
            )
        return study


def _defined(results: Results) -> dict[int, Setting]:
    return {name: setting for name, setting in results.settings() if isinstance(name, int)}


def _setting_in(trial: FrozenTrial) -> Setting | None:
    raw = trial.user_attrs.get(_SETTING_ATTR)
    return None if raw is None else Setting.model_validate(raw)


def _medians(entry: _Entry, paths: Iterable[str]) -> list[float] | None:
    rounds = [m for found in entry.rounds.values() for m in found]
    columns = [[v for m in rounds if (v := metric(m, path)) is not None] for path in paths]
    return [median(column) for column in columns] if all(columns) else None


def _boot(setting: Setting) -> dict[str, Scalar]:
    return {name: value for name, value in setting.knobs.items() if not is_live(name)}


def _orders(space: SearchSpace) -> dict[str, BaseDistribution]:
    return {d.name: IntDistribution(0, len(d.values) - 1) for d in space.dimensions}


def _position(dimension: Dimension, value: Scalar) -> int:
    """Where the value stands among the knob's; a number between two of them at the nearer one."""
    if value in dimension.values:
        return dimension.values.index(value)
    numbers = {i: v for i, v in enumerate(dimension.values) if isinstance(v, int | float)}
    if not numbers or not isinstance(value, int | float):
        return 0
    return min(numbers, key=lambda i: abs(numbers[i] - value))


def _distribution(dimension: Dimension, default: Scalar, value: Scalar) -> BaseDistribution:
    """What Optuna is told of the knob: its range where all its values are numbers, else its choices."""
    known = [*dimension.values, *([] if default is None and None not in dimension.values else [default])]
    if value not in known:
        known.append(value)
    numbers = [v for v in known if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(known):
        return CategoricalDistribution(list(dict.fromkeys(known)))
    low, high = min(numbers), max(numbers)
    if all(isinstance(v, int) for v in numbers):
        return IntDistribution(int(low), int(high), log=dimension.name == CHUNK_KNOB and low > 0)
    return FloatDistribution(low, high)
