import pytest

from tuner.domain.observation import CounterDelta
from tuner.telemetry.families import Snapshot, Unknown, cache_info, delta, kv_usage, kv_usage_of_text, parse

NEW = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
OLD = ("vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_hits_total")


def page(*series: tuple[str, float] | str, engine: str = "0") -> str:
    """Prometheus text as vLLM writes it: each counter with its type, its label and a `_created` sibling."""
    lines = []
    for one in series:
        if isinstance(one, str):
            lines.append(one)
            continue
        name, value = one
        label = f'{{engine="{engine}",model_name="m"}}'
        kind = "counter" if name.endswith("_total") else "gauge"
        created = name.removesuffix("_total") + "_created"
        lines += [f"# HELP {name} Words.", f"# TYPE {name} {kind}", f"{name}{label} {value}"]
        lines += [f"# TYPE {created} gauge", f"{created}{label} 1.7959e+09"]
    return "\n".join(lines) + "\n"


def snapshot(*series: tuple[str, float] | str, engine: str = "0") -> Snapshot:
    found = parse(page(*series, engine=engine))
    assert isinstance(found, Snapshot)
    return found


def cache(names: tuple[str, str], queries: float, hits: float) -> tuple[tuple[str, float], tuple[str, float]]:
    return ((names[0], queries), (names[1], hits))


@pytest.mark.parametrize("names", [NEW, OLD])
def test_counters_are_deltas_of_the_round(names: tuple[str, str]) -> None:
    found = delta(snapshot(*cache(names, 1000, 900)), snapshot(*cache(names, 2000, 1000)))
    assert found.prefix_hit_rate == pytest.approx(0.1)


def test_both_names_at_once_are_one_family() -> None:
    before = snapshot(*cache(NEW, 0, 0), *cache(OLD, 0, 0))
    after = snapshot(*cache(NEW, 1000, 400), *cache(OLD, 1000, 990))
    assert delta(before, after).prefix_hit_rate == pytest.approx(0.4)


def test_half_a_family_is_passed_over_for_a_whole_one() -> None:
    before = snapshot((NEW[0], 0), *cache(OLD, 0, 0))
    after = snapshot((NEW[0], 1000), *cache(OLD, 1000, 300))
    assert delta(before, after).prefix_hit_rate == pytest.approx(0.3)


def test_neither_name_is_null_and_not_0() -> None:
    found = delta(snapshot(("vllm:other_total", 1)), snapshot(("vllm:other_total", 2)))
    assert found.prefix_hit_rate is None
    assert "prefix_cache_queries" in found.reasons["prefix_hit_rate"]


def test_a_gauge_of_the_rate_is_no_counter() -> None:
    body = snapshot(("vllm:gpu_prefix_cache_hit_rate", 0.9))
    assert delta(body, body).prefix_hit_rate is None


def test_no_query_is_null() -> None:
    body = snapshot(*cache(NEW, 1000, 900))
    found = delta(body, body)
    assert found.prefix_hit_rate is None
    assert "no prefix-cache query" in found.reasons["prefix_hit_rate"]


def test_no_hit_is_a_rate_of_0() -> None:
    assert delta(snapshot(*cache(NEW, 0, 0)), snapshot(*cache(NEW, 100, 0))).prefix_hit_rate == 0.0


def test_a_counter_that_went_back_is_null() -> None:
    found = delta(snapshot(*cache(NEW, 1000, 900)), snapshot(*cache(NEW, 500, 100)))
    assert found.prefix_hit_rate is None
    assert "went back" in found.reasons["prefix_hit_rate"]


def _engines(*counts: tuple[float, float]) -> Snapshot:
    text = "".join(page(*cache(NEW, *count), engine=str(i)) for i, count in enumerate(counts))
    lines = text.split("\n")
    grouped = [line for name in NEW for line in lines if line.startswith(name) or line == f"# TYPE {name} counter"]
    found = parse("\n".join(dict.fromkeys(grouped)) + "\n")
    assert isinstance(found, Snapshot)
    return found


def test_engines_are_summed() -> None:
    found = delta(_engines((100, 50), (100, 0)), _engines((200, 150), (400, 100)))
    assert found.prefix_hit_rate == pytest.approx(200 / 400)


def test_one_engine_s_restart_does_not_hide_behind_the_other() -> None:
    found = delta(_engines((100, 50), (100, 0)), _engines((9000, 150), (10, 0)))
    assert found.prefix_hit_rate is None
    assert "went back" in found.reasons["prefix_hit_rate"]


def test_an_engine_that_vanished_is_not_progress() -> None:
    assert delta(_engines((100, 50), (100, 0)), _engines((900, 150))).prefix_hit_rate is None


def test_a_label_that_appears_on_the_way_began_at_0() -> None:
    head = "# TYPE vllm:request_success_total counter\n"
    stop = 'vllm:request_success_total{engine="0",finished_reason="stop"} 3\n'
    length = 'vllm:request_success_total{engine="0",finished_reason="length"} 200\n'
    before, after = parse(head + stop), parse(head + stop + length)
    assert delta(before, after).requests_finished == 200


