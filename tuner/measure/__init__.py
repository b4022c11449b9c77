"""Statistics: observations into numbers with intervals, and a reason for everything that is missing."""

from tuner.measure.notes import cacheable_tokens, memory_note, prefix_note
from tuner.measure.percentiles import nearest_rank
from tuner.measure.round import measure_round
from tuner.measure.summary import Summary, summarize

__all__ = [
    "Summary",
    "cacheable_tokens",
    "measure_round",
    "memory_note",
    "nearest_rank",
    "prefix_note",
    "summarize",
]
