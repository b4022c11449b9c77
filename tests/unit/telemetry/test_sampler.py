from collections.abc import Mapping

import pytest

from tuner.clock import FakeClock
from tuner.domain.observation import MemorySample
from tuner.telemetry import Sampler, SourceError, Unavailable
from tuner.telemetry.source import Tree


class Scripted:
    """A source that shows the numbers it is given; an exception among them is raised."""

    name = "simulated"

    def __init__(self, *looks: int | Exception, opens: Exception | None = None, reason: str = "") -> None:
        self.reason = reason
        self._looks = list(looks)
        self._opens = opens

    def open(self) -> None:
        if self._opens is not None:
            raise self._opens

    def sample(self, at_s: float) -> list[MemorySample]:
        look = self._looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return [MemorySample(at_s, "d", look)]

    def total_bytes(self) -> Mapping[str, int]:
        return {"d": 100}

    def close(self) -> None: ...


def looked(source: Scripted, times: int) -> Sampler:
    """A sampler after looks at 1000.0, 1000.1, ... s."""
    clock = FakeClock(1000.0)
    sampler = Sampler(source, 0.1, clock)
    if sampler.prepare():
        for _ in range(times):
            sampler.look()
            clock.advance(0.1)
    return sampler


def test_a_timeline_is_cut_out_of_the_samples_both_ends_included() -> None:
    sampler = looked(Scripted(1, 2, 3, 4, 5), 5)
    timeline = sampler.timeline(1000.05, 1000.3001)
    assert [s.used_bytes for s in timeline.samples] == [2, 3, 4]
    assert (timeline.source, timeline.total_bytes, timeline.reason) == ("simulated", {"d": 100}, "")
    assert [s.used_bytes for s in sampler.timeline(1000.0, 1000.0).samples] == [1]
    assert sampler.timeline(0.0, 999.0).samples == []


def test_a_source_that_cannot_open_makes_it_unavailable_with_the_reason() -> None:
    timeline = looked(Scripted(opens=SourceError("NVML: Driver Not Loaded")), 3).timeline(0, 1e9)
    assert (timeline.source, timeline.samples, timeline.reason) == ("unavailable", [], "NVML: Driver Not Loaded")


@pytest.mark.parametrize("error", [RuntimeError("odd"), OSError("gone"), KeyError("x")])
def test_a_look_that_fails_leaves_a_gap_and_a_reason(error: Exception) -> None:
    timeline = looked(Scripted(1, error, 3), 3).timeline(0, 1e9)
    assert [s.used_bytes for s in timeline.samples] == [1, 3]
    assert timeline.source == "simulated"
    assert "failed" in timeline.reason


def test_the_source_s_own_reason_is_passed_on() -> None:
    assert looked(Scripted(1, reason="no NVML: host instead"), 1).timeline(0, 1e9).reason == "no NVML: host instead"


def test_unavailable_stays_unavailable() -> None:
    timeline = looked(Unavailable("the server is elsewhere"), 2).timeline(0, 1e9)
    assert (timeline.source, timeline.samples, timeline.reason) == ("unavailable", [], "the server is elsewhere")


def test_a_sampler_that_never_ran_stops_without_ado() -> None:
    Sampler(Scripted(), 0.1).stop()


@pytest.mark.parametrize("interval_s", [0.0, -1.0])
def test_the_interval_is_above_0(interval_s: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Sampler(Scripted(), interval_s)


def test_the_process_tree_is_looked_up_once_a_second() -> None:
    trees = [[1], [1, 2], [1, 3]]
    tree = Tree(lambda: trees.pop(0))
    assert [tree.at(at_s) for at_s in (10.0, 10.1, 10.9, 11.0, 11.5, 12.1)] == [[1], [1], [1], [1, 2], [1, 2], [1, 3]]
