"""What a sweep refuses before its first engine start; a dry run and a doctor ask the same."""

from __future__ import annotations

from pathlib import Path

from tuner.domain.profile import Profile
from tuner.domain.setting import Scalar, Setting
from tuner.engine.installed import check_options, inspect_installed
from tuner.engine.launch import command_line
from tuner.engine.policy import stopped_by
from tuner.engine.rules import static_rule_violation
from tuner.errors import EngineError
from tuner.experiment.choice import EngineChoice
from tuner.experiment.design import StartPlan
from tuner.experiment.session import engine_spec
from tuner.load.check import check_workload
from tuner.space.search_space import search_space, setting_of


async def check_before_start(profile: Profile, choice: EngineChoice) -> str:
    """Whether the load can be sent, and the engine takes the profile's options and knobs, as far as it tells without a
    start. Returns a sentence about a load that comes from a file, '' for others.

    ProfileError and UsageError name the option, the values or the lines that will not do; EngineError when the
    engine's command does not even answer.
    """
    load = check_load(profile)
    space = search_space(profile)
    _check_ours(profile, choice, setting_of(next(space.combinations())))
    installed = await inspect_installed(choice.launcher, {**choice.env, **profile.engine.env})
    args: dict[str, Scalar] = dict(profile.engine.args) | dict.fromkeys(profile.space.knobs, None)
    try:
        check_options(installed, args)
    except EngineError as error:
        raise stopped_by(error.diagnosis) from None
    violation = static_rule_violation(profile.engine.args)
    if violation is not None:
        raise stopped_by(violation)
    return load


def check_load(profile: Profile) -> str:
    """`check_workload` for a profile, whose paths are absolute."""
    limits = [c.metric for c in profile.constraints]
    return check_workload(profile.workload, Path(), [*profile.objective.metrics, *limits, *profile.regress_metrics])


def _check_ours(profile: Profile, choice: EngineChoice, setting: Setting) -> None:
    """UsageError for an option, or a knob, that is not the profile's to set."""
    plan = StartPlan("search", "", setting.engine_args(profile.engine.args), (), live=False)
    command_line(engine_spec(profile, choice, plan, Path("engine.log"), Path()), 0)
