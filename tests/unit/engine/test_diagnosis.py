"""Every log of the corpus has one right cause. Those named cpu_*, and those of refused options, are real."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.engine.causes import CAUSES
from tuner.engine.diagnosis import Phase, diagnose
from tuner.engine.policy import POLICIES, policy

LOGS = Path(__file__).parent / "logs"
TABLE: dict[str, tuple[Phase, int | None, str, str]] = {
    "bad_option_value": ("start", 2, "bad_option_value", "--max-num-batched-tokens"),
    "chunk_below_max_num_seqs": ("start", 1, "invalid_combination", "max_num_seqs (64)"),
    "cpu_block_size_16": ("start", 1, "block_size", "MultipleOf(32)"),
    "cpu_healthy_and_stopped": ("load", 0, "engine_died", "exit code 0"),
    "cpu_kv_cache_too_small": ("start", 1, "kv_cache_too_small", "(8192)"),
    "cuda_oom_at_start": ("start", 1, "cuda_oom", "3.50 GiB"),
    "cuda_oom_under_load": ("load", 0, "cuda_oom", "under load"),
    "died_under_load": ("load", 1, "engine_died", "illegal memory access"),
    "gated_model": ("start", 1, "gated_model", "Llama-3.1-70B"),
    "gpu_healthy": ("load", 0, "engine_died", "exit code 0"),
    "hybrid_block_size": ("start", 1, "invalid_combination", "block_size (2096)"),
    "killed_from_outside": ("start", -9, "engine_died", "SIGKILL"),
    "kv_cache_none_left": ("start", 1, "kv_cache_too_small", "No available memory"),
    "kv_cache_too_small": ("start", 1, "kv_cache_too_small", "131072"),
    "max_model_len_too_long": ("start", 1, "invalid_combination", "999999"),
    "missing_model": ("start", 1, "missing_model", "no/such-model"),
    "missing_model_offline": ("start", 1, "missing_model", "cached snapshot"),
    "missing_model_path": ("start", 1, "missing_model", "./nowhere"),
    "missing_tokenizer": ("start", 1, "missing_tokenizer", "backend tokenizer"),
    "no_chat_template": ("start", 1, "no_chat_template", "chat template"),
    "no_chunking_below_model_length": ("start", 1, "invalid_combination", "max_model_len (8192)"),
    "no_free_memory": ("start", 1, "no_free_memory", "11.42/79.11"),
    "old_prefixes": ("start", 1, "no_free_memory", "3.11/79.11"),
    "plugin_missing": ("start", 1, "plugin_failed", "No module named 'tuner'"),
    "port_in_use": ("start", 1, "port_in_use", "Address already in use"),
    "reason_300_lines_above": ("start", 1, "block_size", "FLASHMLA"),
    "survived_warning_then_unknown": ("start", 1, "unknown", "the flange of rank 2 is bent"),
    "unknown_option": ("start", 2, "unknown_option", "--scheduler-policy"),
    "unsupported_device": ("start", 1, "unsupported_gpu", "infer device type"),
    "unsupported_gpu_dtype": ("start", 1, "unsupported_gpu", "Tesla T4"),
    "unsupported_gpu_kernel": ("start", 1, "unsupported_gpu", "no kernel image"),
    "unsupported_model": ("start", 1, "unsupported_model", "FooForCausalLM"),
    "world_size_too_large": ("start", 1, "too_few_gpus", ": World size (4)"),
}


def lines(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text().splitlines()


@pytest.mark.parametrize("name", TABLE)
def test_cause(name: str) -> None:
    phase, exit_code, code, words = TABLE[name]
    diagnosis = diagnose(lines(name), exit_code, phase=phase)
    assert diagnosis.code == code
    assert words in diagnosis.message
    assert diagnosis.hint
    for prefix in ("pid=", "[core.py", "ERROR"):
        assert prefix not in diagnosis.message


def test_the_whole_corpus_is_in_the_table() -> None:
    assert {p.stem for p in LOGS.glob("*.log")} == set(TABLE)


@pytest.mark.parametrize(
    "name", ["cuda_oom_at_start", "no_free_memory", "reason_300_lines_above", "kv_cache_too_small"]
)
def test_length_changes_nothing(name: str) -> None:
    """The cause is found however much stands before and behind it."""
    noise = ["(EngineCore pid=1) INFO 11-29 10:54:19 [core.py:1] nothing to see here"] * 5000
    alone = diagnose(lines(name), 1, phase="start")
    assert diagnose(noise + lines(name) + noise, 1, phase="start") == alone


def test_a_hybrid_models_bound_is_read() -> None:
    assert diagnose(lines("hybrid_block_size"), 1, phase="start").bound == 2096
    assert diagnose(lines("chunk_below_max_num_seqs"), 1, phase="start").bound is None


def test_the_unknown_shows_the_last_lines_without_prefixes() -> None:
    diagnosis = diagnose(lines("survived_warning_then_unknown"), 1, phase="start")
    assert diagnosis.tail[-1].startswith("RuntimeError: Engine core initialization failed")
    assert not any("pid=" in line for line in diagnosis.tail)
    assert diagnose([], 7, phase="start").message.endswith("exit code 7; it wrote nothing")


def test_what_was_said_before_it_was_ready_is_no_cause_of_a_death_under_load() -> None:
    text = ["ValueError: No common block size for 16 (X: [64])", "INFO:     Application startup complete."]
    assert diagnose(text, 1, phase="load").code == "engine_died"
    assert diagnose(text, 1, phase="start").code == "block_size"


def test_a_refused_request_is_no_cause_of_a_death_under_load() -> None:
    diagnosis = diagnose(lines("no_chat_template"), 1, phase="load")
    assert diagnosis.code == "engine_died"
    assert "ChatTemplate" not in diagnosis.message


def test_the_next_record_is_no_part_of_the_message() -> None:
    prefix = "(EngineCore pid=9) ERROR 11-29 10:54:19"
    text = [
        f"{prefix} [core.py:1510] ValueError: the flange is bent",
        f"{prefix} [core.py:1510] in two places",
        f"{prefix} [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly",
    ]
    assert diagnose(text, 1, phase="start").message.endswith("ValueError: the flange is bent in two places")


PYDANTIC = "1 validation error for VllmConfig"
REFUSED = (
    "  Value error, World size (2) is larger than the number of available GPUs ({}) [type=value_error, input_value=A]"
)


@pytest.mark.parametrize("head", ["", "pydantic_core._pydantic_core.ValidationError: "])
@pytest.mark.parametrize("prefix", ["", "(APIServer pid=9) ", "(APIServer pid=9) ERROR 11-29 10:54:19 [core.py:1510] "])
@pytest.mark.parametrize(
    ("below", "code", "reason"),
    [
        ([REFUSED.format(1)], "too_few_gpus", "World size (2) is larger than the number of available GPUs (1)"),
        (["  Value error, sixes and sevens [type=value_error]"], "invalid_combination", "sixes and sevens"),
        (["  Value error, sixes", "- and", "- sevens [type=x]"], "invalid_combination", "sixes - and - sevens"),
        (["seqs", "  Input should be above 0 [type=x]"], "invalid_combination", "seqs: Input should be above 0"),
        (["  Value error, cut off"], "invalid_combination", "cut off"),
    ],
)  # fmt: skip
def test_pydantic_s_reason_stands_below_its_first_line(
    head: str, prefix: str, below: list[str], code: str, reason: str
) -> None:
    text = [f"{prefix}{line}" for line in (f"{head}{PYDANTIC}", *below)]
    diagnosis = diagnose(text, 1, phase="start")
    assert diagnosis.code == code
    assert diagnosis.message == f"{CAUSES[code].sentence}: {reason}"


def test_a_live_api_server_before_a_dead_engine_is_said() -> None:
    assert "API server lives" in diagnose([], None, phase="load").message


def test_every_code_has_a_policy_and_every_policy_a_code() -> None:
    assert set(POLICIES) == set(CAUSES)
    assert policy("never heard of") == "environment"
