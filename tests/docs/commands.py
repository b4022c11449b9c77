"""Command blocks of a Markdown page, and which of them a machine without a GPU can run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHELLS = ("sh", "bash", "console")
_FENCE = re.compile(r"^```\s*([\w-]*)(.*)$")
_HEADING = re.compile(r"^#+\s+(.*)$")
_COMMENT = re.compile(r"^<!--\s*(.*?)\s*-->$")
_EXITS = re.compile(r"exits (\d+)")
GPU = "on a gpu node"
PORT = "8123"
"""The port of every server that a page starts; whoever runs the page puts a free one in its place."""


@dataclass(frozen=True)
class Block:
    """One fenced block; `skip` says why it is not run ('' when it is)."""

    line: int
    script: str
    skip: str
    exits: int


def command_blocks(text: str) -> list[Block]:
    """The shell blocks of a page, in order.

    `<!-- on a GPU node -->` or `<!-- not run: REASON -->` on the line above a fence (or a heading that names a
    GPU node) keeps a block from being run; `<!-- exits 4 -->` names the exit code of its last command. `make` targets
    are what continuous integration itself runs.
    """
    found: list[Block] = []
    heading, comment = "", ""
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if match := _HEADING.match(line):
            heading, comment = match[1].lower(), ""
        elif match := _COMMENT.match(line):
            comment = match[1].lower()
        elif match := _FENCE.match(line):
            body = _body(lines)
            if match[1] in SHELLS:
                script = _commands(body) if match[1] == "console" else "\n".join(body)
                found.append(Block(number, script, _skip(script, heading, comment), _exit_code(comment)))
            comment = ""
        elif line.strip():
            comment = ""
    return found


def pages(root: Path) -> list[Path]:
    """README and every page of docs/."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def _body(lines: Iterator[tuple[int, str]]) -> list[str]:
    """Lines up to the closing fence; they are taken from `lines`."""
    body = []
    for _, line in lines:
        if line.startswith("```"):
            break
        body.append(line)
    return body


def _commands(body: list[str]) -> str:
    """The commands of a console block: lines after a prompt, with their continuations."""
    commands: list[str] = []
    for line in body:
        if line.startswith("$ "):
            commands.append(line[2:])
        elif commands and commands[-1].endswith("\\"):
            commands.append(line)
    return "\n".join(commands)


def _skip(script: str, heading: str, comment: str) -> str:
    if comment == GPU or "gpu node" in heading:
        return "for a GPU node"
    if comment.startswith("not run:"):
        return comment.removeprefix("not run:").strip()
    first_words = [line.split()[0] for line in script.splitlines() if line.strip() and not line.startswith("#")]
    return "a make target, run by continuous integration itself" if "make" in first_words else ""


def _exit_code(comment: str) -> int:
    match = _EXITS.search(comment)
    return int(match[1]) if match else 0
