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
"""Nor does one in which prompts or answers differ by more than this share of the tokens that were planned."""
TEMPLATE_TOKENS = 2
"""A prompt may have so many more or fewer: the tokens at its ends, which servers count differently."""
GIVEN_UP = "the round was given up"

Discard = tuple[str, str]
"""A stable code, and a sentence."""
COUNTS: Discard = ("", "")
_SWITCH = "set workload.ignore_eos: false to measure answers that end where the model ends them"


def judge(
    plan: RoundPlan, records: Sequence[RequestRecord], stopped: Discard, warm: int | None, limited: str
) -> Discard:
    """Why the round does not count; `COUNTS` when it does.

    `stopped` is what ended it early, `warm` of `warm_start`, `limited` why the client was the limit.
    """
    found = _failures(records, stopped)
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


def _failures(records: Sequence[RequestRecord], stopped: Discard) -> Discard:
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
    broken = f"; {sentence}" if (sentence := broken_off(records)) else ""
    return code, f"{what}: {len(failed)} of {len(records)} ({kinds}); the first: {own[0].error}{broken}"


def broken_off(records: Sequence[RequestRecord]) -> str:
    """A sentence when it is the longest answers that broke off in mid-stream; '' when it is not.

    The figures of such a round would be those of the short answers alone.
    """
    broken = [r.output_tokens_planned for r in records if r.error is not None and r.deltas]
    lengths = [n for n in broken if n is not None]
    whole = max((r.output_tokens_planned or 0 for r in records if r.ok), default=0)
    if len(lengths) < 2 or min(lengths) <= whole:
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
    slack = TEMPLATE_TOKENS * len(pairs)
    if _difference(pairs) <= DIFFERENCE_ALLOWED * sum(p for p, _ in pairs) + slack:
        return COUNTS
    return "prompts_differ", (
        f"the prompts are not what was asked: {_figures(pairs, 'prompt')} were counted by the server; something before "
        "the engine cuts prompts or adds to them, or its tokenizer is another: measure the engine itself"
    )


def _answers(records: Sequence[RequestRecord]) -> Discard:
    asked = [r for r in records if r.ok and r.output_tokens_planned is not None]
    pairs = [(r.output_tokens_planned or 0, r.output_tokens) for r in asked]
    known = [(planned, given) for planned, given in pairs if given is not None]
    if _difference(known) > DIFFERENCE_ALLOWED * sum(planned for planned, _ in known):
        reasons = Counter(r.finish_reason or "none" for r in asked if r.output_tokens != r.output_tokens_planned)
        ends = ", ".join(f"{n} {reason}" for reason, n in reasons.most_common(3))
        return "answers_differ", (
            f"the answers are not as long as asked: {_figures(known, 'output')} were given (finish reasons: {ends}). "
            f"The server ends answers at a limit or stop of its own, or does not honour `ignore_eos`: {_SWITCH}"
        )
    early = sum(given is None and r.finish_reason not in (None, "length") for r, (_, given) in zip(asked, pairs, strict=True))
    if early > DIFFERENCE_ALLOWED * len(pairs):
        return "answers_differ", (
            f"the answers are not as long as asked: {early} of {len(pairs)} ended by themselves before that. The "
            f"server does not honour `ignore_eos`: {_SWITCH}"
        )
    broken = broken_off(records)
    return ("answers_differ", f"the longest answers are missing: {broken}") if broken else COUNTS


def _difference(pairs: Sequence[tuple[int, int]]) -> int:
    return sum(abs(planned - given) for planned, given in pairs)


def _figures(pairs: Sequence[tuple[int, int]], kind: str) -> str:
    planned, given = (sum(column) for column in zip(*pairs, strict=True))
    return f"{given:,} of {planned:,} {kind} tokens ({100 * given / planned:.0f} %)"


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
