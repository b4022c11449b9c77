"""The `/metrics` text under vLLM's names, one `engine` label, a `_created` sibling for each series."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
GAPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts by upper bound; bounds ascend."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Page:
    """Collects series and writes them; every series carries the labels given here."""

    def __init__(self, labels: Mapping[str, str], created_s: float) -> None:
        self._labels = dict(labels)
        self._created_s = created_s
        self._lines: list[str] = []

    def gauge(self, name: str, help_text: str, value: float, **labels: str) -> None:
        self._head(name, help_text, "gauge")
        self._lines.append(f"{name}{self._braces(labels)} {float(value)}")

    def counter(
        self, name: str, help_text: str, value: float, by: str = "", values: Mapping[str, float] | None = None
    ) -> None:
        """`name` without `_total`. With `by`, one series for each of `values` under that label."""
        series = {"": value} if values is None else values
        self._head(f"{name}_total", help_text, "counter")
        for key, number in series.items():
            self._lines.append(f"{name}_total{self._braces({by: key} if by else {})} {float(number)}")
        self._head(f"{name}_created", help_text, "gauge")
        for key in series:
            self._lines.append(f"{name}_created{self._braces({by: key} if by else {})} {self._created_s!r}")

    def histogram(self, name: str, help_text: str, histogram: Histogram) -> None:
        self._head(name, help_text, "histogram")
        running = 0
        for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
            running += count
            self._lines.append(f"{name}_bucket{self._braces({'le': str(float(bound))})} {float(running)}")
        running += histogram.counts[-1]
        self._lines.append(f"{name}_bucket{self._braces({'le': '+Inf'})} {float(running)}")
        self._lines.append(f"{name}_count{self._braces({})} {float(running)}")
        self._lines.append(f"{name}_sum{self._braces({})} {histogram.sum!r}")
        self._head(f"{name}_created", help_text, "gauge")
        self._lines.append(f"{name}_created{self._braces({})} {self._created_s!r}")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _head(self, name: str, help_text: str, kind: str) -> None:
        self._lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]

    def _braces(self, labels: Mapping[str, str]) -> str:
        both = sorted({**self._labels, **labels}.items())
        return "{" + ",".join(f'{k}="{_escaped(v)}"' for k, v in both) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
