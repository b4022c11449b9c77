"""Writes docs/profile.md from the profile's own classes, and the table of live knobs in docs/knobs.md.

python docs/make_profile_reference.py            # write them
python docs/make_profile_reference.py --check    # exit 1 when one is not current
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tuner.domain import profile, workload
from tuner.domain.measurement import metric_names
from tuner.domain.setting import ReuseBudget, Scalar
from tuner.domain.units import Duration, TokenRange
from tuner.space.knobs import LIVE

PROFILE_PAGE = Path(__file__).resolve().parent / "profile.md"
KNOBS_PAGE = Path(__file__).resolve().parent / "knobs.md"
ORDER: tuple[tuple[type[BaseModel], str], ...] = (
    (profile.Profile, "The profile"),
    (profile.Hardware, "`hardware`"),
    (profile.EngineSpec, "`engine`"),
    (workload.SharedPrefixWorkload, "`workload` with `kind: shared-prefix`"),
    (workload.MixedWorkload, "`workload` with `kind: mixed`"),
    (workload.WorkloadClass, "A class of a mixed load"),
    (workload.TraceWorkload, "`workload` with `kind: trace`"),
    (workload.PromptsWorkload, "`workload` with `kind: prompts`"),
    (profile.KnobRange, "A range in `space`"),
    (profile.Objective, "`objective`"),
    (profile.Budget, "`budget`"),
)
PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
HEAD = """<!-- Made by docs/make_profile_reference.py from the schema; do not edit. -->
# Profile reference

A profile is a YAML file; `chunktune sweep PROFILE` takes a path or the name of a file in `profiles/`. An unknown or
misspelt key is an error that names the nearest known one and the line. Sizes are tokens, durations carry a unit
(`250ms`, `90s`, `20m`, `2h`), a pair `[low, high]` of tokens is a uniform range. `--set dotted.key=value` overrides a
field.

"""
SPACE = """## `space`

Knobs by vLLM's own names in snake case, each a list of values or a range; [knobs.md](knobs.md) has those that are
switched while the engine runs. Any other `vllm serve` option may stand here too: each of its values needs engine
starts of its own. Names are checked against the installed vLLM before the first start.

| key | value | default | |
|---|---|---|---|
| any knob | list of values, or a range | | `max_num_batched_tokens`, the chunk size, is a multiple of 16, or of the block size that the profile itself sets. |
| `reuse_budget` | mapping of {budget} to: list of values, or a range | | Knobs of the scheduler plug-in; 0 turns one off. |
| `refine` | true or false | `true` | {refine} |

"""  # noqa: E501
KNOBS_BEGIN = "<!-- Made by docs/make_profile_reference.py from tuner/space/knobs.py: begin -->\n"
KNOBS_END = "<!-- end -->\n"
METRICS = """## Metrics that an objective or a constraint may name

{metrics}. Besides these, `groups.<class>.p50` and so on for the classes of a mixed load. See [metrics.md](metrics.md).
"""


def page() -> str:
    """The whole reference."""
    parts = [HEAD]
    for model, title in ORDER:
        parts.append(_section(model, title))
        if model is workload.PromptsWorkload:
            budget = ", ".join(f"`{name}`" for name in ReuseBudget.model_fields)
            parts.append(SPACE.format(budget=budget, refine=_docstrings(profile.Space)["refine"]))
    names = ", ".join(f"`{name}`" for name in metric_names())
    parts.append(METRICS.format(metrics=textwrap.fill(names, 118, break_on_hyphens=False)))
    return "".join(parts)


def knobs_page(page: str) -> str:
    """The page of knobs with its table of live ones made anew."""
    before, _, rest = page.partition(KNOBS_BEGIN)
    _, _, after = rest.partition(KNOBS_END)
    rows = ["| knob | values | off | what it does |\n|---|---|---|---|\n"]
    for knob in LIVE.values():
        off = "not set" if knob.off is None else f"`{str(knob.off).lower() if knob.kind is bool else f'{knob.off:g}'}`"
        said = " ".join(filter(None, [knob.help, knob.rule]))
        rows.append(f"| `{knob.name}` | {knob.wants} | {off} | {said} |\n")
    return f"{before}{KNOBS_BEGIN}\n{''.join(rows)}\n{KNOBS_END}{after}"


def _section(model: type[BaseModel], title: str) -> str:
    told = _docstrings(model)
    hints = get_type_hints(model, include_extras=True)
    lines = [f"## {title}\n\n{_paragraphs(model)}\n\n| key | value | default | |\n|---|---|---|---|\n"]
    for name, field in model.model_fields.items():
        lines.append(f"| `{name}` | {_type(hints[name])} | {_default(field)} | {told.get(name, '')} |\n")
    return "".join(lines) + "\n"


def _paragraphs(model: type[BaseModel]) -> str:
    text = inspect.cleandoc(model.__doc__ or "")
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The string under each field, of the class and those it inherits from."""
    found: dict[str, str] = {}
    for base in reversed([b for b in model.__mro__ if issubclass(b, BaseModel) and b.__module__.startswith("tuner.")]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            told = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if told and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def _type(hint: Any) -> str:
    if hint == Duration:
        return "duration"
    if hint == TokenRange:
        return "tokens, or `[low, high]`"
    if hint == profile.ConstraintText:
        return "comparison, such as `itl_ms.p99 <= 80`"
    if hint == Scalar:
        return "number, text, true, false or null"
    if hint == workload.Workload:
        return "one of the kinds below"
    if hint == profile.KnobSpec:
        return "list of values, or a range"
    if get_origin(hint) is Annotated:
        return _type(get_args(hint)[0]) + _bounds(get_args(hint)[1:])
    if get_origin(hint) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return ", or ".join(_type(arg) for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is list:
        return f"list of {_type(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"mapping of names to: {_type(get_args(hint)[1])}"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return "a class, see below" if hint is workload.WorkloadClass else "see below"
    return PLAIN[hint]


def _bounds(metadata: tuple[Any, ...]) -> str:
    words = []
    for constraint in [each for given in metadata for each in getattr(given, "metadata", [given])]:
        if getattr(constraint, "gt", None) is not None:
            words.append(f" above {constraint.gt:g}")
        if getattr(constraint, "ge", None) is not None:
            words.append(f" from {constraint.ge:g}")
        if getattr(constraint, "le", None) is not None:
            words.append(f", at most {constraint.le:,}")
    return "".join(words)


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or value is None or value in ({}, [], "") or isinstance(value, BaseModel):
        return ""
    duration = any("duration" in getattr(getattr(m, "func", None), "__name__", "") for m in field.metadata)
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value:g}s`" if duration else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is not current")
    pages = {PROFILE_PAGE: page(), KNOBS_PAGE: knobs_page(KNOBS_PAGE.read_text(encoding="utf-8"))}
    if parser.parse_args().check:
        return int(any(not f.exists() or f.read_text(encoding="utf-8") != text for f, text in pages.items()))
    for file, text in pages.items():
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
