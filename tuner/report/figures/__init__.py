"""The figures of a report, in the order in which they are read."""

from __future__ import annotations

from tuner.report.data import ReportData
from tuner.report.figures.base import Figure
from tuner.report.figures.by_chunk import memory_by_chunk, ttft_by_chunk
from tuner.report.figures.over_time import memory_over_time, sweep_timeline, trend
from tuner.report.figures.scheduling import ttft_distributions, utilization
from tuner.report.figures.search import importance, pareto

__all__ = ["Figure", "all_figures"]


def all_figures(data: ReportData) -> list[Figure]:
    """Every figure; one without data says why in `absent`."""
    return [
        ttft_by_chunk(data),
        memory_by_chunk(data),
        memory_over_time(data),
        ttft_distributions(data),
        utilization(data),
        trend(data),
        pareto(data),
        importance(data),
        sweep_timeline(data),
    ]
