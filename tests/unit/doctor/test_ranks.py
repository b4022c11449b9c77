"""Whether there are as many GPUs as a profile spreads an engine over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.doctor.test_sense import profile
from tuner.doctor.ranks import judge_pretended, judge_visible
from tuner.domain.profile import Profile, Space
from tuner.profile import load_profile

PROFILES = sorted((Path(__file__).parents[3] / "profiles").glob("*.yaml"))


def trying(**knobs: Any) -> Profile:
    return profile().model_copy(update={"space": Space.model_validate(knobs)})


def test_the_product_decides_and_is_shown() -> None:
    found = judge_visible(profile({"tensor_parallel_size": 2, "data_parallel_size": 2}), 3)
    assert found.status == "wrong"
    assert "4 GPUs (tensor_parallel_size 2 x data_parallel_size 2), 3 are visible" in found.message


@pytest.mark.parametrize("sizes", [[1, 2], {"low": 1, "high": 2}])
def test_the_values_of_the_space_count_too(sizes: object) -> None:
    assert judge_pretended(trying(tensor_parallel_size=sizes), 1).status == "wrong"
    assert judge_visible(trying(tensor_parallel_size=sizes), 1).status == "wrong"


def test_the_pretended_machine_has_hardware_count_gpus() -> None:
    two = profile({"tensor_parallel_size": 2})
    found = judge_pretended(two, 1)
    assert found.status == "wrong"
    assert "hardware.count is 1" in found.message
    assert "Set hardware.count: 2" in found.hint
    assert judge_pretended(two, 2).status == "ok"
    assert judge_pretended(two, None).status == "ok"


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "data_parallel_size"])
def test_the_simulated_engine_spreads_by_tensors_only(name: str) -> None:
    found = judge_pretended(profile({name: 2}), 8)
    assert found.status == "wrong"
    assert name in found.message


@pytest.mark.parametrize("path", PROFILES, ids=lambda p: p.stem)
def test_our_own_profiles_have_gpus_enough(path: Path) -> None:
    own = load_profile(str(path))
    assert judge_pretended(own, own.hardware.count).status == "ok"
