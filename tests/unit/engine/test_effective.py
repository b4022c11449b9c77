"""Reading back what an engine runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.domain.setting import Scalar
from tuner.engine.effective import cached_revision, difference, from_log, with_metrics, with_server_info

LOGS = Path(__file__).parent / "logs"
GIB = 1024**3


def test_a_real_log_of_the_cpu_build() -> None:
    config = from_log((LOGS / "cpu_healthy_and_stopped.log").read_text().splitlines())
    assert config.args["max_num_batched_tokens"] == 512
    assert config.args["enable_chunked_prefill"] is True
    assert config.args["enable_prefix_caching"] is True
    assert config.args["max_model_len"] == 8192
    assert (config.kv_cache_tokens, config.max_concurrency) == (20480, 2.5)
    assert config.breakdown.kv_pool_bytes == GIB
    assert config.vllm_version == "0.32.0"
    assert config.model_revision is None


def test_a_gpu_log_tells_the_parts_of_the_memory() -> None:
    config = from_log((LOGS / "gpu_healthy.log").read_text().splitlines())
    assert config.breakdown.weights_bytes == round(32.88 * GIB)
    assert config.breakdown.activation_peak_bytes == round(2.89 * GIB)
    assert config.breakdown.kv_pool_bytes == round(34.21 * GIB)
    assert config.kv_cache_tokens == 448_384


GRAPHS = "CUDA graph pool memory: 0.81 GiB (actual), 0.75 GiB (estimated), difference: 0.06 GiB (7.4%)."
USAGE = "Actual usage is 33.4 GiB for consumed memory (weights + non-torch), 3.64 GiB for peak activation, and 0.81 GiB"


@pytest.mark.parametrize(("profiling", "activation_gib"), [("enabled", 2.89), ("disabled", 3.64)])
def test_the_activation_peak_is_told_without_cuda_graphs(profiling: str, activation_gib: float) -> None:
    """Their estimate is part of vLLM's number unless it was turned off; every rank tells both."""
    said = f"INFO 11-29 10:54:19 [gpu_worker.py:1] CUDA graph memory profiling is {profiling} (default since"
    config = from_log(
        [said, *(f"(Worker_TP{n} pid={n}) INFO 11-29 10:54:19 {t}" for n in (0, 1) for t in (GRAPHS, USAGE))]
    )
    assert config.breakdown.activation_peak_bytes == pytest.approx(activation_gib * GIB, abs=2)


def test_a_pool_of_a_given_size_is_read() -> None:
    said = "Initial free memory 78.3 GiB, reserved 40.0 GiB memory for KV Cache as specified by kv_cache_memory_bytes"
    assert from_log([f"INFO 11-29 10:54:19 [gpu_worker.py:1] {said}"]).breakdown.kv_pool_bytes == 40 * GIB


def test_data_parallel_engines_add_up_and_hybrid_blocks_are_seen() -> None:
    config = from_log(
        [
            "(EngineCore_DP0 pid=1) INFO 11-29 10:54:19 [k.py:1] GPU KV cache size: 1,000 tokens",
            "(EngineCore_DP1 pid=2) INFO 11-29 10:54:19 [k.py:1] GPU KV cache size: 1,200 tokens",
            "INFO 11-29 10:54:19 [c.py:1] Setting attention block size to 2096 tokens to ensure that",
        ]
    )
    assert config.kv_cache_tokens == 2200
    assert config.block_size == 2096


def test_a_silent_log_is_no_zero() -> None:
    config = from_log([])
    assert config.args == {}
    assert config.kv_cache_tokens is None
    assert config.breakdown.weights_bytes is None


def test_server_info_gives_what_was_asked_for_and_no_secret() -> None:
    info = {
        "vllm_config": {
            "model_config": {"hf_token": "hf_secret", "revision": "abc", "seed": 7, "max_model_len": 4096},
            "cache_config": {"block_size": 32},
            "scheduler_config": {"max_num_seqs": 64, "async_scheduling": False},
        }
    }
    config = with_server_info(from_log([]), info, ["seed", "async_scheduling", "hf_token"])
    assert config.args == {
        "seed": 7,
        "max_model_len": 4096,
        "block_size": 32,
        "max_num_seqs": 64,
        "async_scheduling": False,
    }
    assert config.block_size == 32
    assert config.model_revision == "abc"
    assert with_server_info(from_log([]), {"vllm_config": "text"}, []).args == {}


