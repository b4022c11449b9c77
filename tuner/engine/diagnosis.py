"""Why an engine failed, read from its log and its exit code. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Literal

from tuner.domain.experiment import Diagnosis
from tuner.engine.causes import CAUSES, CHUNK_BOUND, SIGNS, WRAPPERS
from tuner.engine.logs import LoggedException, LogLine, clean_all, continuation, exceptions, last_words, since_ready

__all__ = ["CAUSES", "cause", "diagnose"]

Phase = Literal["start", "load"]

_USAGE = re.compile(r"^\S+(?: \w+)?: error: (?P<what>.*)$")
_UNKNOWN_ARGUMENTS = re.compile(r"^(?:unrecognized arguments?|no such option|ambiguous option):? (?P<words>.*)$")
_PYDANTIC_HEAD = r"\d+ validation errors? for \w+"
_PYDANTIC = re.compile(
    rf"{_PYDANTIC_HEAD}\n(?:(?P<field>[\w.]+)\n)?\s*"
    r"(?:Value error, |Assertion failed, )?(?P<body>\S.*?)\s*(?:\[type=|\Z)",
    re.DOTALL,
)
_LONGEST = 500
_LOADING = re.compile(r"Starting to load model|Loading safetensors checkpoint shards|Loading weights")
_LOADED = re.compile(r"Model loading took|Loading weights took")


def cause(code: str, detail: str = "", *, hint: str | None = None) -> Diagnosis:
    """A diagnosis of a known code: its sentence, with the detail behind a colon. KeyError for an unknown code."""
    known = CAUSES[code]
    message = f"{known.sentence}: {detail}" if detail else known.sentence
    return Diagnosis(code=code, message=message, hint=known.hint if hint is None else hint)


def diagnose(log_lines: Sequence[str], exit_code: int | None, *, phase: Phase) -> Diagnosis:
    """The cause of a failure at the start or under load.

    The deepest specific exception decides: a worker prints it first, and every process above it wraps it
    again. `exit_code` is that of the API server, negative for a signal, None while it lives. Without a
    known sign the code is `unknown` at a start and `engine_died` under load, with the last lines.
    """
    lines = clean_all(log_lines)
    if phase == "load":
        lines = list(since_ready(lines))
    usage = _usage_error(lines)
    if usage is not None:
        return usage
    found = [e for e in exceptions(lines) if not WRAPPERS.search(str(e))]
    if phase == "load":
        # The API server logs refused requests too; they end no engine.
        found = [e for e in found if not e.process.startswith("(APIServer")]
        lines = [line for line in lines if not line.process.startswith("(APIServer")]
    known = _known([str(e) for e in found]) or _known(_error_texts(lines))
    if known is not None:
        return _memory_ran_out(known, lines, phase) if known.code == "cuda_oom" else known
    tail = last_words(log_lines)
    deepest = _readable(found[0]) if found else ""
    if phase == "load":
        detail = _join(_how_it_ended(exit_code), deepest)
        return cause("engine_died", detail).model_copy(update={"tail": tail})
    if exit_code is not None and exit_code < 0 and not deepest:
        return cause("engine_died", _how_it_ended(exit_code)).model_copy(update={"tail": tail})
    detail = _join(_how_it_ended(exit_code), deepest or (tail[-1] if tail else "it wrote nothing"))
    return cause("unknown", detail).model_copy(update={"tail": tail})


def _memory_ran_out(known: Diagnosis, lines: Sequence[LogLine], phase: Phase) -> Diagnosis:
    """Out of memory before the weights were loaded is no fault of the chunk size."""
    if phase == "load":
        return known.model_copy(update={"message": f"under load {known.message}"})
    loading = any(_LOADING.search(line.text) for line in lines)
    loaded = any(_LOADED.search(line.text) for line in lines)
    if loading and not loaded:
        return cause("weights_too_large", known.message.partition(": ")[2])
    return known


def _usage_error(lines: Sequence[LogLine]) -> Diagnosis | None:
    for line in reversed(lines[-30:]):
        match = _USAGE.match(line.text)
        if match is None:
            continue
        what = match["what"]
        unknown = _UNKNOWN_ARGUMENTS.match(what)
        if unknown is not None:
            options = [w.partition("=")[0] for w in unknown["words"].split() if w.startswith("--")]
            return cause("unknown_option", ", ".join(options) or unknown["words"])
        return cause("bad_option_value", what)
    return None


def _known(texts: Sequence[str]) -> Diagnosis | None:
    for text in texts:
        for code, sign in SIGNS:
            if sign.search(text):
                diagnosis = cause(code, _trim(_sentence(text)))
                bound = CHUNK_BOUND.search(text)
                if bound is None:
                    return diagnosis
                return diagnosis.model_copy(update={"bound": int(bound["a"] or bound["b"])})
    return None


def _error_texts(lines: Sequence[LogLine]) -> list[str]:
    """What was logged as an error, and what no logger wrote near the end: some failures raise nothing."""
    logged = [_whole(lines, at) for at, line in enumerate(lines) if line.level in ("ERROR", "CRITICAL")]
    last = lines[-60:]
    raw = [_whole(last, at) for at, line in enumerate(last) if line.level == "" and not line.text.startswith("  ")]
    return [text for text in logged + raw if not WRAPPERS.search(text)]


def _whole(lines: Sequence[LogLine], at: int) -> str:
    """A line; the first one of pydantic's names only the class, the reason stands below it."""
    text = lines[at].text
    return "\n".join([text, *continuation(lines, at)]) if re.search(f"{_PYDANTIC_HEAD}$", text) else text


def _readable(error: LoggedException) -> str:
    return _trim(_sentence(str(error)))


def _sentence(text: str) -> str:
    """Of pydantic's several lines the reason: the class in front and the dump of the input behind are noise."""
    match = _PYDANTIC.search(text)
    if match is None:
        return text
    return f"{match['field']}: {match['body']}" if match["field"] else match["body"]


def _trim(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= _LONGEST else one_line[:_LONGEST].rstrip() + " ..."


def _join(*parts: str) -> str:
    return "; ".join(p for p in parts if p)


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "its API server lives, but the engine process behind it is gone"
    if exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "killed by SIGKILL from outside, most likely by the kernel for want of host memory (see dmesg)"
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        return f"killed by {name}"
    return f"exit code {exit_code}"
