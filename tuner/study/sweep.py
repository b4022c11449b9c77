"""The main job: open or continue a study, measure what its design asks for, decide, freeze."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.clock import Clock
from tuner.domain.experiment import (
    Diagnosis,
    Fingerprint,
    Results,
    Start,
    StudyFile,
    StudySummary,
)
from tuner.domain.profile import Profile
from tuner.domain.units import counted
from tuner.engine.diagnosis import cause
from tuner.engine.leftovers import end_leftovers
from tuner.engine.policy import stopped_by
from tuner.errors import EngineError, NoVerdict, ProfileError, UsageError
from tuner.experiment.checks import check_before_start
from tuner.experiment.choice import EngineChoice
from tuner.experiment.design import StartPlan, StudyStopped
from tuner.experiment.events import Events
from tuner.experiment.fingerprint import take_fingerprint
from tuner.experiment.runner import run
from tuner.experiment.session import OpenSession, Session, engine_opener
from tuner.experiment.store import Store
from tuner.files import renew_json, write_json
from tuner.freeze import evidence_of, freeze_setting
from tuner.scheduler.handles import supports_budget, supports_live
from tuner.space.search_space import search_space
from tuner.study.design import SweepDesign
from tuner.study.expected import Pace, assumed, history
from tuner.study.opening import check_continuable, exclusive, open_or_create, study_path
from tuner.study.problem import Problem
from tuner.study.record import Record
from tuner.study.settings import LISTED, expected_chunk, problem_of
from tuner.study.storage import RETRY_FOR_S, StorageAddress, StorageAway, given_up
from tuner.study.summary import build_summary
from tuner.study.verdict import Decision, decide
from tuner.study.watch import Answerable, Watcher, unmeasured_objective

_OTHER_OBJECTIVE = "Optimize another metric (docs/metrics.md says where each comes from), or a load that has this one."


@dataclass(frozen=True)
class SweepRequest:
    """A sweep as it was asked for."""

    profile: Profile
    choice: EngineChoice
    out: Path
    name: str
    seed: int = 0
    fresh: bool = False
    storage_url: str | None = None
    live: bool = True
    """False: a start for each setting, although they could be switched."""


@dataclass(frozen=True)
class Prepared:
    """A request with what the machine says to it."""

    request: SweepRequest
    fingerprint: Fingerprint
    problem: Problem
    not_live: str
    """Why settings cannot be switched within a start; empty when they can."""
    load: str
    """What a load that comes from a file amounts to: its rate, lengths and sharing; '' for others."""
    pace: Pace
    """What starts and rounds take, before this study has measured any."""
    took_s: float
    """To prepare."""

    @property
    def path(self) -> Path:
        return study_path(self.request.out, self.request.name, fresh=self.request.fresh)

    @property
    def first_line(self) -> str:
        """Which engine and why, and what it costs when settings cannot be switched."""
        said = self.request.choice.sentence
        if not self.not_live:
            return said
        settings = 1 + len(self.problem.references) + sum(len(g.settings) for g in self.problem.groups)
        starts = counted(min(settings, self.problem.max_settings), "start")
        return (
            f"{said}; settings cannot be switched within an engine start ({self.not_live}): the search makes about "
            f"{starts} in place of {len(self.problem.groups)}, the finals three of each setting in place of three"
        )

    @property
    def design(self) -> dict[str, Any]:
        """What study.json says of how settings are chosen, beside the sampler."""
        p = self.problem
        return {"live": p.live, "rounds": p.rounds, "refine": p.refine, "max_settings": p.max_settings}


@dataclass(frozen=True)
class SweepResult:
    """Where it is and what came out; `error` decides the exit code."""

    store: Store
    study: StudyFile
    summary: StudySummary
    error: Exception | None = None


async def prepare(request: SweepRequest, clock: Clock) -> Prepared:
    """Ask the engine's command and the machine; ProfileError and UsageError for what a sweep refuses before a start."""
    began_s = clock.monotonic_s()
    profile, choice = request.profile, request.choice
    fingerprint = await take_fingerprint(choice, profile)
    not_live = "" if request.live else "--no-live"
    if not not_live and fingerprint.engine == "vllm":
        not_live = supports_live(fingerprint.vllm_version)
    if fingerprint.engine == "vllm":
        _refuse_budget(profile, fingerprint.vllm_version)
    chunk = expected_chunk(profile, fingerprint, choice.env.get("CHUNKTUNE_SIM"))
    problem = replace(problem_of(profile, default_chunk=chunk, live=not not_live), seed=request.seed)
    _refuse_empty(problem, profile)
    load = await check_before_start(profile, choice)
    pace = history(request.out, profile, fingerprint) or assumed(profile, simulated=choice.simulated)
    return Prepared(request, fingerprint, problem, not_live, load, pace, clock.monotonic_s() - began_s)


