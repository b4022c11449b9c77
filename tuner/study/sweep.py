"""The main job: baseline, references, candidates, finals, winner. Everything measured is on disk at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import optuna

from tuner.clock import Clock
from tuner.domain.setting import CHUNK_KNOB, Setting
from tuner.domain.measurement import metric
from tuner.domain.experiment import Diagnosis, Role, StudyFile, Summary, Trial
from tuner.domain.profile import Profile
from tuner.engine.leftovers import end_leftovers
from tuner.engine.policy import policy, stopped_by
from tuner.engine.rules import static_rule_violation
from tuner.errors import EngineError, NoVerdict, UsageError
from tuner.files import renew_json, write_json
from tuner.freeze import control_of, freeze_trial, repeats_of
from tuner.space.alignment import is_aligned
from tuner.space.search_space import declared_block_size, search_space
from tuner.study import finals as final
from tuner.study.ahead import standing, trials_ahead
from tuner.study.choice import candidate_of, label_of, winner
from tuner.study.opening import exclusive, open_or_create, study_path
from tuner.study.references import reference_candidates
from tuner.study.search import Search, Suggestion, open_study, settle_leftovers
from tuner.study.storage import open_storage
from tuner.study.summary import build_summary
from tuner.experiment.store import StudyDirectory, earlier_s
from tuner.experiment.checks import check_before_start
from tuner.experiment.fingerprint import take_fingerprint
from tuner.experiment.choice import EngineChoice
from tuner.trial.progress import Progress
from tuner.trial.run import UNDER_WAY, TrialPlan, run_trial
from tuner.experiment.session import SessionConfig

SHARED_CAUSE_AFTER = 3
"""The baseline and the first two candidates failing alike is no candidate's fault."""


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


@dataclass(frozen=True)
class SweepResult:
    """Where it is and what came out; `error` decides the exit code when there is no winner."""

    directory: StudyDirectory
    study: StudyFile
    summary: Summary
    trials: list[Trial]
    error: Exception | None = None


async def sweep(request: SweepRequest, clock: Clock, progress: Progress) -> SweepResult:
    """Run or continue a study. On cancellation the summary of what is there is written, then it goes on up."""
    began_s = clock.monotonic_s()
    path = study_path(request.out, request.name, fresh=request.fresh)
    with exclusive(path) as directory:
        for sentence in await end_leftovers(directory.record_dir):
            progress.message(sentence)
        fingerprint = await take_fingerprint(request.choice, request.profile)
        await check_before_start(request.profile, request.choice)
        study_file, continued = open_or_create(
            directory,
            request.profile,
            fingerprint,
            name=path.name,
            seed=request.seed,
            sampler="TPESampler",
            clock=clock,
        )
        storage = open_storage(directory.journal_file, request.storage_url)
        optuna_study = open_study(storage, path.name, request.profile, request.seed)
        trials = directory.trials()
        search = Search(optuna_study, search_space(request.profile), request.profile, _tried(trials))
        run = _Sweep(request, directory, study_file, optuna_study, clock, progress, trials, search, began_s)
        if continued:
            run.settle()
        return await run.run()


_OTHER_OBJECTIVE = "Optimize another metric (docs/metrics.md says where each comes from), or a load that has this one."


