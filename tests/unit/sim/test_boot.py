"""What is decided before the first request."""

import pytest

from tuner.engine.diagnosis import diagnose
from tuner.errors import UsageError
from tuner.scheduler.decisions import Budget
from tuner.scheduler.messages import FOLDER_VARIABLE, LIVE_CLASS
from tuner.sim.__main__ import main
from tuner.sim.boot import ConfigError, Hardware, Plan, StartError, make_plan
from tuner.sim.cost import LinearCost, MeasuredCost, StepShape
from tuner.sim.options import parse_serve
from tuner.sim.tables import cost_model_name, max_position_embeddings, plan_memory

pytest.importorskip("aiconfigurator_core", reason="the step-time tables are not installed (extra `sim`)")

MODEL = "meta-llama/Llama-3.1-70B-Instruct"
TABLES = "meta-llama/Meta-Llama-3.1-70B"


def plan(*argv: str, **hardware: object) -> Plan:
    base = ["--tensor-parallel-size", "4", "--max-model-len", "8192"]
    return make_plan(parse_serve([MODEL, *base, *argv]), Hardware(**hardware))  # type: ignore[arg-type]


def test_the_defaults_are_vllm_s_for_the_pretended_gpu() -> None:
    big = plan().scheduler
    assert (big.max_num_batched_tokens, big.max_num_seqs, big.block_size) == (8192, 1024, 16)
    small = plan(gpu="a100_sxm").scheduler
    assert (small.max_num_batched_tokens, small.max_num_seqs) == (2048, 256)


