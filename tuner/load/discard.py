"""When a round cannot count, and why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tuner.domain.observation import RequestRecord
from tuner.load.plan import RoundPlan

FAILURES_ALLOWED = 0.10
"""A round with a larger share of failed requests does not count."""


def discard_reason(
    plan: RoundPlan, records: Sequence[RequestRecord], stopped: str, warm: int | None, limited: str
) -> str:
    """Why the round does not count; '' when it does. `warm`: see `warm_start`."""
    failed = [r for r in records if r.error is not None]
    if failed and (stopped or len(failed) > FAILURES_ALLOWED * len(records)):
        counts = Counter(r.error_code or "unknown" for r in failed)
        kinds = ", ".join(f"{n} {code}" for code, n in counts.most_common())
        own = [r for r in failed if r.error != "the round was given up"] or failed
        what = stopped or "too many requests failed"
        return f"{what}: {len(failed)} of {len(records)} ({kinds}); the first: {own[0].error}"
    if stopped:
        return stopped
    if plan.phase == "warmup":
        return ""
    if warm is not None:
        return (
            f"the first request found {warm} tokens cached: the prompt was not new to this server, "
            "so the round says nothing about a cold start"
        )
    return f"the client was the limit: {limited}" if limited else ""


def discard_code(records: Sequence[RequestRecord], stopped: str, warm: int | None, limited: bool) -> str:
    """The stable code of `discard_reason`: what stopped the round, else what most failed requests share."""
    failed = Counter(r.error_code or "unknown" for r in records if r.error is not None)
    if stopped:
        return stopped
    if failed.total() > FAILURES_ALLOWED * len(records):
        most = failed.most_common(1)[0][0]
        return most if most in ("auth", "http_error") else "too_many_failures"
    if warm is not None:
        return "warm_cache"
    return "client_limited" if limited else "too_many_failures"


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
