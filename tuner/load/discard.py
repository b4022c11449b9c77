"""When a round cannot count, and why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tuner.domain.observation import RequestRecord
from tuner.domain.units import counted
from tuner.load.plan import RoundPlan
from tuner.load.steady import queue_growth

FAILURES_ALLOWED = 0.10
"""A round with a larger share of failed requests does not count."""
DIFFERENCE_ALLOWED = 0.03
"""Nor does one whose prompts or answers differ from what was planned by more than this share of their tokens."""
DIFFERENT_ALLOWED = 0.10
"""Nor one in which a larger share of them differs at all."""
TEMPLATE_TOKENS = 2
"""A prompt may have so many more or fewer: the tokens at its ends, which servers count differently."""
GIVEN_UP = "the round was given up"

Discard = tuple[str, str]
"""A stable code, and a sentence."""
COUNTS: Discard = ("", "")
_FULL = ("length", "max_tokens")
_SWITCH = "set workload.ignore_eos: false to measure answers that end where the model ends them"


def judge(
    plan: RoundPlan, records: Sequence[RequestRecord], stopped: Discard, warm: int | None, limited: str
) -> Discard:
    """Why the round does not count; `COUNTS` when it does.

    `stopped` is what ended it early, `warm` of `warm_start`, `limited` why the client was the limit.
    """
    found = _failures(plan, records, stopped)
    if found != COUNTS or plan.phase == "warmup":
        return found
    if warm is not None:
        return "warm_cache", (
            f"the first request found {warm} tokens cached: the prompt was not new to this server, "
            "so the round says nothing about a cold start"
        )
    found = _prompts(plan, records)
    if found == COUNTS and plan.exact_answers:
        found = _answers(records)
    if found != COUNTS:
        return found
    if limited:
        return "client_limited", f"the client was the limit: {limited}"
    growth = queue_growth(records) if plan.lead.concurrency is None else ""
    return ("queue_grows", growth) if growth else COUNTS


def _failures(plan: RoundPlan, records: Sequence[RequestRecord], stopped: Discard) -> Discard:
    code, what = stopped
    failed = [r for r in records if r.error is not None]
    if not what and len(failed) <= FAILURES_ALLOWED * len(records):
        return COUNTS
    counts = Counter(r.error_code or "unknown" for r in failed)
    if not code:
        most = max(counts, key=lambda kind: counts[kind], default="")
        code = most if most in ("auth", "http_error") else "too_many_failures"
    what = what or "too many requests failed"
    if not failed:
        return code, what
    kinds = ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
    own = [r for r in failed if r.error != GIVEN_UP] or failed
    broken = broken_off(records) if plan.exact_answers else ""
    return (
        code,
        f"{what}: {len(failed)} of {len(records)} ({kinds}); the first: {own[0].error}{broken and f'; {broken}'}",
    )


def broken_off(records: Sequence[RequestRecord]) -> str:
    """A sentence when it is the longest answers that broke off in mid-stream; '' when it is not.

    The figures of such a round would be those of the short answers alone.
    """
    broken = [r.output_tokens_planned for r in records if r.error is not None and r.deltas]
    lengths = [n for n in broken if n is not None]
    whole = max((r.output_tokens_planned or 0 for r in records if r.ok), default=0)
    if not whole or len(lengths) < 2 or min(lengths) <= whole:
        return ""
    return (
        f"every answer of more than {counted(whole, 'token')} broke off ({len(lengths)} of {len(records)}); if the "
        f"server breaks with `ignore_eos`, {_SWITCH}"
    )


def _prompts(plan: RoundPlan, records: Sequence[RequestRecord]) -> Discard:
    pairs = [
        (r.prompt_tokens_planned, r.prompt_tokens)
        for r in records
        if plan.exact_prompts and r.prompt_tokens_planned is not None and r.prompt_tokens is not None
    ]
    said = _difference(pairs, "prompt", TEMPLATE_TOKENS)
    if not said:
        return COUNTS
    return "prompts_differ", (
        f"{said} arrived, by the server's count. Something before the engine cuts prompts or adds to them, or its "
        "tokenizer is another than that of /tokenize: measure the engine itself"
    )


def _answers(records: Sequence[RequestRecord]) -> Discard:
    asked = [r for r in records if r.ok and r.output_tokens_planned is not None]
    known = [(r.output_tokens_planned or 0, r.output_tokens) for r in asked if r.output_tokens is not None]
    early = [r for r in asked if r.output_tokens is None and (r.finish_reason or "length").lower() not in _FULL]
    differing = early + [r for r in asked if r.output_tokens not in (None, r.output_tokens_planned)]
    said = _difference(known, "output", 0)
    if said:
        said += " were given"
    elif len(early) > DIFFERENT_ALLOWED * len(asked):
        said = f"{len(early)} of {len(asked)} answers ended before the length that was asked for"
    if said:
        ends = Counter(r.finish_reason or "none" for r in differing).most_common(3)
        reasons = ", ".join(f"{n} {reason}" for reason, n in ends)
        return "answers_differ", (
            f"{said} (finish reasons: {reasons}). The server ends answers at a limit or a stop of its own, or does "
            f"not honour `ignore_eos`: {_SWITCH}"
        )
    broken = broken_off(records)
    return ("answers_differ", broken) if broken else COUNTS


def _difference(pairs: Sequence[tuple[int, int]], kind: str, slack: int) -> str:
    """The figures where the numbers of tokens, (planned, counted), differ by too much; '' where they do not."""
    planned, given = sum(p for p, _ in pairs), sum(g for _, g in pairs)
    differing = sum(abs(p - g) > (max(slack, DIFFERENCE_ALLOWED * p) if slack else 0) for p, g in pairs)
    off = sum(abs(p - g) for p, g in pairs)
    if off <= DIFFERENCE_ALLOWED * planned + slack * len(pairs) and differing <= DIFFERENT_ALLOWED * len(pairs):
        return ""
    what = "prompts are" if kind == "prompt" else "answers are"
    return (
        f"{differing} of {len(pairs)} {what} not as long as asked: {given:,} of {planned:,} {kind} tokens "
        f"({100 * given / planned:.0f} %)"
    )


def warm_start(first: RequestRecord, same_prefix: Sequence[RequestRecord], allowance: int) -> int | None:
    """Tokens that the very first prompt found cached; None when it started cold or the server does not say.

    A server takes a burst in an order of its own, so any request of the same prefix that was sent before the
    first one's first token may be the one that found nothing; what counts is the least that one of them found.
    """
    until = first.first_token_s
    if until is None or first.cached_tokens is None:
        return None
    found = [r.cached_tokens for r in same_prefix if r.ok and r.cached_tokens is not None and r.sent_s <= until]
    least = min(found, default=first.cached_tokens)
    return least if least > allowance else None
