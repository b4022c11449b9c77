"""The figures of a report, in the order in which they are read."""

from __future__ import annotations

from tuner.report.data import ReportData
from tuner.report.figures.base import Figure
from tuner.report.figures.by_chunk import itl_by_chunk, others_by_chunk, ttft_by_chunk
from tuner.report.figures.differences import contrasts, importance, pareto, rounds_by_cycle, ttft_distribution
from tuner.report.figures.over_time import memory_over_time, utilisation_over_time, where_time_went

__all__ = ["Figure", "all_figures"]


def all_figures(data: ReportData) -> list[Figure]:
    """Every figure; one without data says why in `absent`."""
    return [
        ttft_by_chunk(data),
        itl_by_chunk(data),
        contrasts(data),
        rounds_by_cycle(data),
        ttft_distribution(data),
        memory_over_time(data),
        utilisation_over_time(data),
        *others_by_chunk(data),
        pareto(data),
        importance(data),
        where_time_went(data),
    ]
