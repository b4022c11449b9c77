"""A frozen file measured anew on purpose; what it was measured at before stays in it. Pure."""

from __future__ import annotations

from tuner.domain.frozen import Frozen, MeasuredStock
from tuner.freeze.measured import measured_of
from tuner.regress.run import RunResult, is_stock


def rebased(result: RunResult, at: str) -> Frozen:
    """The frozen document with the rounds and the fingerprint of this run, and the old ones kept in `previous`.

    Stock is this run's as well. Where it was not measured the new document has none: the difference between two days
    would be taken for the machine's.
    """
    old = result.frozen
    stock = None
    stock_rounds = result.rounds if is_stock(old) else result.stock_rounds
    if old.stock is not None and stock_rounds:
        measured = measured_of(stock_rounds)
        stock = MeasuredStock(**dict(measured), engine_args=old.stock.engine_args)
    kept = {
        "replaced_at": at,
        "created_at": old.created_at,
        "fingerprint": old.fingerprint.to_json(),
        "measured": old.measured.to_json(),
        "stock": None if old.stock is None else old.stock.to_json(),
        "verdict": result.verdict,
    }
    return old.model_copy(
        update={
            "created_at": at,
            "fingerprint": result.fingerprint,
            "measured": measured_of(result.rounds),
            "stock": stock,
            "previous": [*old.previous, kept],
        }
    )