class StudyStopped(Exception):
    """The study cannot go on: the cause, and whether the profile is at fault."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(diagnosis.message)
        self.diagnosis = diagnosis


@dataclass
class _Sweep:
    request: SweepRequest
    directory: StudyDirectory
    study_file: StudyFile
    optuna_study: optuna.Study
    clock: Clock
    progress: Progress
    trials: list[Trial]
    search: Search
    began_s: float
    block_size: int | None = None
    earlier: list[Trial] = field(init=False)
    """What earlier runs of the study measured."""
    earlier_s: float = field(init=False)
    found: int = field(init=False)
    """Trials that were there before this run, whatever became of them."""
    made: int = 0
    """Trials of this run that have an outcome."""
    smallest_chunk: int = 0
    """A bound that an engine's refusal named; smaller candidates are not launched."""

    def __post_init__(self) -> None:
        self.earlier = standing(self.trials)
        self.earlier_s = earlier_s(self.directory, self.trials)
        self.found = len(self.trials)

    @property
    def profile(self) -> Profile:
        return self.request.profile

    def settle(self) -> None:
        """Close what a killed run left open, and say what was lost."""
        settle_leftovers(self.optuna_study, self.trials, self.profile)
        for index, trial in enumerate(self.trials):
            if trial.state == "interrupted" and trial.message == UNDER_WAY:
                lost = trial.model_copy(update={"message": "the run was killed during this trial"})
                self.directory.write_trial(lost)
                self.trials[index] = lost
                comes_again = trial.role != "candidate" or self.search.sampler == "grid"
                then = "its configuration is measured again" if comes_again else "it does not count"
                self.progress.message(
                    f"trial {trial.number}, {trial.label}, was lost when the last run was killed; {then}"
                )

    def done(self, role: Role) -> list[Trial]:
        return standing(self.trials, role)

    async def run(self) -> SweepResult:
        error: Exception | None = None
        try:
            self.progress.study_started(self._total(), self.earlier)
            await self._baseline()
            await self._references()
            await self._candidates()
            await self._finals()
            if not self.made:
                self.progress.message("nothing was left to measure", routine=True)
        except StudyStopped as stopped:
            error = stopped_by(stopped.diagnosis)
        except NoVerdict as unanswerable:
            error = unanswerable
        finally:
            result = self._finish()
        return SweepResult(result.directory, result.study, result.summary, result.trials, error or result.error)

    def _total(self, repeated: Trial | None = None) -> int:
        """Trials of the study, as far as is known; `repeated` is made once more."""
        candidates_left = 0 if self._out_of_time() else self.search.left
        if repeated is not None and repeated.role == "candidate":
            candidates_left += 1
        ahead = trials_ahead([t for t in self.trials if t is not repeated], self.profile, candidates_left)
        return len(self.earlier) + self.made + ahead

    def _out_of_time(self) -> bool:
        budget_s = self.profile.budget.time
        return bool(budget_s) and self.clock.monotonic_s() >= self.began_s + (budget_s or 0.0)

    async def _baseline(self) -> None:
        existing = self.done("baseline")
        trial = existing[0] if existing else await self._attempt("baseline", "stock", Setting(knobs={}))
        self._learn(trial)
        missing = unmeasured_objective([trial], self.profile)
        if missing:
            # Hours of candidates would end without an answer.
            raise NoVerdict(missing, _OTHER_OBJECTIVE)

    async def _references(self) -> None:
        done = {t.label for t in self.done("reference")}
        for label, candidate in reference_candidates(self.profile):
            if label not in done:
                await self._attempt("reference", label, candidate)

    async def _candidates(self) -> None:
        while True:
            if self._out_of_time():
                if self.search.left:
                    self.progress.message("the time budget is used up; going to the finals", routine=True)
                return
            suggestion = self.search.next()
            if suggestion is None:
                return
            await self._candidate(suggestion)

    async def _candidate(self, suggestion: Suggestion) -> None:
        label = label_of(suggestion.candidate)
        refused = self._refused_before_launch(suggestion.candidate)
        if refused is not None:
            trial = self._record_refused(suggestion.candidate, label, refused)
            self.search.tell(suggestion, trial)
            return
        suggestion.trial.set_user_attr("trial", self._next_number())
        trial = await self._attempt("candidate", label, suggestion.candidate)
        self.search.tell(suggestion, trial)

    async def _finals(self) -> None:
        baseline = next(iter(self.done("baseline")), None)
        candidates = [t for t in self.trials if t.role == "candidate"]
        runs = final.plan_finals(baseline, candidates, self.profile)
        self.progress.replanned(self._total())
        for run in final.missing(runs, self.done("final")):
            await self._attempt("final", run.label, run.candidate, rounds=run.rounds, final_of=run.of)

    def _refused_before_launch(self, candidate: Setting) -> Diagnosis | None:
        args = candidate.engine_args(self.profile.engine.args)
        chunk = candidate.knobs.get(CHUNK_KNOB)
        if isinstance(chunk, int):
            if self.block_size is not None and not is_aligned(chunk, self.block_size):
                return Diagnosis(
                    code="block_size",
                    message=f"chunk {chunk} is no multiple of the engine's KV block of {self.block_size} tokens",
                )
            if chunk < self.smallest_chunk:
                return Diagnosis(
                    code="block_size", message=f"the engine takes no chunk below {self.smallest_chunk} for this model"
                )
        return static_rule_violation(args, self.block_size or declared_block_size(self.profile))

    def _record_refused(self, candidate: Setting, label: str, diagnosis: Diagnosis) -> Trial:
        number = self._next_number()
        trial = Trial(
            number=number,
            role="candidate",
            label=label,
            state="infeasible",
            cause=diagnosis.code,
            message=diagnosis.message,
            hint=diagnosis.hint or None,
            simulated=self.request.choice.simulated,
            engine_args=candidate.engine_args(self.profile.engine.args),
            knobs=candidate.knobs,
            reuse_budget=candidate.effective_budget,
            started_at=self.clock.now().isoformat(timespec="seconds"),
        )
        self.directory.write_trial(trial)
        self._keep(trial)
        return trial

    async def _attempt(
        self, role: Role, label: str, candidate: Setting, *, rounds: int | None = None, final_of: int | None = None
    ) -> Trial:
        """One trial, once more when the environment failed it; StudyStopped when the study cannot go on."""
        trial = await self._once(role, label, candidate, rounds, final_of, may_repeat=True)
        if trial.state in ("completed", "infeasible"):
            return trial
        if _environment_failed(trial):
            self.progress.message(f"trial {trial.number}: {trial.message}; once more on a fresh start")
            trial = await self._once(role, label, candidate, rounds, final_of, may_repeat=False)
            if trial.state == "engine_failed":
                raise StudyStopped(_diagnosis_of(trial))
        elif policy(trial.cause or "unknown") == "fatal" or self._all_fail_alike():
            raise StudyStopped(_diagnosis_of(trial))
        return trial

    async def _once(
        self,
        role: Role,
        label: str,
        candidate: Setting,
        rounds: int | None,
        final_of: int | None,
        *,
        may_repeat: bool,
    ) -> Trial:
        number = self._next_number()
        self.progress.trial_started(number, label)
        config = SessionConfig.of_profile(
            self.profile,
            self.request.choice,
            args=candidate.engine_args(self.profile.engine.args),
            reuse_budget=candidate.effective_budget,
            seed=self.request.seed,
            log_path=self.directory.engine_log(number),
            record_dir=self.directory.record_dir,
        )
        plan = TrialPlan(number, role, label, candidate, config, rounds or self.profile.rounds, final_of)
        try:
            trial = await run_trial(plan, self.directory, self.clock, self.progress)
        except asyncio.CancelledError:
            self.trials.append(self.directory.trial(number))
            raise
        self._keep(trial, repeated=may_repeat and _environment_failed(trial))
        self._learn(trial)
        return trial

    def _keep(self, trial: Trial, *, repeated: bool = False) -> None:
        self.trials.append(trial)
        self.made += 1
        self.progress.replanned(self._total(trial if repeated else None))
        self.progress.trial_finished(trial)

    def _learn(self, trial: Trial) -> None:
        """What one start teaches about all: the block size, the model's revision, the chunk it takes at least."""
        block = (trial.effective_args or {}).get("block_size")
        if isinstance(block, int) and not isinstance(block, bool):
            self.block_size = block
        known = self.study_file.fingerprint
        if trial.model_revision is not None and known.model_revision is None:
            seen = known.model_copy(update={"model_revision": trial.model_revision})
            self.study_file = self.study_file.model_copy(update={"fingerprint": seen})
            write_json(self.directory.study_file, self.study_file.to_json())
        if trial.bound is not None:
            self.smallest_chunk = max(self.smallest_chunk, trial.bound)

    def _all_fail_alike(self) -> bool:
        tried = [t for t in self.trials if t.role in ("baseline", "candidate") and t.state != "interrupted"]
        first = tried[:SHARED_CAUSE_AFTER]
        causes = {t.cause for t in first}
        return len(first) == SHARED_CAUSE_AFTER and len(causes) == 1 and None not in causes

    def _next_number(self) -> int:
        return max(self.directory.numbers(), default=-1) + 1

    def _finish(self) -> SweepResult:
        """Choose, summarize and write, also when the study was stopped or interrupted.

        UsageError when the study's folder was taken away meanwhile.
        """
        if not self.directory.study_file.is_file():
            raise UsageError(
                f"{self.directory.path} was removed or replaced while the sweep ran: what was measured is gone",
                "Remove what is left of it, then run the same command again.",
            )
        finals = [t for t in self.trials if t.role == "final" and t.state == "completed"]
        merged = final.merged(self.directory, finals, self.profile)
        stock = next((t for t in merged if t.final_of is not None and self._role_of(t.final_of) == "baseline"), None)
        own = [t for t in merged if t is not stock]
        beats = final.beats_beyond_noise(self.directory, self.profile, finals)
        best = winner(own, self.profile.objective, beats=beats, stock=stock)
        summary = build_summary(
            self.directory,
            self.study_file,
            self.profile,
            self.trials,
            merged=merged,
            best=best,
            # A run that measured nothing leaves no trace, its seconds included.
            elapsed_s=self.clock.monotonic_s() - self.began_s if len(self.trials) > self.found else 0.0,
            earlier_s=self.earlier_s,
        )
        renew_json(self.directory.summary_file, summary.to_json())
        if best is not None:
            frozen = freeze_trial(
                best,
                repeats_of(best, finals),
                self.study_file,
                self.profile,
                control=control_of(self.trials),
                counts=summary.counts,
                now=self.clock.now(),
            )
            renew_json(self.directory.frozen_file, frozen.to_json(), but=("created_at", "chunktune_version"))
        return SweepResult(self.directory, self.study_file, summary, self.trials, self._verdict(best is not None))

    def _role_of(self, number: int) -> Role | None:
        return next((t.role for t in self.trials if t.number == number), None)

    def _verdict(self, won: bool) -> Exception | None:
        if won:
            return None
        candidates = [t for t in self.trials if t.role == "candidate"]
        if not any(t.state == "completed" for t in self.trials):
            causes = sorted({f"{t.cause}: {t.message}" for t in self.trials if t.cause})
            first = next((t for t in self.trials if t.cause), None)
            return EngineError(
                Diagnosis(
                    code=(first.cause if first else None) or "unknown",
                    message="no trial completed" + (": " + "; ".join(causes) if causes else ""),
                    hint=f"The engine logs are below {self.directory.path / 'trials'}.",
                )
            )
        missing = unmeasured_objective(self.trials, self.profile)
        if missing:
            return NoVerdict(missing, _OTHER_OBJECTIVE)
        violated = sorted({v.split(":")[0] for t in candidates for v in t.violations})
        reason = f"; violated: {', '.join(violated)}" if violated else ""
        return NoVerdict(
            f"no candidate completed and meets the constraints{reason}",
            f"See {self.directory.summary_file}; relax a limit or widen the space.",
        )


def unmeasured_objective(trials: Sequence[Trial], profile: Profile) -> str:
    """Which metric of the objective no completed trial has, and why; '' where each was measured, or none completed."""
    medians = [t.median for t in trials if t.state == "completed" and t.median is not None]
    for path in profile.objective.metrics if medians else ():
        if all(metric(median, path) is None for median in medians):
            reason = medians[0].unmeasured.get(path.partition(".")[0])
            return f"{path}, which the profile optimizes, is not measured{f': {reason}' if reason else ''}"
    return ""


def _tried(trials: list[Trial]) -> list[Setting]:
    """Candidates that have an outcome; interrupted ones and failures of the environment come again."""
    return [candidate_of(t) for t in standing(trials, "candidate")]


def _environment_failed(trial: Trial) -> bool:
    """Whether the trial failed for what is around it, so that another start may succeed."""
    if trial.state in ("completed", "infeasible"):
        return False
    return policy(trial.cause or "unknown") == "environment" or trial.cause == "client_limited"


def _diagnosis_of(trial: Trial) -> Diagnosis:
    return Diagnosis(code=trial.cause or "unknown", message=trial.message or "", hint=trial.hint or "")
