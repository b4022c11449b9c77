"""Whether a starting engine moves: its log says something else than before, or the download of its model grows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tuner.domain.units import format_duration
from tuner.engine.effective import read_log
from tuner.engine.logs import last_words

LONGEST: Final = 3.0
"""A start ends after so many times its timeout, even if it still moves."""
TELL_EVERY_S: Final = 60.0
_LONGEST_LINE: Final = 120
_GIB: Final = 1 << 30


@dataclass
class Progress:
    """Of one start; times are seconds on one monotonic clock."""

    log_path: Path
    blobs: Path | None
    """Where the files of the model are downloaded to; None for a model that is not downloaded."""
    timeout_s: float
    """Of a start that does not move."""
    began_s: float

    def __post_init__(self) -> None:
        self._signs = self._look()
        self._blobs_before = self._signs[1]
        self._moved_s = self._told_s = self.began_s

    def over(self, now_s: float) -> str:
        """Why the start has taken too long, as the beginning of a sentence; '' while it has not."""
        signs = self._look()
        if signs != self._signs:
            self._signs, self._moved_s = signs, now_s
        if now_s - self._moved_s >= self.timeout_s:
            return f"not ready, and nothing moved for {format_duration(self.timeout_s)}"
        if now_s - self.began_s >= LONGEST * self.timeout_s:
            return f"not ready after {format_duration(LONGEST * self.timeout_s)}"
        return ""

    def told(self, now_s: float) -> str:
        """What people are told of it every minute; '' in between."""
        if now_s - self._told_s < TELL_EVERY_S:
            return ""
        self._told_s = now_s
        parts = [f"not ready after {format_duration(now_s - self.began_s)}"]
        loaded = self._signs[1] - self._blobs_before
        if loaded > 0:
            parts.append(f"{loaded / _GIB:.1f} GiB downloaded (`hf download` beforehand shows a progress bar)")
        if self._signs[0]:
            parts.append(f"its log says: {self._signs[0][:_LONGEST_LINE]}")
        return "; ".join(parts)

    def _look(self) -> tuple[str, int]:
        """The last line of the log, which an engine that hangs repeats, and the bytes of the download."""
        words = last_words(read_log(self.log_path, head_bytes=0, tail_bytes=1 << 14), 1)
        try:
            loaded = sum(entry.stat().st_size for entry in os.scandir(self.blobs)) if self.blobs else 0
        except OSError:
            loaded = 0
        return words[0] if words else "", loaded
