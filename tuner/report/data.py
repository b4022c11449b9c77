"""What a report is made of: plain values, so that this room needs to know nothing about studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tuner.domain.experiment import STOCK_ID, Results, SettingId, SettingLine, StudyFile, StudySummary
from tuner.domain.observation import MemoryTimeline
from tuner.domain.setting import CHUNK_KNOB
from tuner.report.words import line_of, objective_of


@dataclass(frozen=True)
class ReportData:
    """One study, as far as it was measured; whatever is missing leaves its figure out, with a reason."""

    study: StudyFile
    summary: StudySummary
    results: Results
    timelines: Mapping[int, Mapping[int, MemoryTimeline]] = field(default_factory=dict)
    """Memory and utilisation samples: start to round to its timeline, of kept rounds."""
    ttfts_ms: Mapping[SettingId, Sequence[float]] = field(default_factory=dict)
    """TTFT of every measured request of a setting's kept rounds: in the finals, in the search where there are none."""
    importances: Mapping[str, float] | None = None
    """Knob to its share of the objective's variance (sums to 1); None when it could not be told."""
    importances_reason: str = ""
    """Why `importances` is None."""
    command: Sequence[str] = ()
    """The command line of the frozen file; () where there is none."""
    missing: Sequence[str] = ()
    """What could not be read, in sentences: a cut file, a round whose requests are gone."""

    @property
    def path(self) -> str:
        """The metric that is optimized, the first of two."""
        return objective_of(self.study).metrics[0]

    @property
    def sign(self) -> float:
        """What turns that metric into a cost."""
        return objective_of(self.study).signs[0]

    @property
    def stock(self) -> SettingLine | None:
        return line_of(self.summary, STOCK_ID)

    @property
    def compared(self) -> SettingLine | None:
        """The setting to set against stock: the winner; where that is stock or nobody, the best other finalist."""
        if self.summary.winner not in (None, STOCK_ID):
            return line_of(self.summary, self.summary.winner)
        others = [line for line in self.summary.finals if line.id != STOCK_ID and self.path in line.vs_stock]
        return min(others, key=lambda line: self.sign * line.vs_stock[self.path].change, default=None)

    def colour_role(self, setting: SettingId) -> str:
        """`stock`, `compared` or '': what a figure highlights."""
        if setting == STOCK_ID:
            return "stock"
        return "compared" if self.compared is not None and setting == self.compared.id else ""

    def chunk_of(self, line: SettingLine) -> int | None:
        """Its chunk size; for a setting that leaves it to vLLM, what the engine chose (None where nobody knows)."""
        size = line.knobs.get(CHUNK_KNOB)
        if isinstance(size, int) and not isinstance(size, bool):
            return size
        rows = (r.max_num_batched_tokens for r in self.summary.table if r.setting == line.id)
        return next(rows, None)
