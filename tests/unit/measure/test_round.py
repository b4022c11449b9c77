import pytest

from tuner.domain.measurement import Measurement
from tuner.domain.observation import CounterDelta, MemoryBreakdown, MemorySample, MemoryTimeline

NULLABLE = [
    name
    for name, field in Measurement.model_fields.items()
    if field.default is None and name not in ("failed_requests", "requests", "oom_events")
]


def test_latencies_come_from_the_requests_of_their_phase(make) -> None:
    records = [make.request(i, 500.0, phase="cold") for i in range(4)]
    records += [make.request(i, float(i)) for i in range(4, 104)]
    found = make.measure(make.observe(records))
    assert (found.ttft_ms.p50, found.ttft_ms.p99, found.ttft_ms.n) == (pytest.approx(53), pytest.approx(102), 100)
    assert (found.cold_ttft_ms.p50, found.cold_ttft_ms.n) == (pytest.approx(500), 4)


def test_an_open_loop_is_cold_at_the_first_request_of_each_prefix(make) -> None:
    records = [
        make.request(0, 400.0, prefix_first=True),
        make.request(1, 50.0),
        make.request(2, 410.0, prefix_first=True),
    ]
    found = make.measure(make.observe(records, concurrency=None))
    assert (found.cold_ttft_ms.n, found.cold_ttft_ms.p99) == (2, pytest.approx(410))


def test_a_failed_request_enters_no_latency_and_is_counted(make) -> None:
    found = make.measure(make.observe([make.request(0, 80.0), make.failure(1), make.failure(2)]))
    assert (found.failed_requests, found.requests, found.ttft_ms.n) == (2, 3, 1)
    assert found.ttft_ms.p50 == pytest.approx(80)


@pytest.mark.parametrize("records", [[], ["failure"]])
def test_every_null_has_its_reason(make, records: list[str]) -> None:
    found = make.measure(make.observe([make.failure(i) for i, _ in enumerate(records)]))
    nulls = [name for name in NULLABLE if getattr(found, name) is None]
    assert set(NULLABLE) - set(nulls) <= {"request_throughput", "output_token_throughput"}
    assert all(found.unmeasured.get(name) for name in nulls)


def test_what_was_measured_has_no_reason_for_being_null(make) -> None:
    found = make.measure(make.natural(1), "ttft_ms.p99 <= 300")
    assert [n for n in NULLABLE if getattr(found, n) is not None and n in found.unmeasured] == []


@pytest.mark.parametrize(
    ("cached", "side"), [(1050, "ttft_cached_ms"), (1049, "ttft_uncached_ms"), (0, "ttft_uncached_ms")]
)
def test_half_of_the_prompt_decides_the_side(make, cached: int, side: str) -> None:
    found = make.measure(make.observe([make.request(0, 80.0, cached_tokens=cached)]))
    other = ({"ttft_cached_ms", "ttft_uncached_ms"} - {side}).pop()
    assert getattr(found, side).n == 1
    assert getattr(found, other) is None
    assert other in found.unmeasured


def test_a_server_that_tells_no_cached_tokens_leaves_both_sides_null(make) -> None:
    found = make.measure(make.observe([make.request(0, 80.0, cached_tokens=None)]))
    assert (found.ttft_cached_ms, found.ttft_uncached_ms) == (None, None)
    assert "--enable-prompt-tokens-details" in found.unmeasured["ttft_uncached_ms"]


def test_a_request_without_details_beside_others_with_them_found_nothing_cached(make) -> None:
    found = make.measure(make.observe([make.request(0, 300.0, cached_tokens=None), make.request(1, 80.0)]))
    assert (found.ttft_uncached_ms.n, found.ttft_cached_ms.n) == (1, 1)


def test_throughput_is_over_the_measured_window(make) -> None:
    # 50 sends 20 ms apart, the last one ends 140 ms after its send: 49 * 0.02 + 0.14 s.
    found = make.measure(make.observe([make.request(i, 100.0, (20.0, 20.0)) for i in range(50)]))
    window_s = 49 * 0.02 + 0.14
    assert found.request_throughput == pytest.approx(50 / window_s)
    assert found.output_token_throughput == pytest.approx(150 / window_s)


def test_output_tokens_that_usage_does_not_give_are_not_guessed(make) -> None:
    found = make.measure(make.observe([make.request(0, 80.0, output_tokens=None)]))
    assert found.output_token_throughput is None
    assert found.tpot_ms is None
    assert "usage" in found.unmeasured["output_token_throughput"]


def test_one_output_token_has_no_tpot_and_no_itl(make) -> None:
    found = make.measure(make.observe([make.request(0, 80.0, ())]))
    assert (found.tpot_ms, found.itl_ms) == (None, None)
    assert found.ttft_ms.p50 == pytest.approx(80)