def test_metrics_fill_the_gaps() -> None:
    labels = 'block_size="16",enable_prefix_caching="True",kv_cache_size_tokens="100"'
    text = "".join(f'vllm:cache_config_info{{{labels},engine="{n}"}} 1.0\n' for n in (0, 1))
    config = with_metrics(from_log([]), text)
    assert config.block_size == 16
    assert config.kv_cache_tokens == 200
    assert config.args == {"block_size": 16, "enable_prefix_caching": True}


@pytest.mark.parametrize(
    ("asked", "effective", "named"),
    [
        ({"max_num_batched_tokens": 512}, {"max_num_batched_tokens": 2048}, "max_num_batched_tokens is 2048"),
        ({"enable_chunked_prefill": False}, {"enable_chunked_prefill": True}, "enable_chunked_prefill is True"),
        ({"max_num_batched_tokens": 512}, {"max_num_batched_tokens": 512}, None),
        ({"gpu_memory_utilization": 0.9}, {"gpu_memory_utilization": 0.9000000000001}, None),
        ({"dtype": "auto"}, {"dtype": "bfloat16"}, None),
        ({"max_model_len": -1}, {"max_model_len": 8192}, None),
        ({"seed": None}, {"seed": 0}, None),
        ({"unheard": 1}, {}, None),
    ],
)
def test_difference(asked: dict[str, Scalar], effective: dict[str, Scalar], named: str | None) -> None:
    found = difference(asked, effective)
    assert (found.message if found else None) is None if named is None else named in found.message  # type: ignore[union-attr]
    assert found is None or found.code == "not_as_asked"


def test_the_commit_of_a_cached_model(tmp_path: Path) -> None:
    refs = tmp_path / "hub" / "models--meta-llama--X" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("0123abcd\n")
    assert cached_revision("meta-llama/X", {"HF_HOME": str(tmp_path)}) == "0123abcd"
    assert cached_revision("./model", {"HF_HOME": str(tmp_path)}) is None


HYBRID = "INFO 11-29 10:54:19 [c.py:1] Setting attention block size to 256 tokens to ensure that"


@pytest.mark.parametrize("part", [4, 16, 128])
def test_the_blocks_of_a_hybrid_model_s_groups_are_no_other_block_size(part: int) -> None:
    """The log has the block of attention, /metrics and /server_info that of another group, which divides it."""
    pool = "INFO 11-29 10:54:20 [k.py:1] GPU KV cache size: 81,920 tokens"
    found = from_log([HYBRID, pool])
    found = with_server_info(found, {"vllm_config": {"cache_config": {"block_size": part}}}, ["block_size"])
    found = with_metrics(found, f'vllm:cache_config_info{{block_size="{part}",num_gpu_blocks="1280"}} 1.0')
    assert found.block_size == 256
    assert found.kv_cache_tokens == 81_920
    assert "block_size" not in found.args
    for asked in (part, 256):
        assert difference({"block_size": asked}, {"block_size": part}) is None


def test_a_block_size_that_is_no_part_is_what_the_engine_says() -> None:
    found = with_metrics(from_log([HYBRID]), 'vllm:cache_config_info{block_size="96"} 1.0')
    assert found.block_size == found.args["block_size"] == 96
    assert difference({"block_size": 16}, {"block_size": 24}) is not None


@pytest.mark.parametrize(
    ("asked", "runs", "differs"),
    [("64K", 65536, False), ("64k", 64000, False), ("64K", 2048, True), ("1k", 1024, True), ("2048", 2048, False)],
)
def test_sizes_are_compared_as_numbers(asked: str, runs: int, differs: bool) -> None:
    found = difference({"max_num_batched_tokens": asked}, {"max_num_batched_tokens": runs})
    assert (found is not None) is differs
    if found is not None:
        assert f"is {runs}, asked for was {asked}" in found.message