def test_created_siblings_and_buckets_are_not_counted() -> None:
    found = snapshot(
        *cache(NEW, 10, 5),
        "# TYPE vllm:iteration_tokens_total histogram",
        'vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 7.0',
        'vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 12.0',
        'vllm:iteration_tokens_total_count{engine="0"} 12.0',
        'vllm:iteration_tokens_total_sum{engine="0"} 480.0',
        "# TYPE vllm:iteration_tokens_total_created gauge",
        'vllm:iteration_tokens_total_created{engine="0"} 1.7e+09',
        "# TYPE http_requests_total counter",
        'http_requests_total{engine="0"} 5.0',
    )
    assert set(found.series) == {*NEW, "vllm:iteration_tokens_total_count", "vllm:iteration_tokens_total_sum"}


def test_steps_preemptions_tokens_and_the_server_s_own_ttft() -> None:
    def at(steps: float, preemptions: float, tokens: float, ttft_sum: float, ttft_count: float) -> Snapshot:
        return snapshot(
            ("vllm:num_preemptions_total", preemptions),
            ("vllm:prompt_tokens_total", tokens),
            "# TYPE vllm:iteration_tokens_total histogram",
            f'vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf"}} {steps}',
            f'vllm:iteration_tokens_total_count{{engine="0"}} {steps}',
            f'vllm:iteration_tokens_total_sum{{engine="0"}} {tokens}',
            "# TYPE vllm:time_to_first_token_seconds histogram",
            f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf"}} {ttft_count}',
            f'vllm:time_to_first_token_seconds_count{{engine="0"}} {ttft_count}',
            f'vllm:time_to_first_token_seconds_sum{{engine="0"}} {ttft_sum}',
        )

    found = delta(at(100, 1, 5000, 2.0, 10), at(237, 4, 9000, 12.0, 210))
    assert (found.engine_steps, found.preemptions, found.prompt_tokens) == (137, 3, 4000)
    assert found.server_ttft_mean_ms == pytest.approx(50.0)


def test_no_first_token_has_no_mean() -> None:
    body = snapshot(
        "# TYPE vllm:time_to_first_token_seconds histogram",
        'vllm:time_to_first_token_seconds_count{engine="0"} 5',
        'vllm:time_to_first_token_seconds_sum{engine="0"} 1.5',
    )
    found = delta(body, body)
    assert found.server_ttft_mean_ms is None
    assert found.reasons["server_ttft_mean_ms"] == "no first token in this span"


@pytest.mark.parametrize("name", ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"])
def test_the_kv_peak_is_over_both_ends_and_the_polls(name: str) -> None:
    before, after = snapshot((name, 0.1)), snapshot((name, 0.2))
    assert delta(before, after, [0.3, None, 0.9, 0.4]).kv_cache_usage_peak == 0.9
    assert delta(before, after, [0.1]).kv_cache_usage_peak == 0.2


def test_without_a_look_in_between_there_is_no_peak() -> None:
    idle = snapshot(("vllm:kv_cache_usage_perc", 0.0))
    found = delta(idle, idle)
    assert found.kv_cache_usage_peak is None
    assert "before the first look" in found.reasons["kv_cache_usage_peak"]


def test_the_fullest_engine_is_the_kv_usage() -> None:
    text = "# TYPE vllm:kv_cache_usage_perc gauge\n" + "".join(
        f'vllm:kv_cache_usage_perc{{engine="{i}"}} {v}\n' for i, v in enumerate((0.2, 0.7))
    )
    found = parse(text)
    assert isinstance(found, Snapshot)
    assert kv_usage(found) == 0.7
    assert kv_usage_of_text("# HELP python_gc Words.\npython_gc 5\n" + text) == 0.7


def test_a_page_without_kv_usage_is_null() -> None:
    body = snapshot(("vllm:num_preemptions_total", 0))
    found = delta(body, body, [None])
    assert found.kv_cache_usage_peak is None
    assert "kv_cache_usage_perc" in found.reasons["kv_cache_usage_peak"]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ('block_size="16",kv_cache_size_tokens="20480",num_gpu_blocks="1281"', (20480, 16)),
        ('block_size="4",num_gpu_blocks="1280"', (None, 4)),
        ('block_size="16",num_gpu_blocks="None"', (None, 16)),
        ('model_name="m"', (None, None)),
        ('block_size="1000000000000000000",num_gpu_blocks="1280"', (None, None)),
        (f'block_size="16",num_gpu_blocks="{"9" * 5000}"', (None, 16)),
        (f'block_size="{"9" * 5000}",num_gpu_blocks="{"9" * 3000}"', (None, None)),
    ],
)
def test_the_pool_s_size_is_read_from_its_labels(labels: str, expected: tuple[int | None, int | None]) -> None:
    found = parse(f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{labels}}} 1.0\n")
    assert isinstance(found, Snapshot)
    assert cache_info(found) == expected
    assert delta(found, found).kv_cache_tokens == expected[0]


