"""The catalogue of knobs agrees with what the scheduler can switch and with what a reuse budget is."""

import dataclasses

import pytest

from tuner.domain.setting import CHUNK_KNOB, ReuseBudget, Scalar
from tuner.scheduler.decisions import Budget
from tuner.scheduler.messages import LIVE_VALUES
from tuner.space.knobs import BUDGET_PREFIX, LIVE, is_live


def test_it_holds_what_the_live_scheduler_switches() -> None:
    assert {"reuse_budget" if name.startswith(BUDGET_PREFIX) else name for name in LIVE} == set(LIVE_VALUES)


def test_its_budget_is_the_plug_ins() -> None:
    of_the_plugin = {field.name: field.default for field in dataclasses.fields(Budget)}
    assert {name: field.default for name, field in ReuseBudget.model_fields.items()} == of_the_plugin
    ours = {n.removeprefix(BUDGET_PREFIX): k.off for n, k in LIVE.items() if n.startswith(BUDGET_PREFIX)}
    assert ours == of_the_plugin


@pytest.mark.parametrize("name", sorted(LIVE))
def test_the_value_that_means_off_is_one_that_it_takes(name: str) -> None:
    assert LIVE[name].takes(LIVE[name].off)
    assert LIVE[name].help.endswith(".")
    assert is_live(name)


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        (CHUNK_KNOB, 16, True),
        (CHUNK_KNOB, 0, False),
        (CHUNK_KNOB, 16.5, False),
        (CHUNK_KNOB, "8k", False),
        (CHUNK_KNOB, None, True),
        ("watermark", 0.1, True),
        ("watermark", None, False),
        ("enable_chunked_prefill", True, True),
        ("enable_chunked_prefill", 1, False),
        ("reuse_budget.max_hold_ms", 250.5, True),
        ("reuse_budget.min_reuse_ratio", 1.1, False),
    ],
)
def test_values(name: str, value: Scalar, taken: bool) -> None:
    assert LIVE[name].takes(value) is taken


def test_any_other_option_needs_a_start_of_its_own() -> None:
    assert not is_live("max_num_seqs")
