"""Rounds until enough of them count, for a trial and for a server that runs already."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tuner.clock import Clock
from tuner.domain.experiment import Diagnosis
from tuner.domain.units import counted
from tuner.engine.causes import CAUSES
from tuner.engine.diagnosis import cause
from tuner.trial.progress import Progress
from tuner.experiment.session import RoundResult, Session

EXTRA_ATTEMPTS = 2
"""Rounds driven again because one did not count (warm cache, failures, slow client)."""

PAUSES_S = (2.0, 8.0)
"""Waits before a round that is driven again because the client was the limit: what was in its way may pass."""

HOPELESS = ("auth", "engine_stalled")
"""Codes of void rounds that another round on the same engine would only meet again."""

_HINTS = {
    "warm_cache": "Something before the engine remembers prompts, or another client sends the same ones; measure a "
    "server that nobody else uses.",
}


def counting(results: Sequence[RoundResult]) -> list[RoundResult]:
    """The rounds that are not void."""
    return [r for r in results if r.measurement.void is None]


async def enough_rounds(
    session: Session,
    wanted: int,
    key: str,
    clock: Clock,
    progress: Progress,
    on_round: Callable[[list[RoundResult]], None],
    *,
    name: str = "",
) -> Diagnosis | None:
    """Drive rounds until `wanted` count, with `EXTRA_ATTEMPTS` to spare; the reason when too many did not.

    `key` makes the content of these rounds new; `on_round` gets all results after each round. `name` is what
    people are told instead of "round 1 of 3".
    """
    results: list[RoundResult] = []
    while len(counting(results)) < wanted and len(results) < wanted + EXTRA_ATTEMPTS:
        limited = sum(r.observation.discard_code == "client_limited" for r in results)
        if results and results[-1].observation.discard_code == "client_limited":
            pause_s = PAUSES_S[min(limited, len(PAUSES_S)) - 1]
            progress.stage(f"waiting {pause_s:g} s: the client was the limit")
            await clock.sleep(pause_s)
        progress.stage(name or f"round {len(counting(results)) + 1} of {wanted}")
        results.append(await session.round(f"{key}/round-{len(results) + 1}"))
        on_round(results)
        if results[-1].observation.discard_code in HOPELESS:
            break
    good = counting(results)
    if len(good) >= wanted:
        return None
    last = next(r for r in reversed(results) if r.measurement.void is not None)
    code = last.observation.discard_code or "http_error"
    void = len(results) - len(good)
    do = "does" if void == 1 else "do"
    what = f"{void} of {counted(len(results), 'round')} {do} not count: {last.measurement.void}"
    return cause(code, what) if code in CAUSES else Diagnosis(code=code, message=what, hint=_HINTS.get(code, ""))
