"""YAML with memory: the plain value, and the line on which each key stands."""

from __future__ import annotations

from typing import Any

import yaml

from tuner.errors import ProfileError

Path = tuple[str | int, ...]

_DEEPEST = 50
_MOST_NODES = 100_000


def parse_with_lines(text: str, source: str) -> tuple[Any, dict[Path, int]]:
    """The value of a YAML document and the line (from 1) of every key and list item in it.

    ProfileError for text that is no YAML, for a key given twice (plain YAML would drop the first), and for
    aliases that contain themselves or multiply without end.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        value = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise ProfileError(f"{source}{where}: not valid YAML: {error.problem or error}") from None
    except yaml.YAMLError as error:
        raise ProfileError(f"{source}: not valid YAML: {error}") from None
    except RecursionError:
        raise _too_deep(source) from None
    except ValueError as error:
        raise ProfileError(f"{source}: a value cannot be read: {error}") from None
    lines: dict[Path, int] = {}
    # Walked through its aliases, a short text may have no end.
    if node is not None:
        _walk(node, (), lines, source)
    return value, lines


def _too_deep(source: str) -> ProfileError:
    return ProfileError(f"{source}: nested too deeply, or an alias contains itself", "Write the value out, flatter.")


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], source: str) -> None:
    if len(path) > _DEEPEST:
        raise _too_deep(source)
    if len(lines) > _MOST_NODES:
        raise ProfileError(f"{source}: more than {_MOST_NODES} values, its aliases counted", "Take aliases out.")
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            here = (*path, str(key_node.value))
            line = key_node.start_mark.line + 1
            if here in lines:
                raise ProfileError(
                    f"{source}, line {line}: {_dotted(here)} is given twice, first on line {lines[here]}",
                    "Keep one of them.",
                )
            lines[here] = line
            _walk(value_node, here, lines, source)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            here = (*path, index)
            lines[here] = item.start_mark.line + 1
            _walk(item, here, lines, source)


def line_of(path: Path, lines: dict[Path, int]) -> int | None:
    """The line of the innermost part of `path` that stands in the file."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return None


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
