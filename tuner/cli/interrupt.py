"""SIGINT and SIGTERM as cancellation: the work stops in order, then the command exits with 130."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tuner.errors import Interrupted

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_interruptible(
    main: Callable[[], Coroutine[Any, Any, T]],
    *,
    on_signal: Callable[[], None] | None = None,
    kept: str | Callable[[], str] = "",
) -> T:
    """The result of `main()`; Interrupted when a signal arrived and the work has stopped.

    `kept` says what of the work is kept and how it goes on; a function is asked once the work has stopped.
    Further signals while the engine is being stopped change nothing: the stop is bounded.
    """

    async def guarded() -> T:
        loop = asyncio.get_running_loop()
        task: asyncio.Task[T] = loop.create_task(main())
        received: list[int] = []

        def cancel(number: int) -> None:
            if not received and on_signal is not None:
                on_signal()
            if not received:
                task.cancel()
            received.append(number)

        for number in SIGNALS:
            loop.add_signal_handler(number, cancel, number)
        try:
            return await task
        except asyncio.CancelledError:
            if received:
                raise Interrupted("interrupted", kept if isinstance(kept, str) else kept()) from None
            raise
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    from tuner.load.loop import run

    return run(guarded())
