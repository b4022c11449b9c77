"""A frozen configuration as JSON, as YAML for `vllm serve --config`, and as one command line. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tuner.domain.frozen import Frozen
from tuner.domain.measurement import metric
from tuner.domain.setting import ReuseBudget, Scalar
from tuner.engine.argv import to_argv
from tuner.files import dump_json

SCHEDULER_CLASS = "tuner.scheduler.ReuseBudgetScheduler"
SETTINGS_KEY = "chunktune"

_STORE_TRUE = frozenset(
    {"headless", "grpc", "data_parallel_multi_port_external_lb", "disable_log_stats", "aggregate_engine_logging"}
)
"""Flags of vLLM 0.32 (`vllm/entrypoints/openai/cli_args.py`, `engine/arg_utils.py`) that have no `--no-` form."""


_VERDICTS = {
    "better": "better than stock in the finals, or stock broke a constraint",
    "stock": "no setting was better than stock beyond doubt; this is stock with its options pinned",
    "chosen": "none; somebody chose this setting",
}


def to_json(frozen: Frozen) -> str:
    """The document itself."""
    return dump_json(frozen.to_json()).decode()


def to_args(frozen: Frozen) -> str:
    """One shell-quoted command line, without host and port.

    Of a simulated result it is the line for the node that it plans: `chunktune serve` alone starts the simulated
    engine, which needs to be told what to pretend.
    """
    launcher = ("vllm",) if frozen.simulated else launcher_of(frozen.command)
    model = served_model(frozen.command, frozen.model)
    words = serve_command(launcher, model, frozen.engine_args, frozen.reuse_budget)
    return shlex.join(words) + "\n"


def to_yaml(frozen: Frozen) -> str:
    """A file for `vllm serve --config FILE`, with what has to be known in comments."""
    body = yaml.safe_dump(config_mapping(frozen), sort_keys=False, default_flow_style=False, allow_unicode=True)
    comments = "".join(f"# {line}".rstrip() + "\n" for line in _comments(frozen))
    return comments + body


def serve_command(
    launcher: Sequence[str], model: str, args: Mapping[str, Scalar], budget: ReuseBudget | None
) -> list[str]:
    """The argv that serves this configuration; host, port and served name are left to whoever starts it."""
    return [*launcher, "serve", model, *to_argv(_startable(with_plugin(args, budget)))]


def launcher_of(command: Sequence[str]) -> tuple[str, ...]:
    """What stands before `serve` in a command that was run; `vllm` when it is not known."""
    return tuple(command[: command.index("serve")]) if "serve" in command[1:] else ("vllm",)


def served_model(command: Sequence[str], model: str) -> str:
    """What stands after `serve` in a command that was run: the folder of a model that goes by another name."""
    if "serve" not in command[1:]:
        return model
    after = command[command.index("serve") + 1 :][:1]
    return after[0] if after and not after[0].startswith("-") else model


def config_mapping(frozen: Frozen) -> dict[str, Any]:
    """What the YAML says.

    vLLM drops `key: false` without a word (its config reader asks the top parser, which knows no
    `--no-` form), so a false value becomes `no-key: true`; JSON text becomes the mapping it stands for.
    """
    mapping: dict[str, Any] = {"model": served_model(frozen.command, frozen.model)}
    for name, value in _startable(with_plugin(frozen.engine_args, frozen.reuse_budget)).items():
        dashed = name.replace("_", "-")
        if value is False:
            mapping[f"no-{dashed}"] = True
        else:
            mapping[dashed] = _parsed(value)
    return mapping


def with_plugin(args: Mapping[str, Scalar], budget: ReuseBudget | None) -> dict[str, Scalar]:
    """The options with those of the scheduler plug-in; other keys of `additional_config` are kept."""
    if budget is None or budget.off:
        return dict(args)
    given = args.get("additional_config")
    settings = json.loads(given) if isinstance(given, str) and given.strip() else {}
    settings[SETTINGS_KEY] = budget.to_json()
    return {**args, "scheduler_cls": SCHEDULER_CLASS, "additional_config": json.dumps(settings, sort_keys=True)}


def _startable(args: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {n: v for n, v in args.items() if v is not None and not (v is False and n in _STORE_TRUE)}


def _parsed(value: Scalar) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            return value
        return parsed if isinstance(parsed, dict) else value
    return value


def _comments(frozen: Frozen) -> list[str]:
    lines = []
    if frozen.simulated:
        lines.append("SIMULATED: found on chunktune's simulated engine, never measured on a GPU.")
    lines += [
        f"Frozen by chunktune {frozen.chunktune_version} on {frozen.created_at} from study {frozen.study.name}.",
        f"Verdict: {_VERDICTS[frozen.verdict]}.",
        f"Measured: {_headline(frozen)}.",
        "Start: vllm serve --config THIS_FILE",
    ]
    if frozen.fingerprint.vllm_version:
        lines.append(f"vLLM: {frozen.fingerprint.vllm_version}")
    if frozen.engine_env:
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in frozen.engine_env.items())
        lines.append(f"Environment it was measured with: {settings}")
    if frozen.reuse_budget is not None and not frozen.reuse_budget.off:
        lines += [
            f"The reuse budget needs the scheduler plug-in {SCHEDULER_CLASS} where vLLM runs:",
            "either `pip install --no-deps` chunktune into vLLM's own environment, or put on PYTHONPATH a folder",
            "that holds only tuner/__init__.py and tuner/scheduler/ of chunktune (they need nothing else).",
        ]
    return lines


def _headline(frozen: Frozen) -> str:
    parts = []
    for path in dict.fromkeys([*frozen.objective.metrics, *frozen.regress_metrics]):
        value = metric(frozen.measured.median, path)
        if value is not None:
            parts.append(f"{path} {value:.4g}")
    count = frozen.measured.starts
    return f"{', '.join(parts) or 'nothing'} over {count} engine start{'' if count == 1 else 's'}"
