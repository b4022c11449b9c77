"""A vLLM log as plain sentences: prefixes of processes and loggers stripped, exceptions found. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PROCESS = re.compile(r"^(\([\w.:-]+(?: \w+=\w+)* pid=\d+\)) ?")
_LOGGER = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[([^\]]*)\] ?")
_EXCEPTION = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Failure))(?::\s?(?P<text>.*))?$")
_CONTINUES = 8
_ENDS = ("Traceback ", "During handling", "The above exception", "Process ", "For further information")
READY_LINE = "Application startup complete."


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line without its prefixes. `level`, `process` and `source` are '' for what nobody signed."""

    level: str
    text: str
    process: str = ""
    source: str = ""
    """File and line that logged it: the lines of one record share it."""


@dataclass(frozen=True, slots=True)
class LoggedException:
    """An exception as a traceback ends with it; `text` has its continuation lines, joined by newlines."""

    type: str
    text: str
    process: str = ""

    def __str__(self) -> str:
        return f"{self.type}: {self.text}" if self.text else self.type


def clean(line: str) -> LogLine:
    """A raw line of the log, without colours, process prefix and logger prefix."""
    process, text = _process(_ANSI.sub("", line.rstrip("\r\n")))
    match = _LOGGER.match(text)
    if match is None:
        return LogLine("", text, process)
    # A process prefix may stand behind the logger's, depending on the version.
    inner, text = _process(text[match.end() :])
    return LogLine(match[1], text, process or inner, match[2])


def _process(text: str) -> tuple[str, str]:
    match = _PROCESS.match(text)
    return ("", text) if match is None else (match[1], text[match.end() :])


def clean_all(lines: Iterable[str]) -> list[LogLine]:
    """`clean` of every line."""
    return [clean(line) for line in lines]


def exceptions(lines: Sequence[LogLine]) -> list[LoggedException]:
    """The exceptions of the log in the order of printing: a cause stands before what it led to.

    What was logged as INFO or WARNING is left out: it was survived.
    """
    found: list[LoggedException] = []
    for at, line in enumerate(lines):
        if line.level not in ("", "ERROR", "CRITICAL"):
            continue
        match = _EXCEPTION.match(line.text)
        if match is not None:
            rest = continuation(lines, at)
            text = "\n".join([match["text"] or "", *rest]).strip()
            found.append(LoggedException(match["type"].rpartition(".")[2], text, line.process))
    return found


def continuation(lines: Sequence[LogLine], at: int) -> list[str]:
    """What the lines behind `at` add to its sentence, as far as they are of the same record."""
    rest: list[str] = []
    first = lines[at]
    for line in lines[at + 1 : at + 1 + _CONTINUES]:
        text = line.text.strip()
        same_record = (line.process, line.source) == (first.process, first.source)
        if not same_record or _EXCEPTION.match(line.text):
            break
        if text.startswith(_ENDS) or line.text.startswith("  File ") or (not text and rest):
            break
        rest.append(line.text)
    return rest


def since_ready(lines: Sequence[LogLine]) -> Sequence[LogLine]:
    """The part of the log after the server said that it was up; everything where it never did."""
    for at in range(len(lines) - 1, -1, -1):
        if READY_LINE in lines[at].text:
            return lines[at + 1 :]
    return lines


def last_words(lines: Sequence[str], count: int = 12) -> list[str]:
    """The last lines that say something, prefixes stripped, cut to a readable length."""
    texts = [text for text in (clean(line).text.rstrip()[:400] for line in lines[-400:]) if text.strip()]
    return texts[-count:]
