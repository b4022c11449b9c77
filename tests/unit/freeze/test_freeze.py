"""A measured setting becomes a frozen document, and only one that deserves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.frozen import CHUNK_512, PROFILE, STUDY, frozen_of, round_of, rows_of, start_of
from tuner.domain.experiment import Results
from tuner.domain.measurement import Measurement
from tuner.domain.setting import STOCK, ReuseBudget, Setting
from tuner.errors import FileFormatError, UsageError
from tuner.freeze import (
    evidence_of,
    frozen_args,
    load_frozen,
    measured_of,
    rounds_by_start,
    save_frozen,
    to_args,
    to_yaml,
)
from tuner.freeze.document import frozen_env


def test_a_chunk_that_was_switched_live_is_frozen_and_not_the_chunk_of_the_boot() -> None:
    args = frozen_args(CHUNK_512, {"max_num_seqs": 64}, start_of(1))
    assert args == {"max_num_batched_tokens": 512, "max_num_seqs": 64, "enable_chunked_prefill": True}


def test_the_largest_chunk_of_a_live_start_is_frozen_too() -> None:
    args = frozen_args(Setting(knobs={"max_num_batched_tokens": 2048}), {"max_num_seqs": 64}, start_of(1))
    assert args["max_num_batched_tokens"] == 2048


def test_stock_of_a_live_start_has_the_chunk_that_vllm_would_choose() -> None:
    assert frozen_args(STOCK, {"max_num_seqs": 64}, start_of(1))["max_num_batched_tokens"] == 1024
    unknown = frozen_args(STOCK, {"max_num_seqs": 64}, start_of(1, stock_chunk=None))
    assert "max_num_batched_tokens" not in unknown


def test_a_live_knob_keeps_its_value_and_a_boot_knob_the_one_read_back() -> None:
    setting = Setting(knobs={"long_prefill_token_threshold": 256, "kv_cache_dtype": "auto"})
    effective = {"long_prefill_token_threshold": 0, "kv_cache_dtype": "fp8", "max_num_seqs": 64}
    booted = {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "kv_cache_dtype": "auto"}
    args = frozen_args(setting, {"max_num_seqs": 64}, start_of(1, engine_args=booted, effective_args=effective))
    assert (args["long_prefill_token_threshold"], args["kv_cache_dtype"]) == (256, "fp8")


def test_a_start_of_its_own_is_frozen_as_the_engine_ran_it() -> None:
    effective = {"max_num_batched_tokens": 528, "max_num_seqs": 64, "num_gpu_blocks": 640}
    args = frozen_args(CHUNK_512, {"max_num_seqs": 64}, start_of(1, live=False, effective_args=effective))
    assert args == {"max_num_batched_tokens": 528, "max_num_seqs": 64}


def test_the_literal_start_has_the_last_word_on_the_options() -> None:
    effective = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "max_model_len": 4096}
    literal = start_of(9, purpose="literal", live=False, effective_args=effective, command=["/lit/vllm", "serve", "m"])
    frozen = frozen_of([[100.0]], literal=literal)
    assert frozen.engine_args == effective
    assert frozen.command[:3] == ["/lit/vllm", "serve", "m"]
    assert frozen.measured.starts == 1


def test_host_port_and_names_of_one_start_stay_out() -> None:
    engine = PROFILE.engine.model_copy(
        update={"args": {"host": "0.0.0.0", "port": 8000, "served_model_name": "x", "api_key": "k", "ssl_keyfile": "f"}}
    )
    frozen = frozen_of(profile=PROFILE.model_copy(update={"engine": engine}), start={"effective_args": None})
    assert frozen.engine_args == {"max_num_batched_tokens": 512}
    assert not {"--host", "--port", "--api-key", "--served-model-name"} & set(frozen.command)


def test_no_secret_and_no_switch_of_ours_is_in_the_environment() -> None:
    text = json.dumps(frozen_of().to_json())
    assert frozen_of().engine_env == {"HF_HOME": "/models"}
    assert "hf_abc" not in text
    ours = {"CHUNKTUNE_SIM": "{}", "CHUNKTUNE_LIVE": "/x", "VLLM_SERVER_DEV_MODE": "1"}
    assert frozen_env({**ours, "VLLM_LOGGING_LEVEL": "INFO"}) == {"VLLM_LOGGING_LEVEL": "INFO"}


def test_the_command_starts_the_launcher_that_was_measured() -> None:
    command = frozen_of().command
    assert command[:3] == ["/opt/vllm", "serve", "org/model"]
    assert command[command.index("--max-num-batched-tokens") + 1] == "512"


def test_a_model_that_goes_by_another_name_is_served_from_its_folder() -> None:
    frozen = frozen_of(start={"command": ["vllm", "serve", "/cache/tiny", "--port", "1"]})
    assert frozen.model == "org/model"
    assert frozen.command[2] == "/cache/tiny"
    assert "\nmodel: /cache/tiny\n" in to_yaml(frozen)
    assert to_args(frozen).startswith("vllm serve /cache/tiny ")


def test_a_setting_without_a_round_is_refused() -> None:
    with pytest.raises(UsageError, match=r"setting 3 \(chunk 512\) has no round that counts"):
        frozen_of([])


def test_a_setting_without_the_objective_is_refused_with_the_reason() -> None:
    row = rows_of(1, [100.0])[0]
    blind = Measurement(unmeasured={"ttft_ms": "no measured request received a token"})
    starts = [(start_of(1), [row.model_copy(update={"measurement": blind})])]
    with pytest.raises(UsageError, match=r"has no ttft_ms\.p90: no measured request received a token"):
        frozen_of(starts=starts)


def test_the_level_is_the_median_of_the_finals_and_starts_carry_its_spread() -> None:
    measured = frozen_of([[100.0, 101.0, 99.0], [110.0, 111.0, 109.0], [90.0, 91.0, 89.0]]).measured
    assert (measured.starts, measured.rounds_per_start) == (3, [3, 3, 3])
    assert measured.median.ttft_ms is not None
    assert measured.median.ttft_ms.p90 == pytest.approx(100.0)
    low, high = measured.ci95["ttft_ms.p90"]
    # Three starts that differ by 10 % say less about the next one than nine rounds would.
    assert low < 91 < 109 < high


def test_rounds_come_apart_by_start_again() -> None:
    measured = measured_of([[round_of(100.0), round_of(101.0)], [], [round_of(90.0)]])
    assert (measured.starts, [len(s) for s in rounds_by_start(measured)]) == (2, [2, 1])
    unsaid = measured.model_copy(update={"rounds_per_start": []})
    assert sum(len(s) for s in rounds_by_start(unsaid)) == 3
    with pytest.raises(ValueError, match="no start"):
        measured_of([[]])


def test_stock_is_kept_beside_it_with_its_own_options() -> None:
    stock = frozen_of([[80.0]], stock=[[120.0, 121.0]]).stock
    assert stock is not None
    assert stock.engine_args["max_num_batched_tokens"] == 1024
    assert (stock.starts, len(stock.rounds)) == (1, 2)
    assert frozen_of([[80.0]]).stock is None


def test_frozen_stock_says_so_in_every_form() -> None:
    frozen = frozen_of(
        [[120.0]], stock=[[120.0]], verdict="stock", setting_id="stock", setting=STOCK, start={"settings": ["stock"]}
    )
    assert (frozen.verdict, frozen.setting) == ("stock", "stock")
    assert frozen.stock is not None
    assert frozen.engine_args == frozen.stock.engine_args
    assert "Verdict: no setting was better than stock" in to_yaml(frozen)


def test_a_simulated_start_says_so() -> None:
    assert frozen_of(start={"simulated": True}).simulated is True


def test_the_model_s_revision_is_the_one_that_was_served() -> None:
    assert frozen_of(start={"model_revision": "abc"}).fingerprint.model_revision == "abc"


class TestEvidence:
    """Which starts speak for a setting."""

    FINALS = (start_of(4), start_of(5))
    SEARCH = start_of(1, purpose="search", state="interrupted")

    def results(self) -> Results:
        rows = [*rows_of(1, [70.0, 71.0]), *rows_of(1, [120.0], "stock"), *rows_of(1, [60.0], 8)]
        for final in self.FINALS:
            rows += rows_of(final.number, [80.0]) + rows_of(final.number, [120.0], "stock")
        rows += rows_of(6, [10.0]) + rows_of(5, [10.0], state="discarded", reason="warm cache")
        failed = start_of(6, state="engine_failed")
        literal = start_of(7, purpose="literal", live=False, settings=[3])
        return Results([self.SEARCH, *self.FINALS, failed, literal], rows)

    def test_finals_count_and_not_the_search_that_picked_its_luckiest_number(self) -> None:
        found = evidence_of(self.results(), 3)
        assert [(start.number, len(rounds)) for start, rounds in found.starts] == [(4, 1), (5, 1)]
        assert [start.number for start, _ in found.stock] == [4, 5]
        assert found.literal is not None
        assert (found.literal.number, found.from_finals) == (7, True)

    def test_a_setting_that_was_in_no_final_has_its_search(self) -> None:
        found = evidence_of(self.results(), 8)
        assert [start.number for start, _ in found.starts] == [1]
        assert [start.number for start, _ in found.stock] == [1]
        assert (found.literal, found.from_finals) == (None, False)

    def test_stock_on_starts_of_its_own_is_taken_where_starts_measure_one_setting(self) -> None:
        starts = [start_of(1, settings=[3]), start_of(2, settings=["stock"])]
        found = evidence_of(Results(starts, [*rows_of(1, [80.0]), *rows_of(2, [90.0], "stock")]), 3)
        assert [start.number for start, _ in found.stock] == [2]

    def test_what_was_never_measured_has_nothing(self) -> None:
        assert evidence_of(self.results(), 9).starts == []


def test_a_document_survives_its_file(tmp_path: Path) -> None:
    setting = Setting(knobs=CHUNK_512.knobs, reuse_budget=ReuseBudget(min_reuse_ratio=0.8))
    frozen = frozen_of([[80.0]], stock=[[120.0]], setting=setting)
    save_frozen(tmp_path / "f.json", frozen)
    assert load_frozen(tmp_path / "f.json") == frozen
    assert (frozen.study.name, frozen.study.seed, frozen.study.counts) == (STUDY.study, 7, {"measured": 3})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ('{"schema": "chunktune.frozen/99"}', "chunktune.frozen/99"),
        ('{"schema": "other/1"}', "not a chunktune.frozen file"),
        ('{"schema": "chunktune.frozen/1"}', "written by an earlier chunktune"),
        ('{"schema": "chunktune.frozen/2"}', "verdict"),
    ],
)
def test_a_file_that_is_no_frozen_one_is_refused_by_name(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "f.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FileFormatError, match=said) as caught:
        load_frozen(path)
    assert "f.json" in str(caught.value)
    assert caught.value.hint


def test_a_folder_is_answered_with_the_frozen_file_in_it(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="is a folder") as caught:
        load_frozen(tmp_path)
    assert "chunktune freeze" in caught.value.hint
    save_frozen(tmp_path / "frozen.json", frozen_of())
    with pytest.raises(FileFormatError, match="is a folder") as caught:
        load_frozen(tmp_path)
    assert caught.value.hint == f"Name the one in it: {tmp_path / 'frozen.json'}"


@pytest.mark.parametrize("option", ["api_key", "host"])
def test_an_option_of_one_start_or_person_is_refused(tmp_path: Path, option: str) -> None:
    value = frozen_of().to_json()
    value["engine_args"][option] = "0.0.0.0"
    (tmp_path / "f.json").write_text(json.dumps(value))
    with pytest.raises(FileFormatError, match=f"engine_args.{option} belongs to one start"):
        load_frozen(tmp_path / "f.json")


@pytest.mark.parametrize("change", [{"model": "a\0b"}, {"engine_args": {"dtype": "a\0b"}}], ids=["model", "option"])
def test_what_no_command_line_can_hold_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    value = frozen_of().to_json() | change
    (tmp_path / "f.json").write_text(json.dumps(value))
    with pytest.raises(FileFormatError, match=f"{next(iter(change))}.*NUL"):
        load_frozen(tmp_path / "f.json")


def test_an_edited_workload_is_refused(tmp_path: Path) -> None:
    value = frozen_of().to_json()
    value["workload"]["requests"] = 17
    (tmp_path / "f.json").write_text(json.dumps(value))
    with pytest.raises(FileFormatError, match="workload_sha256"):
        load_frozen(tmp_path / "f.json")
