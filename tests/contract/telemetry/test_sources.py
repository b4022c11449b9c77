"""One contract over every memory source: the driver's real path, the host, the simulated engine."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from tuner.domain.observation import MemoryBreakdown
from tuner.telemetry import HostSource, Sampler, SimulatedSource, SourceError, Unavailable, memory_source

GPU = "GPU-11111111-2222-3333-4444-555555555555"
OTHER = "GPU-99999999-8888-7777-6666-555555555555"
TWO_DEVICES = f"""\
driver 570.86.15
device {GPU} 85899345920 NVIDIA H100 80GB HBM3
device {OTHER} 85899345920 NVIDIA H100 80GB HBM3
used {GPU} 77309411328
used {OTHER} 1073741824
busy {GPU} 87
"""


@pytest.fixture(params=["nvml", "host", "simulated"])
def working(request: pytest.FixtureRequest, child, ask_nvml) -> Callable[[], Any]:
    """Puts one kind of source to the contract and gives what it showed."""
    match request.param:
        case "nvml":
            return lambda: ask_nvml(TWO_DEVICES, "facts")
        case "host":
            return lambda: child.facts(HostSource(lambda: [os.getpid()]))
        case _:
            page = request.getfixturevalue("memory_page")
            return lambda: child.facts(SimulatedSource(page.url))


def test_a_source_keeps_the_contract(working) -> None:
    found = working()
    expected = {"nvml": [GPU, OTHER], "host": ["host"], "simulated": ["sim-0", "sim-1"]}
    assert found["devices"] == expected[found["name"]]
    assert set(found["totals"]) == set(found["devices"])


def test_a_process_that_is_gone_is_left_out() -> None:
    source = HostSource(lambda: [os.getpid(), 2**22 + 1])
    assert [s.used_bytes > 0 for s in source.sample(0.0)] == [True]


def test_a_tree_that_is_gone_shows_nothing() -> None:
    assert HostSource(lambda: [2**22 + 1]).sample(0.0) == []


def test_the_simulated_engine_tells_its_parts(memory_page) -> None:
    source = SimulatedSource(memory_page.url)
    source.sample(0.0)
    assert source.breakdown() == MemoryBreakdown(35, 5, 30, 12)
    source.close()


@pytest.mark.parametrize(
    "answer", [(500, b"{}"), (404, b""), (200, b"no json"), {"devices": None}, {}, [], {"devices": [{}]}]
)
def test_a_page_that_fails_is_a_reason_and_no_crash(memory_page, answer: object) -> None:
    memory_page.says(answer)
    source = SimulatedSource(memory_page.url)
    with pytest.raises(SourceError, match="/chunktune/memory"):
        source.open()
    assert source.sample(0.0) == []
    assert source.reason
    source.close()


def test_a_page_that_recovers_is_read_again(memory_page) -> None:
    good = memory_page.answers[0]
    memory_page.says((500, b""), good)
    source = SimulatedSource(memory_page.url)
    assert source.sample(0.0) == []
    assert [s.device for s in source.sample(1.0)] == ["sim-0", "sim-1"]
    source.close()


def test_a_server_that_is_gone_is_a_reason(memory_page) -> None:
    memory_page.close()
    source = SimulatedSource(memory_page.url)
    assert source.sample(0.0) == []
    assert "did not answer" in source.reason


def test_proxy_variables_do_not_turn_the_simulated_engine_away(memory_page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    source = SimulatedSource(memory_page.url)
    assert len(source.sample(0.0)) == 2
    source.close()


def test_only_an_http_url_is_a_simulated_engine() -> None:
    with pytest.raises(ValueError, match="http"):
        SimulatedSource("unix:/tmp/x")


def test_nothing_to_look_at_is_unavailable_with_its_reason() -> None:
    source = Unavailable("no NVML here")
    source.open()
    assert (source.sample(0.0), source.total_bytes(), source.reason) == ([], {}, "no NVML here")


def test_the_simulated_engine_is_asked_itself(memory_page) -> None:
    source = memory_source("sim", memory_page.url, lambda: [os.getpid()])
    assert source.name == "simulated"
    source.close()


def test_the_sampler_s_thread_gathers_and_stops(memory_page) -> None:
    sampler = Sampler(SimulatedSource(memory_page.url), 0.01)
    sampler.start()
    deadline = 500
    while deadline and not sampler.timeline(0.0, 1e12).samples:
        deadline -= 1
        sampler._stop.wait(0.01)
    sampler.stop()
    timeline = sampler.timeline(0.0, 1e12)
    assert timeline.source == "simulated"
    assert {s.device for s in timeline.samples} == {"sim-0", "sim-1"}
    assert timeline.total_bytes == {"sim-0": 100, "sim-1": 100}
    assert not sampler._thread.is_alive()
