import pytest

from tuner.domain.measurement import Latency, Measurement, Memory, metric
from tuner.measure import summarize


def test_the_median_is_by_metric_over_the_rounds(make) -> None:
    seen = [make.natural(i, scale=s) for i, s in enumerate((1.0, 1.1, 1.2))]
    rounds = [make.measure(o) for o in seen]
    found = summarize(rounds, seen)
    for path in ("ttft_ms.p50", "ttft_ms.p90", "e2e_ms.mean", "request_throughput"):
        assert metric(found.median, path) == sorted(metric(r, path) for r in rounds)[1]


def test_there_is_no_median_of_no_rounds() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        summarize([], [])


def test_rounds_and_observations_run_parallel(make) -> None:
    with pytest.raises(ValueError, match="2 rounds, but 1"):
        summarize([Measurement(), Measurement()], [make.natural(1)])


def test_the_pool_is_over_all_requests(make) -> None:
    seen = [
        make.observe([make.request(i, float(v)) for i, v in enumerate(part)]) for part in (range(1, 51), range(51, 101))
    ]
    found = summarize([make.measure(o) for o in seen], seen)
    assert (found.pooled["ttft_ms"].p99, found.pooled["ttft_ms"].n) == (pytest.approx(99), 100)


def test_failures_and_peaks_are_those_of_the_worst_round() -> None:
    rounds = [
        Measurement(failed_requests=f, memory=Memory(source="nvml", peak_bytes={"a": p}, peak_fraction=p / 100))
        for f, p in ((0, 70), (0, 90), (5, 80))
    ]
    median = summarize(rounds, []).median
    assert median.failed_requests == 5
    assert (median.memory.peak_bytes, median.memory.peak_fraction) == ({"a": 90}, 0.9)


def test_an_interval_holds_its_median_and_stays_in_its_range(make) -> None:
    seen = [make.natural(i) for i in range(3)]
    rounds = [
        make.measure(o).model_copy(update={"prefix_hit_rate": h}) for o, h in zip(seen, (0.99, 0.9, 1.0), strict=True)
    ]
    found = summarize(rounds, seen)
    assert {"ttft_ms.p50", "ttft_ms.p99", "itl_ms.p90", "cold_ttft_ms.p90", "request_throughput"} <= set(found.ci95)
    for path, (low, high) in found.ci95.items():
        assert low <= metric(found.median, path) <= high
        assert low >= 0
    assert found.ci95["prefix_hit_rate"][1] <= 1


def test_one_round_has_intervals_from_its_requests_alone(make) -> None:
    seen = [make.natural(1)]
    found = summarize([make.measure(o) for o in seen], seen)
    assert "ttft_ms.p90" in found.ci95
    assert "request_throughput" not in found.ci95


def test_a_metric_that_some_rounds_lack_is_said() -> None:
    one = Latency(p50=1, p90=1, p99=1, mean=1, n=200)
    found = summarize([Measurement(ttft_ms=one), Measurement(ttft_ms=one, engine_steps=5)], [])
    assert found.median.engine_steps == 5
    assert "engine_steps was measured in 1 of 2 rounds" in found.warnings


def test_a_null_of_all_rounds_keeps_its_reason(make) -> None:
    seen = [make.natural(i) for i in range(2)]
    median = summarize([make.measure(o) for o in seen], seen).median
    assert median.engine_steps is None
    assert median.unmeasured["engine_steps"]
    assert "ttft_ms" not in median.unmeasured


def test_rounds_that_disagree_beyond_their_spread_are_said(make) -> None:
    seen = [make.natural(i, scale=s, spread=0.1) for i, s in enumerate((1.0, 1.0, 1.4))]
    warnings = summarize([make.measure(o) for o in seen], seen).warnings
    assert any("rounds disagree in ttft_ms.p50" in w for w in warnings)


@pytest.mark.parametrize("seed", range(10))
def test_rounds_that_agree_are_not(make, seed: int) -> None:
    seen = [make.natural(seed * 10 + i, scale=s) for i, s in enumerate((1.0, 1.02, 0.98))]
    assert not any("disagree" in w for w in summarize([make.measure(o) for o in seen], seen).warnings)


def test_p99_is_doubted_where_even_the_pool_is_small(make) -> None:
    small = [make.observe([make.request(i, 80.0 + i) for i in range(30)]) for _ in range(3)]
    assert any(
        "P99 of" in w and "over all rounds" in w for w in summarize([make.measure(o) for o in small], small).warnings
    )
    enough = [make.observe([make.request(i, 80.0 + i) for i in range(60)]) for _ in range(3)]
    assert not any("P99" in w for w in summarize([make.measure(o) for o in enough], enough).warnings)


def test_classes_have_medians_and_intervals(make) -> None:
    seen = [make.observe([make.request(i, v + i % 7, group="chat") for i in range(40)]) for v in (80.0, 90.0, 100.0)]
    found = summarize([make.measure(o) for o in seen], seen)
    assert found.median.groups["chat"].p50 == pytest.approx(93)
    low, high = found.ci95["groups.chat.p50"]
    assert low <= 93 <= high
