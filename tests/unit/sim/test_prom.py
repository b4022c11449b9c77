"""The text of /metrics."""

from prometheus_client.parser import text_string_to_metric_families

from tuner.sim.prom import Histogram, Page


def samples(page: Page) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(page.text()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("engine", "model_name"))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_a_parser_reads_back_what_was_written() -> None:
    page = Page({"engine": "0", "model_name": 'a "b"\\c'}, 12.5)
    page.gauge("vllm:kv_cache_usage_perc", "Usage.", 0.25)
    page.counter("vllm:prefix_cache_hits", "Hits.", 64)
    page.counter("vllm:request_success", "Done.", 0, by="finished_reason", values={"stop": 1, "length": 2})
    found = samples(page)
    assert found["vllm:kv_cache_usage_perc{}"] == 0.25
    assert found["vllm:prefix_cache_hits_total{}"] == 64
    assert found["vllm:prefix_cache_hits_created{}"] == 12.5
    assert found["vllm:request_success_total{finished_reason=length}"] == 2
    [family, *_] = text_string_to_metric_families(page.text())
    assert family.samples[0].labels == {"engine": "0", "model_name": 'a "b"\\c'}


def test_a_histogram_counts_upwards() -> None:
    histogram = Histogram([1, 10])
    for value in (0.5, 1, 5, 50):
        histogram.observe(value)
    page = Page({"engine": "0"}, 1.0)
    page.histogram("vllm:iteration_tokens_total", "Tokens.", histogram)
    found = samples(page)
    assert found["vllm:iteration_tokens_total_bucket{le=1.0}"] == 2
    assert found["vllm:iteration_tokens_total_bucket{le=10.0}"] == 3
    assert found["vllm:iteration_tokens_total_bucket{le=+Inf}"] == 4
    assert found["vllm:iteration_tokens_total_count{}"] == 4
    assert found["vllm:iteration_tokens_total_sum{}"] == 56.5
