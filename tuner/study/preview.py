"""What a sweep would launch, without launching: for `--dry-run`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tuner.domain.setting import Setting
from tuner.domain.units import counted
from tuner.engine.launch import command_line
from tuner.space.search_space import search_space
from tuner.study.choice import label_of
from tuner.study.opening import check_continuable, study_path
from tuner.study.references import reference_candidates
from tuner.study.search import planned_candidates
from tuner.study.sweep import SweepRequest
from tuner.experiment.store import StudyDirectory
from tuner.experiment.checks import check_before_start, corner
from tuner.experiment.fingerprint import take_fingerprint
from tuner.experiment.session import SessionConfig

PREVIEWED = 64
"""Candidates shown of a space that has more, or no end."""


@dataclass(frozen=True)
class Line:
    """One engine start. Port 0 stands for the free port that is taken at the start."""

    label: str
    command: list[str]


async def preview(request: SweepRequest) -> list[Line]:
    """The baseline, the references and the candidates; refused for what the sweep would refuse before its first start.

    Nothing is written.
    """
    path = study_path(request.out, request.name, fresh=request.fresh)
    fingerprint = await take_fingerprint(request.choice, request.profile)
    await check_before_start(request.profile, request.choice)
    check_continuable(StudyDirectory(path), request.profile, fingerprint, request.seed)
    return list(_lines(request, path))


def _lines(request: SweepRequest, path: Path) -> Iterator[Line]:
    profile = request.profile
    space = search_space(profile)
    directory = StudyDirectory(path)
    starts: list[tuple[str, Setting]] = [("stock", Setting(knobs={})), *reference_candidates(profile)]
    if space.size is not None:
        seen: dict[str, Setting] = {}
        for values in space.combinations():
            candidate = space.candidate(values)
            seen.setdefault(candidate.model_dump_json(), candidate)
        starts += [(label_of(c), c) for c in itertools.islice(seen.values(), PREVIEWED)]
    else:
        total = planned_candidates(space, profile)
        starts.append(
            (f"and {counted(total, 'candidate')} that the sampler picks, such as the lowest corner", corner(space))
        )
    for number, (label, candidate) in enumerate(starts):
        config = SessionConfig.of_profile(
            profile,
            request.choice,
            args=candidate.engine_args(profile.engine.args),
            reuse_budget=candidate.effective_budget,
            seed=request.seed,
            log_path=directory.engine_log(number),
            record_dir=directory.record_dir,
        )
        yield Line(label, command_line(config.launch_spec(), 0))