def test_an_open_max_num_seqs_falls_to_the_chunk() -> None:
    assert plan("--max-num-batched-tokens", "64").scheduler.max_num_seqs == 64


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["--max-num-batched-tokens", "64", "--max-num-seqs", "128"],
            "max_num_batched_tokens (64) must be greater than or equal to max_num_seqs (128).",
        ),
        (
            ["--max-num-batched-tokens", "512", "--no-enable-chunked-prefill"],
            "max_num_batched_tokens (512) is smaller than max_model_len (8192).",
        ),
        (["--long-prefill-token-threshold", "9000"], "cannot be greater than the max_model_len (8192)"),
        (["--max-model-len", "999999"], "greater than the derived max_model_len"),
        (["--scheduler-cls", "some.Other"], "no scheduler class 'some.Other'"),
    ],
)
def test_options_that_contradict_each_other_do_not_start(argv: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(*argv)
    assert says in str(refused.value)


def test_more_gpus_than_there_are() -> None:
    with pytest.raises(ConfigError, match="larger than the number of available GPUs"):
        plan(count=2)


@pytest.mark.parametrize(
    ("argv", "code", "reason"),
    [
        (["-tp", "2"], "too_few_gpus", "World size (2) is larger than the number of available GPUs (1)"),
        (["--max-num-seqs", "128", "--max-num-batched-tokens", "64"], "invalid_combination", "max_num_seqs (128)"),
    ],
)
def test_a_refusal_is_told_as_vllm_tells_it(
    argv: list[str], code: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHUNKTUNE_SIM", '{"count": 1}')
    assert main(["serve", MODEL, *argv]) == 1
    diagnosis = diagnose(capsys.readouterr().err.splitlines(), 1, phase="start")
    assert diagnosis.code == code
    assert reason in diagnosis.message


def test_a_pool_that_cannot_hold_one_sequence_does_not_start() -> None:
    with pytest.raises(StartError) as refused:
        plan("--num-gpu-blocks-override", "100")
    text = str(refused.value)
    assert "KV cache is needed, which is larger than the available KV cache memory" in text
    assert "the estimated maximum model length is 1584" in text


def test_a_model_that_leaves_nothing_for_the_cache_does_not_start() -> None:
    with pytest.raises(StartError, match="No available memory for the cache blocks"):
        plan("--gpu-memory-utilization", "0.3")


def test_a_larger_chunk_leaves_a_smaller_pool() -> None:
    small, large = plan("--max-num-batched-tokens", "2048"), plan("--max-num-batched-tokens", "16384")
    assert small.kv_tokens > large.kv_tokens
    assert small.memory.activation_bytes < large.memory.activation_bytes
    assert small.memory.weights_bytes == large.memory.weights_bytes


def test_memory_adds_up_to_what_may_be_used() -> None:
    made = plan("--gpu-memory-utilization", "0.9")
    memory = made.memory
    used = memory.weights_bytes + memory.activation_bytes + made.kv_bytes
    block_bytes = 16 * memory.kv_bytes_per_token
    assert 0 <= memory.total_bytes * 0.9 - used < 2 * block_bytes


def test_the_log_says_what_vllm_s_says() -> None:
    made = plan("--max-num-batched-tokens", "512", "--num-gpu-blocks-override", "1280")
    assert "Chunked prefill is enabled with max_num_batched_tokens=512." in made.config_lines()
    lines = made.engine_lines()
    expected = "GPU KV cache size: 20,480 tokens, Maximum concurrency for 8,192 tokens per request: 2.50x"
    assert expected in lines


def test_the_reuse_budget_comes_with_the_plug_in_only() -> None:
    name = "tuner.scheduler.ReuseBudgetScheduler"
    settings = '{"chunktune": {"max_cached_blocks": 80}}'
    assert plan("--scheduler-cls", name, "--additional-config", settings).budget == Budget(max_cached_blocks=80)
    assert plan("--additional-config", settings).budget is None
    with pytest.raises(StartError, match="max_blocks"):
        plan("--scheduler-cls", name, "--additional-config", '{"chunktune": {"max_blocks": 80}}')


def test_the_machine_is_read_from_the_environment() -> None:
    read = Hardware.from_environment({"CHUNKTUNE_SIM": '{"gpu": "a100_sxm", "count": 2, "speed": 2}'})
    assert (read.gpu, read.count, read.speed) == ("a100_sxm", 2, 2)
    assert Hardware.from_environment({}) == Hardware()
    for wrong in ('{"gpus": 1}', "[", '{"speed": 0}'):
        with pytest.raises(UsageError, match="CHUNKTUNE_SIM"):
            Hardware.from_environment({"CHUNKTUNE_SIM": wrong})


def test_served_models_read_their_base_model_s_tables() -> None:
    assert cost_model_name(MODEL) == TABLES
    assert cost_model_name(TABLES) == TABLES
    assert cost_model_name("nobody/knows-this") == "nobody/knows-this"
    assert max_position_embeddings(TABLES) == 131072


def test_an_unknown_model_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(UsageError, match=r"nearest is 'meta-llama/Meta-Llama-3.1-70B'"):
        plan_memory("meta-llama/Meta-Lama-3.1-70B", "h100_sxm", 4, chunk=512, max_num_seqs=8, utilization=0.9)


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="no vllm tables"):
        MeasuredCost(TABLES, "abacus", 4)


def test_step_times_are_those_of_the_tables() -> None:
    """Llama-3.1-70B on 4 H100, prompts at context 0: VLLM's chunk sizes and milliseconds as measured once."""
    cost = MeasuredCost(TABLES, "h100_sxm", 4)
    for chunk, ms in ((64, 18.3), (512, 37.3), (2048, 130), (8192, 577)):
        assert cost.step_ms(StepShape(((chunk, 0),), ())) == pytest.approx(ms, rel=0.01)
    assert cost.step_ms(StepShape((), ())) == 0.0


def test_a_step_costs_more_with_more_in_it() -> None:
    cost = MeasuredCost(TABLES, "h100_sxm", 4)
    alone = cost.step_ms(StepShape(((512, 0),), ()))
    assert cost.step_ms(StepShape(((512, 0),), (2048,) * 32)) > alone
    assert cost.step_ms(StepShape(((512, 6000),), ())) > alone
    assert cost.step_ms(StepShape((), (8000,) * 32)) > cost.step_ms(StepShape((), (500,) * 32))


def test_a_prompt_in_two_equal_parts_costs_about_what_the_tables_say_for_two() -> None:
    cost = MeasuredCost(TABLES, "h100_sxm", 4)
    two = cost.step_ms(StepShape(((256, 0), (256, 0)), ()))
    assert two == pytest.approx(cost.step_ms(StepShape(((512, 0),), ())), rel=0.1)


def test_linear_cost_is_linear() -> None:
    assert LinearCost(10, 0.5).step_ms(StepShape(((4, 0),), (1, 2))) == 13.0


def test_a_live_start_knows_what_would_be_chosen_unasked() -> None:
    live = plan("--scheduler-cls", LIVE_CLASS, "--max-num-batched-tokens", "16384", "--max-num-seqs", "64")
    assert live.stock_chunk == 8192
    assert plan("--no-enable-chunked-prefill", "--max-model-len", "16384").stock_chunk == 16384


def test_a_live_start_without_its_folder_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    argv = ["--tensor-parallel-size", "4", "--max-model-len", "8192", "--scheduler-cls", LIVE_CLASS]
    assert main(["serve", MODEL, *argv]) == 1
    said = capsys.readouterr().err.splitlines()
    assert any("live control cannot run here: the environment variable CHUNKTUNE_LIVE is not set" in s for s in said)
    assert diagnose(said, 1, phase="start").code == "plugin_failed"
