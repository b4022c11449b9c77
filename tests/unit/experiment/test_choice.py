"""Which engine a command runs on."""

from __future__ import annotations

import pytest

from tuner.domain.profile import Hardware
from tuner.errors import UsageError
from tuner.experiment.choice import choose_engine


@pytest.mark.parametrize(
    "command",
    ["docker run --gpus all vllm/vllm-openai", "/usr/bin/podman exec x vllm", "kubectl exec pod -- vllm", "srun vllm"],
)
def test_a_launcher_whose_server_outlives_it_is_refused(command: str) -> None:
    with pytest.raises(UsageError, match="outlive its stop") as caught:
        choose_engine("vllm", command, Hardware(), "m/x")
    assert "inside the container" in caught.value.hint


def test_a_command_that_runs_vllm_itself_is_taken() -> None:
    assert choose_engine("auto", "python -m docker_tools", Hardware(), "m/x").kind == "vllm"