def _refuse_empty(problem: Problem, profile: Profile) -> None:
    """ProfileError where the space holds nothing that differs from stock and can be started."""
    proposed = search_space(profile).size > LISTED
    if proposed or any(g.settings for g in problem.groups) or len(problem.groups) > 1:
        return
    if problem.infeasible:
        setting, _, sentence = problem.infeasible[0]
        raise ProfileError(
            f"space: no setting of it can be measured; {setting.label}: {sentence}",
            "Change the values in the space, or the option that the message names.",
        )
    raise ProfileError("space: every setting of it is what stock runs anyway", "Give it other values to measure.")


def _refuse_budget(profile: Profile, version: str | None) -> None:
    """EngineError where the space has reuse budgets that this vLLM cannot serve: known before the first start."""
    reason = supports_budget(version) if profile.space.reuse_budget else ""
    if reason:
        raise EngineError(cause("plugin_failed", f"the reuse budget cannot run here: {reason}"))


async def sweep(
    prepared: Prepared, clock: Clock, events: Events, *, open_session: OpenSession | None = None
) -> SweepResult:
    """Run or continue a study. On cancellation the summary of what is there is written, then it goes on up.

    `open_session` takes the place of the engines that the request asks for.
    """
    began_s = clock.monotonic_s() - prepared.took_s
    request, problem = prepared.request, prepared.problem
    with exclusive(prepared.path) as store:
        for sentence in await end_leftovers(store.record_dir):
            events.message(sentence)
        check_continuable(store, request.profile, prepared.fingerprint, prepared.design, seed=request.seed)
        lost, results = store.settle(), store.results()
        record = Record(
            StorageAddress(store.journal_file, request.storage_url),
            store.path.name,
            request.profile,
            problem,
            results,
            seed=request.seed,
            clock=clock,
            say=events.message,
        )
        await _open(record)
        of_the_design = {**prepared.design, "sampler": record.sampler}
        study = open_or_create(
            store, request.profile, prepared.fingerprint, of_the_design, seed=request.seed, clock=clock
        )
        _say_what_is_known(prepared, lost, results, events)
        design = SweepDesign(problem, record)
        watcher = Watcher(events, record, design, prepared.pace, results, clock, began_s)
        return await _Sweep(prepared, store, study, record, design, watcher, clock, open_session).measure(results)


async def _open(record: Record) -> None:
    try:
        await record.open()
    except StorageAway as away:
        raise given_up(away, before_start=True) from None


def _say_what_is_known(prepared: Prepared, lost: list[Start], results: Results, events: Events) -> None:
    if prepared.load:
        events.message(prepared.load, routine=True)
    for start in lost:
        kept = counted(len(results.kept(starts=[start.number])), "round")
        events.message(f"start {start.number}, {start.label}: {start.message}; its {kept} measured until then stay")
    if results.starts:
        rounds, starts = counted(len(results.kept()), "round"), counted(len(results.starts), "start")
        events.message(f"continuing: {rounds} on {starts} were measured earlier", routine=True)
    if "no_chunking" in prepared.request.profile.references and not prepared.problem.references:
        events.message(
            "no_chunking is left out: its chunk has to be max_model_len, which is not set, or is larger than every "
            "other chunk size",
            routine=True,
        )


