"""From a name or a path to a Profile."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tuner.domain.profile import Profile, is_secret_name
from tuner.domain.workload import (
    MixedWorkload,
    PromptsWorkload,
    SharedPrefixWorkload,
    TraceWorkload,
    WorkloadClass,
)
from tuner.errors import FileFormatError, ProfileError
from tuner.files import read_bounded
from tuner.profile.lines import line_of, parse_with_lines
from tuner.profile.overrides import apply_overrides

DEFAULT_PROFILE = "default"
_PACKAGE = Path(__file__).resolve().parent.parent
_READY = (Path("profiles"), _PACKAGE.parent / "profiles", _PACKAGE / "ready_profiles")
_SUFFIXES = (".yaml", ".yml")
_WORKLOADS: dict[str, type[BaseModel]] = {
    "shared-prefix": SharedPrefixWorkload,
    "mixed": MixedWorkload,
    "trace": TraceWorkload,
    "prompts": PromptsWorkload,
}


def load_profile(name_or_path: str | None = None, overrides: list[str] | None = None) -> Profile:
    """The profile of a path, of a name in `profiles/`, or the default one; ProfileError says what is wrong.

    Paths inside a profile are relative to the profile's folder.
    """
    path = _find(name_or_path or DEFAULT_PROFILE)
    try:
        text = read_bounded(path).decode("utf-8")
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}") from None
    except FileFormatError as error:
        raise ProfileError(error.message) from None
    except UnicodeDecodeError:
        raise ProfileError(f"{path} is no UTF-8 text") from None
    return parse_profile(text, source=str(path), base_dir=path.parent, overrides=overrides or [])


def parse_profile(
    text: str, *, source: str = "profile", base_dir: Path = Path(), overrides: list[str] | None = None
) -> Profile:
    """The profile in a YAML text."""
    value, lines = parse_with_lines(text, source)
    if not isinstance(value, dict):
        raise ProfileError(f"{source}: a profile is a mapping of keys", "See profiles/default.yaml for one.")
    value = apply_overrides(value, overrides or [])
    _check_whole_numbers(value, (), source)
    version = value.get("version")
    if version is not None and version != 1:
        raise ProfileError(f"{source}: version {version!r}; this chunktune reads version 1")
    try:
        profile = Profile.model_validate(value)
    except ValidationError as error:
        raise _explain(error, value, lines, source) from None
    secret = next(filter(is_secret_name, profile.engine.env), None)
    if secret is not None:
        raise ProfileError(
            f"{source}: engine.env.{secret}: a secret does not belong in a profile",
            "Take it out and export it: the engine inherits chunktune's environment.",
        )
    return _with_absolute_paths(profile, base_dir)


def _check_whole_numbers(value: Any, path: tuple[str | int, ...], source: str) -> None:
    """No file of ours holds a whole number above 64 bits."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            _check_whole_numbers(below, (*path, key), source)
    elif isinstance(value, list):
        for index, below in enumerate(value):
            _check_whole_numbers(below, (*path, index), source)
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise ProfileError(f"{source}: {'.'.join(map(str, path))}: the number is too large")


def _with_absolute_paths(profile: Profile, base_dir: Path) -> Profile:
    workload = profile.workload
    if not isinstance(workload, TraceWorkload | PromptsWorkload):
        return profile
    path = (base_dir / workload.path).resolve()
    if not path.is_file():
        raise ProfileError(f"workload.path: {path} does not exist", "Paths are relative to the profile's folder.")
    return profile.model_copy(update={"workload": workload.model_copy(update={"path": str(path)})})


def _find(name: str) -> Path:
    path = Path(name)
    if path.suffix in _SUFFIXES or path.is_file() or len(path.parts) > 1:
        if path.is_dir():
            raise ProfileError(f"{path} is a directory; a profile is a YAML file")
        if not path.exists():
            raise ProfileError(f"profile {path} does not exist", f"Ready profiles: {', '.join(ready_profiles())}.")
        return path
    for folder in _READY:
        for suffix in _SUFFIXES:
            found = folder / f"{name}{suffix}"
            if found.is_file():
                return found
    near = difflib.get_close_matches(name, ready_profiles(), n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ProfileError(
        f"no profile named {name!r}", f"{hint}Ready profiles: {', '.join(ready_profiles())}; or give a path."
    )


def ready_profiles() -> list[str]:
    """Names of the profiles that can be given without a path."""
    return sorted({f.stem for folder in _READY if folder.is_dir() for f in folder.iterdir() if f.suffix in _SUFFIXES})


def _explain(error: ValidationError, value: Mapping[str, Any], lines: Mapping[Any, int], source: str) -> ProfileError:
    sentences = []
    items = _of_the_closest_branch(error)
    for item in items:
        path = _path_in_file(item["loc"], value)
        line = line_of(path, dict(lines))
        where = f"{source}, line {line}" if line else source
        dotted = ".".join(map(str, path)) or "the profile"
        if item["type"] == "extra_forbidden":
            sentences.append(f"{where}: unknown key {dotted!r}{_nearest(path, value)}")
        elif item["type"] == "missing":
            sentences.append(f"{where}: {dotted} is missing")
        elif item["type"] in ("union_tag_invalid", "union_tag_not_found"):
            sentences.append(f"{where}: {dotted}.kind is one of {', '.join(_WORKLOADS)}")
        else:
            beside = {i["type"] for i in items if i["loc"][:-1] == item["loc"][:-1]}
            message = item["msg"].removeprefix("Value error, ")
            if beside >= {"list_type", "model_type"}:
                message = "has to be a list of values, or a range with low and high"
            if beside >= _SCALAR_TYPES:
                message = "has to be a finite number" if "finite_number" in beside else _A_SCALAR
            sentences.append(f"{where}: {message}" if dotted == "the profile" else f"{where}: {dotted}: {message}")
    return ProfileError("\n  ".join(dict.fromkeys(sentences)))


def _of_the_closest_branch(error: ValidationError) -> list[ErrorDetails]:
    """A knob may be a list or a range; only the complaints about what was meant help."""
    items = error.errors(include_url=False)
    kinds = ("list_type", "model_type")
    wrong_kind = [i for i in items if "[" in str(i["loc"][-1:]) and i["type"] in kinds]
    return [i for i in items if i not in wrong_kind] or items


_SCALAR_TYPES = {"bool_type", "string_type"}
"""What pydantic complains of together where a value is none of a knob's kinds."""
_A_SCALAR = "has to be a number, a word, true or false"


def _path_in_file(loc: tuple[int | str, ...], value: Any) -> tuple[str | int, ...]:
    """The location without the parts that pydantic adds for unions and their tags."""
    path: list[str | int] = []
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        if isinstance(value, Mapping) and (part in value or (last and part not in _WORKLOADS and "[" not in str(part))):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        path.append(part)
    return tuple(path)


def _nearest(path: tuple[str | int, ...], value: Mapping[str, Any]) -> str:
    known = sorted(_known_keys(path[:-1], value))
    near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known here: {', '.join(known)}" if known else ""


def _known_keys(path: tuple[str | int, ...], value: Mapping[str, Any]) -> Iterator[str]:
    model: type[BaseModel] | None = Profile
    for position, part in enumerate(path):
        if path[position] == "workload":
            model = _WORKLOADS.get(str((value.get("workload") or {}).get("kind")))
        elif part == "classes":
            model = WorkloadClass
        elif isinstance(part, str) and model is not None:
            field = model.model_fields.get(part)
            model = None if field is None else _model_of(field.annotation)
    if model is not None:
        yield from model.model_fields


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
