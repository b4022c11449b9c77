import pytest

from tuner.telemetry.metrics import metrics_url
from tuner.telemetry.nvml import visible_devices


@pytest.mark.parametrize("base", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"])
def test_the_metrics_stand_beside_v1(base: str) -> None:
    assert metrics_url(base) == "http://h:8000/metrics"


def test_a_server_below_a_path_keeps_it() -> None:
    assert metrics_url("https://h/models/a/v1") == "https://h/models/a/metrics"


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, None),
        ("", []),
        ("0,1", ["0", "1"]),
        ("GPU-a, MIG-b", ["GPU-a", "MIG-b"]),
        ("-1", []),
        ("2,-1,3", ["2"]),
    ],
)
def test_visible_devices_as_cuda_reads_them(value: str | None, names: list[str] | None) -> None:
    assert visible_devices({} if value is None else {"CUDA_VISIBLE_DEVICES": value}) == names
