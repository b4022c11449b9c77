"""The plug-in's counters out of a log."""

from tuner.experiment.plugin_log import counted_between, last_counters
from tuner.scheduler.decisions import Counters


def line(counters: Counters) -> str:
    return f"(EngineCore pid=1) INFO 11-29 10:00:00 [plugin.py:1] chunktune counters: {counters.line()}"


def test_the_last_line_counts() -> None:
    lines = [line(Counters(held_requests=1)), "something else", line(Counters(held_requests=3, protected_blocks=7))]
    found = last_counters(lines)
    assert found is not None
    assert (found.held_requests, found.protected_blocks) == (3, 7)


def test_data_parallel_engines_are_summed() -> None:
    lines = [
        line(Counters(held_requests=n, protected_blocks=5)).replace("EngineCore", f"EngineCore_DP{engine}")
        for n, engine in ((1, 0), (2, 1), (6, 0))
    ]
    found = last_counters(lines)
    assert found is not None
    assert (found.held_requests, found.protected_blocks) == (8, 10)


def test_a_log_without_counters_has_none() -> None:
    assert last_counters(["INFO nothing", "chunktune counters: cut o"]) is None
    assert counted_between(None, None) == {}


def test_counters_become_what_grew_and_levels_stay() -> None:
    grown = counted_between(
        Counters(held_requests=2, protected_blocks=5), Counters(held_requests=6, protected_blocks=4)
    )
    assert grown["held_requests"] == 4
    assert grown["protected_blocks"] == 4
