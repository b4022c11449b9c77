import pytest

from tuner.telemetry.metrics import is_loopback, metrics_url
from tuner.telemetry.nvml import visible_devices


@pytest.mark.parametrize("base", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"])
def test_the_metrics_stand_beside_v1(base: str) -> None:
    assert metrics_url(base) == "http://h:8000/metrics"


def test_a_server_below_a_path_keeps_it() -> None:
    assert metrics_url("https://h/models/a/v1") == "https://h/models/a/metrics"


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.8.0.1", True),
        ("http://localhost:1/v1", True),
        ("http://[::1]:8000", True),
        ("http://10.0.0.5:8000", False),
        ("https://example.org", False),
        ("http://localhost.example.org", False),
    ],
)
def test_loopback_is_told_from_the_rest(url: str, loopback: bool) -> None:
    assert is_loopback(url) is loopback


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
