"""The three formats say the same configuration."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.frozen import frozen_of
from tuner.domain.frozen import Frozen
from tuner.domain.setting import ReuseBudget, Scalar
from tuner.engine.argv import from_argv
from tuner.engine.launch import SCHEDULER_CLASS as LAUNCHED_CLASS
from tuner.freeze.export import SCHEDULER_CLASS, config_mapping, serve_command, to_args, to_json, to_yaml


def frozen_with(args: dict[str, Scalar], budget: ReuseBudget | None = None) -> Frozen:
    frozen = frozen_of()
    command = serve_command(("vllm",), frozen.model, args, budget)
    return frozen.model_copy(update={"engine_args": args, "reuse_budget": budget, "command": command})


def test_json_is_the_document() -> None:
    frozen = frozen_with({"max_num_batched_tokens": 512})
    assert Frozen.model_validate(json.loads(to_json(frozen))) == frozen


def test_a_false_value_is_a_no_key_because_vllm_drops_false() -> None:
    document = yaml.safe_load(to_yaml(frozen_with({"enable_chunked_prefill": False, "enable_prefix_caching": True})))
    assert document == {"model": "org/model", "no-enable-chunked-prefill": True, "enable-prefix-caching": True}


def test_yaml_keys_are_dashed_and_null_is_left_out() -> None:
    document = yaml.safe_load(to_yaml(frozen_with({"max_num_batched_tokens": 512, "seed": None})))
    assert document == {"model": "org/model", "max-num-batched-tokens": 512}


def test_a_flag_without_a_no_form_is_left_out_when_false() -> None:
    frozen = frozen_with({"disable_log_stats": False, "max_num_seqs": 8})
    assert yaml.safe_load(to_yaml(frozen)) == {"model": "org/model", "max-num-seqs": 8}
    assert "--no-disable-log-stats" not in to_args(frozen)


def test_the_plugin_and_its_settings_are_in_every_format() -> None:
    frozen = frozen_with({"max_num_seqs": 8}, ReuseBudget(min_reuse_ratio=0.8, max_cached_blocks=128))
    text = to_yaml(frozen)
    document = yaml.safe_load(text)
    assert document["scheduler-cls"] == "tuner.scheduler.ReuseBudgetScheduler"
    assert document["additional-config"]["chunktune"]["min_reuse_ratio"] == 0.8
    assert "PYTHONPATH" in text
    words = shlex.split(to_args(frozen))
    assert words[words.index("--scheduler-cls") + 1] == "tuner.scheduler.ReuseBudgetScheduler"
    assert json.loads(words[words.index("--additional-config") + 1])["chunktune"]["max_cached_blocks"] == 128


def test_the_plugin_is_the_one_that_was_launched() -> None:
    assert SCHEDULER_CLASS == LAUNCHED_CLASS


def test_other_settings_of_additional_config_survive_the_plugin() -> None:
    frozen = frozen_with({"additional_config": '{"other": 1}'}, ReuseBudget(min_reuse_ratio=0.8))
    assert set(config_mapping(frozen)["additional-config"]) == {"other", "chunktune"}


def test_without_a_budget_the_yaml_asks_for_nothing() -> None:
    text = to_yaml(frozen_with({"max_num_seqs": 8}))
    assert "PYTHONPATH" not in text
    assert "scheduler-cls" not in text


def test_a_simulated_yaml_says_so_first() -> None:
    frozen = frozen_with({"max_num_seqs": 8}).model_copy(update={"simulated": True})
    assert to_yaml(frozen).startswith("# SIMULATED")


def test_the_command_line_of_a_simulated_result_is_for_the_real_node() -> None:
    frozen = frozen_with({"max_num_seqs": 8})
    here = frozen.model_copy(update={"command": ["/opt/vllm", *frozen.command[1:]]})
    assert to_args(here) == "/opt/vllm serve org/model --max-num-seqs 8\n"
    command = ["/usr/bin/python3", "-m", "tuner.sim", *frozen.command[1:]]
    planned = frozen.model_copy(update={"simulated": True, "command": command})
    assert to_args(planned) == "vllm serve org/model --max-num-seqs 8\n"


NAMES = st.from_regex(r"[a-z]{2,8}(_[a-z]{2,6}){0,3}", fullmatch=True).filter(lambda n: not n.startswith("no_"))
VALUES = st.one_of(
    st.integers(min_value=0, max_value=10**7),
    st.floats(min_value=0, max_value=10, allow_nan=False),
    st.booleans(),
    st.sampled_from(["auto", "fcfs", "some value", 'quo"te', "it's"]),
)


@given(st.dictionaries(NAMES, VALUES, max_size=6))
def test_the_command_line_reads_back_as_the_configuration(args: dict[str, Scalar]) -> None:
    words = shlex.split(to_args(frozen_with(args)))
    assert words[:3] == ["vllm", "serve", "org/model"]
    assert from_argv(words[3:]) == args


@given(st.dictionaries(NAMES, VALUES, max_size=6))
def test_yaml_and_command_line_say_the_same(args: dict[str, Scalar]) -> None:
    frozen = frozen_with(args)
    document = yaml.safe_load(to_yaml(frozen))
    assert document.pop("model") == "org/model"
    back = {
        (k.removeprefix("no-") if k.startswith("no-") else k).replace("-", "_"): not k.startswith("no-") and v
        for k, v in document.items()
    }
    assert back == args


@pytest.mark.parametrize("text", ["[1, 2]", "{broken", "plain"])
def test_text_that_is_no_json_object_stays_text(text: str) -> None:
    assert config_mapping(frozen_with({"some_option": text}))["some-option"] == text