@dataclass
class _Sweep:
    """One run of a study whose folder is locked."""

    prepared: Prepared
    store: Store
    study: StudyFile
    record: Record
    design: SweepDesign
    watcher: Watcher
    clock: Clock
    open_session: OpenSession | None
    storage_away: bool = False

    async def measure(self, before: Results) -> SweepResult:
        watcher = self.watcher
        error: Exception | None = None
        try:
            watcher.tell_expected()
            design = Answerable(self.design, self.prepared.problem)
            results = await run(design, self.store, self._opener(), self.clock, watcher)
            results.elapsed_s = watcher.elapsed_s
        except StudyStopped as stopped:
            error = stopped_by(_diagnosis(stopped.start))
            results = self._results()
        except OSError:
            if self.store.study_file.is_file():
                raise
            raise self._gone() from None
        except asyncio.CancelledError:
            results = self._results()
            self._write(results)
            await self._save_in_passing(results, patient=False)
            raise
        if len(results.starts) == len(before.starts):
            # A run that measured nothing leaves no trace, its seconds included.
            results = replace(results, elapsed_s=before.elapsed_s)
            self.watcher.message("nothing was left to measure", routine=True)
        return await self._finish(results, error)

    def _gone(self) -> UsageError:
        return UsageError(
            f"{self.store.path} was removed or replaced while the sweep ran: what was measured is gone",
            "Remove what is left of it, then run the same command again.",
        )

    def _results(self) -> Results:
        return replace(self.store.results(), elapsed_s=self.watcher.elapsed_s)

    def _opener(self) -> OpenSession:
        """Engines, each after the record was brought up to date."""
        request = self.prepared.request
        open_engine = self.open_session or engine_opener(
            request.profile,
            request.choice,
            seed=request.seed,
            log_path=self.store.engine_log,
            record_dir=self.store.record_dir,
            clock=self.clock,
            events=self.watcher,
        )

        @asynccontextmanager
        async def open_session(plan: StartPlan, number: int) -> AsyncIterator[Session]:
            await self._save_in_passing(self.watcher.results)
            async with open_engine(plan, number) as session:
                yield session

        return open_session

    async def _save_in_passing(self, results: Results, *, patient: bool = True) -> None:
        """Bring the record up to date; a storage that stays away is waited for once a run, and stops nothing."""
        self.record.settle(self.design.states(results), finished=False)
        try:
            await self.record.save(retry_for_s=RETRY_FOR_S if patient and not self.storage_away else 0.0)
            self.storage_away = False
        except StorageAway as away:
            if not self.storage_away:
                self.watcher.message(f"{away}; measuring goes on, and the storage is brought up to date later")
            self.storage_away = True

    async def _finish(self, results: Results, error: Exception | None) -> SweepResult:
        summary = self._write(results)
        if error is None:
            error = self._no_answer(results, summary)
        self.record.settle(self.design.states(results), finished=error is None or isinstance(error, NoVerdict))
        try:
            await self.record.save()
        except StorageAway as away:
            error = error or given_up(away, before_start=False)
        return SweepResult(self.store, self.study, summary, error)

    def _write(self, results: Results) -> StudySummary:
        """Decide and write, also when the study was stopped or interrupted.

        UsageError when the study's folder was taken away meanwhile.
        """
        if not self.store.study_file.is_file():
            raise self._gone()
        problem, profile = self.prepared.problem, self.prepared.request.profile
        self._learn_revision(results)
        decision = decide(problem, results, self.record)
        states = self.design.states(results)
        summary = build_summary(
            self.study, profile, problem, results, decision, states=states, settings=self.record.settings()
        )
        renew_json(self.store.summary_file, summary.to_json())
        self._freeze(results, decision, summary)
        return summary

    def _freeze(self, results: Results, decision: Decision, summary: StudySummary) -> None:
        if decision.winner is None or decision.setting is None or decision.verdict == "none":
            # One of an earlier run would disagree with the summary.
            self.store.frozen_file.unlink(missing_ok=True)
            return
        evidence = evidence_of(results, decision.winner)
        frozen = freeze_setting(
            verdict=decision.verdict,
            setting_id=decision.winner,
            setting=decision.setting,
            starts=evidence.starts,
            stock=evidence.stock,
            study=self.study,
            profile=self.prepared.request.profile,
            sampler=self.record.sampler,
            counts=summary.counts,
            now=self.clock.now(),
            literal=evidence.literal,
        )
        renew_json(self.store.frozen_file, frozen.to_json(), but=("created_at", "chunktune_version"))

    def _learn_revision(self, results: Results) -> None:
        """The model's revision, which only an engine tells."""
        known = self.study.fingerprint
        revision = next((s.model_revision for s in results.starts if s.model_revision), None)
        if revision is not None and known.model_revision is None:
            seen = known.model_copy(update={"model_revision": revision})
            self.study = self.study.model_copy(update={"fingerprint": seen})
            write_json(self.store.study_file, self.study.to_json())

    def _no_answer(self, results: Results, summary: StudySummary) -> Exception | None:
        if not any(start.state == "completed" for start in results.starts):
            causes = sorted({f"{s.cause}: {s.message}" for s in results.starts if s.cause})
            first = next((s.cause for s in results.starts if s.cause), None) or "unknown"
            message = "no engine start completed" + (": " + "; ".join(causes) if causes else "")
            hint = f"The engine logs are below {self.store.path / 'starts'}."
            return EngineError(Diagnosis(code=first, message=message, hint=hint))
        missing = unmeasured_objective(results, self.prepared.problem)
        if missing:
            return NoVerdict(missing, _OTHER_OBJECTIVE)
        if summary.verdict == "none":
            return NoVerdict(summary.sentence, f"See {self.store.summary_file}; relax a limit or widen the space.")
        return None


def _diagnosis(start: Start) -> Diagnosis:
    message = start.message or "no round that counts was measured, or rounds.jsonl is gone"
    return Diagnosis(code=start.cause or "unknown", message=message, hint=start.hint or "Start over with --fresh.")