def test_goodput_counts_requests_inside_every_limit(make) -> None:
    records = [
        make.request(0, 100.0),
        make.request(1, 300.0),
        make.request(2, 100.0, (20.0, 150.0)),
        make.failure(3),
    ]
    found = make.measure(make.observe(records), "ttft_ms.p99 <= 280", "itl_ms.p99 <= 120")
    assert found.goodput_share == pytest.approx(1 / 4)
    assert found.goodput == pytest.approx(found.request_throughput / 3)


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        (("ttft_ms.p50 <= 100", "ttft_ms.p99 <= 400"), 1.0),
        (("ttft_cached_ms.p99 <= 1",), 0.5),
        (("ttft_uncached_ms.p99 <= 1",), 0.5),
        (("e2e_ms.p99 <= 1",), 0.0),
        (("itl_ms.mean <= 21",), 1.0),
    ],
)
def test_limits_become_limits_on_each_request(make, limits: tuple[str, ...], share: float) -> None:
    records = [make.request(0, 150.0, cached_tokens=0), make.request(1, 350.0)]
    assert make.measure(make.observe(records), *limits).goodput_share == pytest.approx(share)


@pytest.mark.parametrize(("ttft_ms", "good"), [(279.9, 1.0), (280.5, 0.0)])
def test_a_limit_is_met_up_to_its_value(make, ttft_ms: float, good: float) -> None:
    assert make.measure(make.observe([make.request(0, ttft_ms)]), "ttft_ms.p99 <= 280").goodput_share == good


@pytest.mark.parametrize("limits", [(), ("failed_requests == 0",), ("cold_ttft_ms.p90 <= 400",), ("ttft_ms.p50 >= 3",)])
def test_without_a_latency_limit_goodput_is_null(make, limits: tuple[str, ...]) -> None:
    found = make.measure(make.observe([make.request(0, 80.0)]), *limits)
    assert (found.goodput, found.goodput_share) == (None, None)
    assert "no latency limit" in found.unmeasured["goodput"]


def test_the_answer_of_a_model_that_thinks_first_is_apart(make) -> None:
    record = make.request(0, 80.0)
    record.first_answer_s = record.sent_s + 1.2
    found = make.measure(make.observe([record]))
    assert found.answer_ttft_ms.p50 == pytest.approx(1200)
    assert found.ttft_ms.p50 == pytest.approx(80)


def test_classes_are_told_apart(make) -> None:
    found = make.measure(make.observe([make.request(0, 80.0, group="chat"), make.request(1, 900.0, group="document")]))
    assert {name: group.p50 for name, group in found.groups.items()} == {
        "chat": pytest.approx(80),
        "document": pytest.approx(900),
    }


def test_counters_and_their_reasons_are_taken_over(make) -> None:
    counters = CounterDelta(
        engine_steps=137.0, preemptions=0.0, kv_cache_tokens=20480, reasons={"prefix_hit_rate": "x"}
    )
    found = make.measure(make.observe([make.request(0, 80.0, cached_tokens=None)]), counters=counters)
    assert (found.engine_steps, found.preemptions, found.kv_cache_tokens) == (137.0, 0.0, 20480)
    assert found.unmeasured["prefix_hit_rate"] == "x"


def test_the_hit_rate_of_usage_stands_in_and_says_so(make) -> None:
    counters = CounterDelta(reasons={"prefix_hit_rate": "/metrics answered 500"})
    found = make.measure(
        make.observe([make.request(0, 80.0), make.request(1, 80.0, cached_tokens=0)]), counters=counters
    )
    assert found.prefix_hit_rate == pytest.approx(2048 / 4200)
    assert "answered 500" in found.derived["prefix_hit_rate"]
    assert "prefix_hit_rate" not in found.unmeasured


def test_counted_prefill_chunks_win_over_the_least_possible(make) -> None:
    counters = CounterDelta(plugin={"prefill_chunks": 300.0, "prefills": 100.0})
    found = make.measure(make.observe([make.request(0, 80.0)]), counters=counters, chunk_tokens=16)
    assert found.prefill_chunks_per_request == 3.0
    assert "prefill_chunks_per_request" not in found.derived


@pytest.mark.parametrize(("cached", "chunk", "least"), [(2048, 512, 1), (0, 512, 5), (2048, 32, 2), (2100, 512, 1)])
def test_else_the_fewest_chunks_of_the_uncached_prompt_with_a_label(
    make, cached: int, chunk: int, least: float
) -> None:
    found = make.measure(make.observe([make.request(0, 80.0, cached_tokens=cached)]), chunk_tokens=chunk)
    assert found.prefill_chunks_per_request == least
    assert found.derived["prefill_chunks_per_request"].startswith("at least")


def test_without_chunk_size_or_cached_tokens_chunks_are_null(make) -> None:
    assert "no series" in make.measure(make.observe([make.request(0, 80.0)])).unmeasured["prefill_chunks_per_request"]
    silent = make.measure(make.observe([make.request(0, 80.0, cached_tokens=None)]), chunk_tokens=512)
    assert silent.prefill_chunks_per_request is None