def test_the_pools_of_several_engines_are_summed() -> None:
    found = parse(
        "# TYPE vllm:cache_config_info gauge\n"
        'vllm:cache_config_info{engine="0",block_size="16",kv_cache_size_tokens="100"} 1.0\n'
        'vllm:cache_config_info{engine="1",block_size="16",kv_cache_size_tokens="120"} 1.0\n'
    )
    assert isinstance(found, Snapshot)
    assert cache_info(found) == (220, 16)


def test_the_plug_in_s_counters_are_deltas_and_its_gauges_stand() -> None:
    before = snapshot(("chunktune:held_requests_total", 5), ("chunktune:cached_blocks", 70))
    after = snapshot(("chunktune:held_requests_total", 9), ("chunktune:cached_blocks", 64))
    assert delta(before, after).plugin == {"held_requests": 4, "cached_blocks": 64}


def test_a_plug_in_that_started_again_is_a_reason() -> None:
    found = delta(snapshot(("chunktune:held_requests_total", 5)), snapshot(("chunktune:held_requests_total", 1)))
    assert found.plugin == {}
    assert "went back" in found.reasons["plugin.held_requests"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("end", ["before", "after"])
def test_a_value_that_is_not_finite_is_null_with_the_reason(value: float, end: str) -> None:
    good, bad = snapshot(*cache(NEW, 1000, 900)), snapshot(*cache(NEW, 1000, value))
    found = delta(bad, good) if end == "before" else delta(good, bad)
    assert found.prefix_hit_rate is None
    assert found.reasons["prefix_hit_rate"] == f"{NEW[1]} is not finite"


@pytest.mark.parametrize("which", ["before", "after", "both"])
def test_an_unreadable_end_makes_everything_unknown_with_the_reason(which: str) -> None:
    good, bad = snapshot(*cache(NEW, 1000, 900)), Unknown("/metrics answered 500")
    ends = {"before": (bad, good), "after": (good, bad), "both": (bad, bad)}[which]
    found = delta(*ends)
    for name in (
        "prefix_hit_rate",
        "engine_steps",
        "preemptions",
        "requests_left",
        "kv_cache_usage_peak",
        "kv_cache_tokens",
    ):
        assert getattr(found, name) is None
        assert found.reasons[name]
    assert found.reasons["prefix_hit_rate"] == "/metrics answered 500"
    assert found.plugin == {}


def test_polls_survive_an_unreadable_end() -> None:
    found = delta(Unknown("/metrics answered 500"), Unknown("/metrics answered 500"), [0.5])
    assert found.kv_cache_usage_peak == 0.5
    assert "kv_cache_usage_peak" not in found.reasons


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "<html>not found</html>", "other 1\n"])
def test_a_page_without_our_series_says_nothing_and_crashes_nothing(text: str) -> None:
    found = parse(text)
    assert isinstance(found, Snapshot)
    empty = delta(found, found)
    assert empty == CounterDelta(reasons=empty.reasons)


@pytest.mark.parametrize("text", ["vllm:x{engine= 1\n", "vllm:x{} one\n", 'vllm:x{a="1" 5\n'])
def test_a_broken_page_is_unknown(text: str) -> None:
    found = parse(text)
    assert isinstance(found, Unknown)
    assert "Prometheus" in found.reason


def test_nothing_of_a_server_is_counted_as_0_when_it_says_nothing() -> None:
    body = snapshot(("vllm:unrelated_total", 1))
    found = delta(body, body)
    unsaid = [n for n in CounterDelta.__dataclass_fields__ if n not in ("plugin", "reasons")]
    assert all(getattr(found, n) is None for n in unsaid)
    assert all(found.reasons[n] for n in unsaid)


def started(at_s: float, *series: tuple[str, float] | str) -> Snapshot:
    return snapshot(*series, "# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {at_s}")


def test_counters_of_one_process_connect() -> None:
    found = delta(started(1.7e9, *cache(NEW, 1000, 900)), started(1.7e9, *cache(NEW, 2000, 1000)))
    assert found.prefix_hit_rate == pytest.approx(0.1)


@pytest.mark.parametrize("ahead", [1.0, 10.0], ids=["restarted", "a replica that has done more"])
def test_counters_of_another_process_do_not(ahead: float) -> None:
    """Several replicas behind one address, or a server that came back: nothing went back, and nothing connects."""
    before = started(1.7e9, *cache(NEW, 1000, 900), ("vllm:request_success_total", 100))
    after = started(1.7e9 + 5, *cache(NEW, 1500 * ahead, 1400 * ahead), ("vllm:request_success_total", 150 * ahead))
    found = delta(before, after)
    assert found.prefix_hit_rate is None
    assert found.requests_finished is None
    assert "another server answered" in found.reasons["prefix_hit_rate"]


def test_requests_that_are_left_run_or_wait() -> None:
    running = ("vllm:num_requests_running", 2)
    assert delta(snapshot(running), snapshot(running, ("vllm:num_requests_waiting", 3))).requests_left == 5
    assert delta(snapshot(running), snapshot(("vllm:num_requests_running", 0))).requests_left == 0
