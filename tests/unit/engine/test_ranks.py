"""Over how many GPUs of this node an engine is spread."""

from __future__ import annotations

import pytest

from tuner.domain.setting import Scalar
from tuner.engine.ranks import gpus_of_node


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 4}, 4),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4}, 8),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4, "data_parallel_size_local": 1}, 2),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4, "data_parallel_rank": 0}, 2),
        ({"tensor_parallel_size": 8, "pipeline_parallel_size": 2, "nnodes": 2}, 8),
        ({"tensor_parallel_size": 16, "distributed_executor_backend": "ray"}, None),
    ],
)
def test_gpus_of_this_node(args: dict[str, Scalar], wanted: int | None) -> None:
    assert gpus_of_node(args) == wanted
