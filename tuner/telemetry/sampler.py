"""Memory at a fixed rate, by a thread of its own that the event loop never waits for."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right

from tuner.clock import SYSTEM_CLOCK, Clock
from tuner.domain.observation import MemorySample, MemoryTimeline
from tuner.telemetry.source import MemorySource, SourceError

_STOP_S = 5.0


class Sampler:
    """Looks at a source every `interval_s` from start() to stop().

    Looks that a slow source misses are skipped, not made up for. A source that cannot be opened or
    that fails on the way makes the timeline say why; it never makes the run fail.
    """

    def __init__(self, source: MemorySource, interval_s: float = 0.1, clock: Clock = SYSTEM_CLOCK) -> None:
        if interval_s <= 0:
            raise ValueError("the interval is above 0")
        self._source = source
        self._interval_s = interval_s
        self._clock = clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._times: list[float] = []
        self._looks: list[list[MemorySample]] = []
        self._totals: dict[str, int] = {}
        self._failed = ""

    def start(self) -> None:
        """Begin; the source is opened by the thread. Again is an error."""
        if self._thread is not None:
            raise RuntimeError("this sampler was started before")
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End within 5 s, also when the driver hangs; harmless when it never ran."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                self._failed = f"the {self._source.name} source did not answer for {_STOP_S:g} s"

    def _run(self) -> None:
        if not self.prepare():
            return
        due_s = self._clock.monotonic_s()
        while not self._stop.is_set():
            self.look()
            now_s = self._clock.monotonic_s()
            due_s += self._interval_s
            if due_s < now_s:
                due_s = now_s + self._interval_s
            self._stop.wait(due_s - now_s)
        self._source.close()

    def prepare(self) -> bool:
        """Open the source; False when it cannot be, with the reason kept."""
        try:
            self._source.open()
            self._totals = dict(self._source.total_bytes())
        except SourceError as error:
            self._failed = str(error)
            return False
        return True

    def look(self) -> None:
        """Take one sample now; a failure is kept as the reason."""
        at_s = self._clock.monotonic_s()
        try:
            samples = self._source.sample(at_s)
        except Exception as error:  # a bug or a driver's surprise must not end the thread unseen
            self._failed = f"the {self._source.name} source failed: {error or type(error).__name__}"
            return
        with self._lock:
            self._times.append(at_s)
            self._looks.append(samples)

    def timeline(self, from_s: float, to_s: float) -> MemoryTimeline:
        """What was seen from `from_s` to `to_s`, both included; seconds of the sampler's clock."""
        with self._lock:
            first, last = bisect_left(self._times, from_s), bisect_right(self._times, to_s)
            samples = [sample for look in self._looks[first:last] for sample in look]
            totals = self._totals or dict(self._source.total_bytes())
        reason = self._failed or self._source.reason
        if self._failed and not self._times:
            return MemoryTimeline("unavailable", [], {}, reason)
        return MemoryTimeline(self._source.name, samples, totals, reason)
