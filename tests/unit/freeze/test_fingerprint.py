"""What makes two measurements incomparable, and what is only a suspect."""

from __future__ import annotations

from typing import Any

import pytest

from tuner.domain.experiment import Fingerprint
from tuner.freeze.fingerprint import describe_gpus, differences

GPU = {"name": "NVIDIA H100", "memory_bytes": 80 * 2**30}
BASE: dict[str, Any] = {
    "model": "m",
    "engine": "vllm",
    "vllm_version": "0.32.0",
    "driver_version": "570.1",
    "model_revision": "abc",
    "gpus": [GPU, GPU],
}


def changed(**fields: Any) -> list[tuple[str, bool]]:
    found = differences(Fingerprint(**BASE), Fingerprint(**(BASE | fields)))
    return [(d.field, d.comparable) for d in found]


def test_nothing_changed() -> None:
    assert changed() == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": "other"}, ("model", False)),
        ({"engine": "sim"}, ("engine", False)),
        ({"gpus": [GPU]}, ("GPU", False)),
        ({"gpus": [GPU, {"name": "NVIDIA A100", "memory_bytes": 80 * 2**30}]}, ("GPU", False)),
        ({"gpus": [GPU, {"name": "NVIDIA H100", "memory_bytes": 40 * 2**30}]}, ("GPU", False)),
        ({"gpus": []}, ("GPU", False)),
        ({"vllm_version": "0.33.0"}, ("vLLM", True)),
        ({"driver_version": "580"}, ("driver", True)),
        ({"model_revision": "def"}, ("model revision", True)),
    ],
)
def test_one_field_changed(fields: dict[str, Any], expected: tuple[str, bool]) -> None:
    assert changed(**fields) == [expected]


def test_a_megabyte_of_gpu_memory_is_no_other_gpu() -> None:
    assert changed(gpus=[GPU, {"name": "NVIDIA H100", "memory_bytes": 80 * 2**30 - 2**20}]) == []


def test_what_one_side_does_not_know_is_no_difference() -> None:
    assert changed(driver_version=None, vllm_version=None, model_revision=None) == []


def test_the_incomparable_comes_first() -> None:
    assert changed(vllm_version="0.33.0", model="x")[0] == ("model", False)


def test_gpus_in_words() -> None:
    assert describe_gpus([GPU, GPU]) == "2 x NVIDIA H100 (80 GiB)"
    assert describe_gpus([]) == "no GPU"
