"""A trial becomes a frozen document, and only one that deserves it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.frozen_trials import frozen_of, round_of, trial_of
from tuner.domain.setting import ReuseBudget
from tuner.domain.measurement import Latency, Measurement
from tuner.errors import FileFormatError, UsageError
from tuner.freeze import control_of, load_frozen, repeats_of, save_frozen, to_args, to_yaml
from tuner.freeze.baseline import rounds_by_start


def test_the_document_holds_what_the_engine_really_ran() -> None:
    trial = trial_of(3, [100.0], effective_args={"max_num_batched_tokens": 2048, "max_num_seqs": 64})
    assert frozen_of(trial).engine_args["max_num_batched_tokens"] == 2048


def test_a_default_that_vllm_may_move_is_pinned() -> None:
    assert frozen_of(trial_of(3, [100.0])).engine_args["enable_chunked_prefill"] is True


def test_values_read_back_that_are_no_options_stay_out() -> None:
    trial = trial_of(3, [100.0], effective_args={"max_num_batched_tokens": 512, "num_gpu_blocks": 640})
    assert "num_gpu_blocks" not in frozen_of(trial).engine_args


def test_host_port_and_names_of_one_start_stay_out() -> None:
    args = {"max_num_batched_tokens": 512, "host": "0.0.0.0", "port": 8000, "served_model_name": "x", "api_key": "k"}
    frozen = frozen_of(trial_of(3, [100.0], engine_args=args, effective_args=None))
    assert frozen.engine_args == {"max_num_batched_tokens": 512}
    assert not {"--host", "--port", "--api-key", "--served-model-name"} & set(frozen.command)


def test_no_secret_of_the_environment_is_frozen() -> None:
    text = json.dumps(frozen_of(trial_of(3, [100.0])).to_json())
    assert frozen_of(trial_of(3, [100.0])).engine_env == {"HF_HOME": "/models"}
    assert "hf_abc" not in text


def test_the_command_starts_the_launcher_that_was_measured() -> None:
    command = frozen_of(trial_of(3, [100.0])).command
    assert command[:3] == ["/opt/vllm", "serve", "org/model"]
    assert command[command.index("--max-num-batched-tokens") + 1] == "512"


def test_a_model_that_goes_by_another_name_is_served_from_its_folder() -> None:
    frozen = frozen_of(trial_of(3, [100.0], command=["vllm", "serve", "/cache/tiny", "--port", "1"]))
    assert frozen.model == "org/model"
    assert frozen.command[2] == "/cache/tiny"
    assert "\nmodel: /cache/tiny\n" in to_yaml(frozen)
    assert to_args(frozen).startswith("vllm serve /cache/tiny ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state": "engine_failed", "cause": "oom", "message": "out of memory"}, "oom"),
        ({"state": "infeasible", "cause": "no_kv", "message": "no room"}, "no_kv"),
        ({"state": "pruned"}, "pruned"),
        ({"state": "interrupted"}, "interrupted"),
        ({"violations": ["ttft_ms.p99 <= 500: 600"]}, "ttft_ms.p99 <= 500"),
        ({"median": None}, "no valid round"),
        ({"rounds": [round_of(100.0, void="warm cache")]}, "no valid round"),
        ({"median": Measurement()}, "no finite ttft_ms.p90"),
    ],
)
def test_an_unfit_trial_is_refused_and_says_why(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        frozen_of(trial_of(3, [100.0], **change))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_non_finite_objective_is_refused(value: float) -> None:
    broken = Latency.model_construct(p50=1.0, p90=value, p99=1.0, mean=1.0, n=1)
    trial = trial_of(3, [100.0])
    trial = trial.model_copy(update={"median": trial.median.model_copy(update={"ttft_ms": broken})})  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="no finite"):
        frozen_of(trial)


def test_the_baseline_comes_from_finals_because_the_search_picked_its_luckiest_number() -> None:
    searched = trial_of(3, [80.0, 82.0, 81.0])
    finals = [trial_of(n, [100.0, 101.0, 99.0], role="final", final_of=3) for n in (8, 11)]
    baseline = frozen_of(searched, [searched, *finals]).baseline
    assert baseline.starts == 2
    assert baseline.rounds_per_start == [3, 3]
    assert baseline.median.ttft_ms is not None
    assert baseline.median.ttft_ms.p90 == pytest.approx(100.0)


def test_a_failed_or_void_repeat_is_no_start_of_the_baseline() -> None:
    final = trial_of(8, [100.0], role="final", final_of=3)
    failed = trial_of(9, [10.0], role="final", final_of=3, state="load_failed", cause="cut")
    void = trial_of(10, [], role="final", final_of=3, rounds=[round_of(10.0, void="warm")])
    assert frozen_of(trial_of(3, [80.0]), [final, failed, void]).baseline.starts == 1


def test_repeats_and_control_are_found_by_configuration() -> None:
    stock_args = {"max_num_seqs": 64}
    budget = ReuseBudget(min_reuse_ratio=0.8)
    stock = trial_of(0, [120.0], role="baseline", engine_args=stock_args)
    winner = trial_of(3, [80.0], reuse_budget=budget)
    finals = [
        trial_of(8, [90.0], role="final", final_of=3, reuse_budget=budget),
        trial_of(9, [121.0], role="final", final_of=0, engine_args=stock_args),
        trial_of(10, [95.0], role="final", final_of=3, label="without the plug-in"),
    ]
    trials = [stock, winner, trial_of(4, [99.0], engine_args={"max_num_batched_tokens": 256}), *finals]
    assert [t.number for t in repeats_of(winner, trials)] == [3, 8]
    assert [t.number for t in repeats_of(finals[0], trials)] == [3, 8]
    assert [t.number for t in control_of(trials)] == [0, 9]


def test_a_trial_merged_out_of_its_starts_is_not_counted_twice() -> None:
    starts = [trial_of(8, [100.0, 101.0], role="final"), trial_of(9, [99.0], role="final")]
    merged = trial_of(8, [100.0, 101.0, 99.0], role="final")
    baseline = frozen_of(merged, starts).baseline
    assert (baseline.starts, baseline.rounds_per_start) == (2, [2, 1])


def test_the_stock_control_is_kept_with_its_own_baseline() -> None:
    stock = trial_of(0, [120.0], role="baseline", engine_args={"max_num_seqs": 64}, effective_args={})
    control = frozen_of(trial_of(3, [80.0]), control=[stock]).control
    assert control is not None
    assert control.engine_args == {"max_num_seqs": 64}
    assert control.baseline.starts == 1


def test_stock_is_no_control_of_itself() -> None:
    stock = trial_of(0, [120.0], role="baseline")
    assert frozen_of(stock, [stock], control=[stock]).control is None


def test_a_reuse_budget_that_is_off_is_null() -> None:
    assert frozen_of(trial_of(3, [80.0], reuse_budget=ReuseBudget())).reuse_budget is None


def test_a_simulated_trial_says_so() -> None:
    assert frozen_of(trial_of(3, [80.0], simulated=True)).simulated is True


def test_a_document_survives_its_file(tmp_path: Path) -> None:
    stock = trial_of(0, [120.0], role="baseline", engine_args={"max_num_seqs": 64}, effective_args={})
    frozen = frozen_of(trial_of(3, [80.0], reuse_budget=ReuseBudget(min_reuse_ratio=0.8)), control=[stock])
    save_frozen(tmp_path / "f.json", frozen)
    assert load_frozen(tmp_path / "f.json") == frozen


def test_rounds_come_apart_by_start_again() -> None:
    finals = [trial_of(8, [100.0, 101.0], role="final"), trial_of(9, [90.0], role="final")]
    baseline = frozen_of(finals[0], finals).baseline
    assert [len(s) for s in rounds_by_start(baseline)] == [2, 1]
    unsaid = baseline.model_copy(update={"rounds_per_start": []})
    assert sum(len(s) for s in rounds_by_start(unsaid)) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ('{"schema": "chunktune.frozen/99"}', "chunktune.frozen/99"),
        ('{"schema": "other/1"}', "not a chunktune.frozen file"),
        ('{"schema": "chunktune.frozen/1"}', "created_at"),
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
    save_frozen(tmp_path / "frozen.json", frozen_of(trial_of(3, [80.0])))
    with pytest.raises(FileFormatError, match="is a folder") as caught:
        load_frozen(tmp_path)
    assert caught.value.hint == f"Name the one in it: {tmp_path / 'frozen.json'}"


@pytest.mark.parametrize("option", ["api_key", "host"])
def test_an_option_of_one_start_or_person_is_refused(tmp_path: Path, option: str) -> None:
    value = frozen_of(trial_of(3, [80.0])).to_json()
    value["engine_args"][option] = "0.0.0.0"
    (tmp_path / "f.json").write_text(json.dumps(value))
    with pytest.raises(FileFormatError, match=f"engine_args.{option} belongs to one start"):
        load_frozen(tmp_path / "f.json")


@pytest.mark.parametrize("change", [{"model": "a\0b"}, {"engine_args": {"dtype": "a\0b"}}], ids=["model", "option"])
def test_what_no_command_line_can_hold_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    value = frozen_of(trial_of(3, [80.0])).to_json() | change
    (tmp_path / "f.json").write_text(json.dumps(value))
    with pytest.raises(FileFormatError, match=f"{next(iter(change))}.*NUL"):
        load_frozen(tmp_path / "f.json")


def test_an_edited_workload_is_refused(tmp_path: Path) -> None:
    value = frozen_of(trial_of(3, [80.0])).to_json()
    value["workload"]["requests"] = 17
    (tmp_path / "f.json").write_text(json.dumps(value))
    with pytest.raises(FileFormatError, match="workload_sha256"):
        load_frozen(tmp_path / "f.json")