def test_memory_peaks_by_device_and_as_a_share(make) -> None:
    seen = [(1, "a", 60, 0.5), (2, "a", 80, 0.7), (1, "b", 50, None), (2, "b", 40, None)]
    timeline = MemoryTimeline("nvml", [MemorySample(*s, engine_bytes=30) for s in seen], {"a": 100, "b": 100})
    found = make.measure(make.observe([make.request(0, 80.0)]), memory=timeline)
    assert found.memory.peak_bytes == {"a": 80, "b": 50}
    assert found.memory.engine_peak_bytes == {"a": 30, "b": 30}
    assert found.memory.peak_fraction == pytest.approx(0.8)
    assert found.gpu_utilization == {"a": pytest.approx(0.6)}


def test_kv_in_use_is_the_pool_times_its_usage(make) -> None:
    found = make.measure(
        make.observe([make.request(0, 80.0)]),
        counters=CounterDelta(kv_cache_usage_peak=0.25),
        breakdown=MemoryBreakdown(weights_bytes=5, kv_pool_bytes=1000),
    )
    assert found.memory.breakdown.kv_in_use_peak_bytes == 250
    assert found.memory.breakdown.activation_peak_bytes is None


@pytest.mark.parametrize("reason", ["NVML: Not Supported", ""])
def test_memory_without_samples_is_null_with_a_reason(make, reason: str) -> None:
    found = make.measure(make.observe([make.request(0, 80.0)]), memory=MemoryTimeline("nvml", [], {"a": 100}, reason))
    assert (found.memory.peak_bytes, found.memory.peak_fraction) == (None, None)
    assert found.memory.reason
    assert found.unmeasured["memory"]
    assert found.unmeasured["gpu_utilization"]


def test_a_discarded_round_keeps_its_numbers(make) -> None:
    observation = make.observe([make.request(0, 80.0)], discarded="the loop lagged 200 ms")
    observation.client.limited, observation.client.limited_reason = True, "the loop lagged 200 ms"
    found = make.measure(observation)
    assert found.ttft_ms.n == 1
    assert found.client.limited_reason == "the loop lagged 200 ms"


def test_out_of_memory_is_counted_from_the_requests(make) -> None:
    records = [make.request(0, 80.0), make.failure(1, "500: CUDA out of memory. Tried to allocate")]
    assert make.measure(make.observe(records)).oom_events == 1


def test_several_tokens_in_a_piece_are_said(make) -> None:
    found = make.measure(make.observe([make.request(i, 80.0, output_tokens=9) for i in range(100)]))
    assert any("3.0 tokens arrive in one piece" in w for w in found.warnings)


def test_failures_are_said_by_kind_with_the_first(make) -> None:
    records = [make.request(i, 80.0) for i in range(9)] + [make.failure(9, "HTTP 503: overloaded")]
    found = make.measure(make.observe(records))
    assert found.failed_requests == 1
    assert "1 of 10 requests failed (1 no_token); the first: HTTP 503: overloaded" in found.warnings


def test_a_failed_request_has_given_nothing_of_what_was_asked(make) -> None:
    records = [make.request(i, 80.0, output_tokens_planned=3) for i in range(9)] + [make.failure(9)]
    records[9].output_tokens_planned = 3
    assert make.measure(make.observe(records)).answered_share == pytest.approx(0.9)


def test_shorter_answers_of_a_round_that_counts_are_said(make) -> None:
    found = make.measure(make.observe([make.request(0, 80.0, output_tokens_planned=64)]))
    assert found.answered_share == pytest.approx(3 / 64)
    assert any("3.0 output tokens on average, 64.0 asked for" in w for w in found.warnings)


def test_answers_of_an_open_length_have_no_share(make) -> None:
    found = make.measure(make.observe([make.request(0, 80.0)]))
    assert found.answered_share is None
    assert "does not say" in found.unmeasured["answered_share"]


def test_answers_whose_length_the_server_does_not_tell_are_said(make) -> None:
    found = make.measure(make.observe([make.request(0, 80.0, output_tokens_planned=3, output_tokens=None)]))
    assert found.answered_share is None
    assert any("is not known" in w for w in found.warnings)


def test_a_token_in_several_pieces_is_said(make) -> None:
    found = make.measure(make.observe([make.request(i, 80.0, output_tokens=1) for i in range(100)]))
    assert any("a token has 3.0 pieces" in w for w in found.warnings)


def test_the_pool_is_what_the_log_says_where_metrics_do_not(make) -> None:
    observation = make.observe([make.request(0, 80.0)])
    reasons = {"kv_cache_tokens": "not said"}
    counters = CounterDelta(reasons=reasons)
    assert make.measure(observation, counters=counters, kv_cache_tokens=1000).kv_cache_tokens == 1000
    assert make.measure(observation, counters=counters).unmeasured["kv_cache_tokens"] == "not said"
    both = CounterDelta(kv_cache_tokens=2000)
    assert make.measure(observation, counters=both, kv_cache_tokens=1000).kv_cache_tokens == 2000


def test_other_prompts_of_a_round_that_counts_are_said(make) -> None:
    records = [make.request(i, 80.0, prompt_tokens_planned=2100 if i else 1800) for i in range(50)]
    said = "1 of 50 prompts were not as long as planned: 2100 tokens on average by the server's count, 1800 planned"
    assert said in make.measure(make.observe(records)).warnings
