"""NVML as nvidia-ml-py loads it, from a library of our own that follows a script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

GPU = "GPU-11111111-2222-3333-4444-555555555555"
OTHER = "GPU-99999999-8888-7777-6666-555555555555"
MIG = "MIG-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
ONE = f"driver 570.86.15\ndevice {GPU} 1000 NVIDIA H100 80GB HBM3\nused {GPU} 100 200 300 400\nbusy {GPU} 10 50 90\n"
TWO = f"{ONE}device {OTHER} 2000 NVIDIA H100 80GB HBM3\nused {OTHER} 700\n"

NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, GPU_IS_LOST, UNKNOWN = 3, 4, 9, 15, 999


def _column(found, name: str) -> list:
    return [[sample[name] for sample in look] for look in found["looks"]]


def test_values_over_time(ask_nvml) -> None:
    # Opening takes the first value of `used`, for the capacity.
    found = ask_nvml(ONE, "samples", "4")
    assert _column(found, "used_bytes") == [[200], [300], [400], [400]]
    assert _column(found, "utilization") == [[0.1], [0.5], [0.9], [0.9]]
    assert _column(found, "at_s") == [[0.0], [1.0], [2.0], [3.0]]
    assert found["totals"] == {GPU: 1000}
    assert found["reason"] == ""


def test_devices_are_named_by_uuid_and_can_be_picked(ask_nvml) -> None:
    assert _column(ask_nvml(TWO, "samples", "1"), "device") == [[GPU, OTHER]]
    assert _column(ask_nvml(TWO, "samples", "1", OTHER), "device") == [[OTHER]]


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("1", [OTHER]),
        (f"{OTHER}", [OTHER]),
        ("1,0", [OTHER, GPU]),
        ("0,-1,1", [GPU]),
        (f"{GPU}, {OTHER}", [GPU, OTHER]),
    ],
)
def test_the_engine_s_visible_devices_are_the_ones_looked_at(ask_nvml, visible: str, devices: list[str]) -> None:
    found = ask_nvml(TWO, "samples", "1", env={"CUDA_VISIBLE_DEVICES": visible})
    assert _column(found, "device") == [devices]


@pytest.mark.parametrize(("visible", "device"), [(None, GPU), ("1,0", OTHER)])
def test_an_engine_of_one_rank_uses_the_first_visible_device(ask_nvml, visible: str | None, device: str) -> None:
    found = ask_nvml(TWO, "first", "1", env={"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    assert _column(found, "device") == [[device]]


def test_what_the_driver_reserves_is_not_used(ask_nvml) -> None:
    assert _column(ask_nvml(f"{ONE}reserved {GPU} 50\n", "samples", "1"), "used_bytes") == [[200]]


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_devices_are_not_looked_at(ask_nvml, visible: str) -> None:
    assert "no device" in ask_nvml(TWO, "samples", "1", env={"CUDA_VISIBLE_DEVICES": visible})["error"]


def test_a_slice_of_a_device_is_found_by_its_uuid(ask_nvml) -> None:
    script = f"{ONE}device {MIG} 500 MIG 1g.10gb\nused {MIG} 42\nerror nvmlDeviceGetUtilizationRates {NOT_SUPPORTED}\n"
    found = ask_nvml(script, "samples", "1", env={"CUDA_VISIBLE_DEVICES": MIG})
    assert _column(found, "used_bytes") == [[42]]
    assert _column(found, "utilization") == [[None]]


def test_an_unknown_device_is_named(ask_nvml) -> None:
    found = ask_nvml(ONE, "samples", "1", OTHER)
    assert OTHER in found["error"]
    assert "Not Found" in found["error"]


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, GPU_IS_LOST, UNKNOWN])
@pytest.mark.parametrize("function", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetComputeRunningProcesses_v3"])
def test_what_one_call_refuses_does_not_stop_the_rest(ask_nvml, function: str, code: int) -> None:
    found = ask_nvml(f"{TWO}error {function} {code}\n", "samples", "2")
    assert _column(found, "used_bytes") == [[200, 700], [300, 700]]
    lost = "utilization" if "Utilization" in function else "engine_bytes"
    assert _column(found, lost) == [[None, None], [None, None]]
    assert GPU in found["reason"]


def test_a_function_that_the_driver_lacks(ask_nvml) -> None:
    found = ask_nvml(ONE, "samples", "2", definitions=("WITHOUT_UTILIZATION",))
    assert _column(found, "used_bytes") == [[200], [300]]
    assert _column(found, "utilization") == [[None], [None]]
    assert "utilization" in found["reason"]


def test_a_device_that_is_lost_on_the_way_leaves_a_gap_and_a_reason(ask_nvml) -> None:
    found = ask_nvml(f"{ONE}error nvmlDeviceGetMemoryInfo {GPU_IS_LOST} 3 3\n", "samples", "3")
    assert [len(look) for look in found["looks"]] == [1, 0, 1]
    assert "lost" in found["reason"]


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("nvmlInitWithFlags", DRIVER_NOT_LOADED),
        ("nvmlInitWithFlags", NO_PERMISSION),
        ("nvmlDeviceGetCount_v2", UNKNOWN),
        ("nvmlDeviceGetHandleByIndex_v2", GPU_IS_LOST),
        ("nvmlDeviceGetUUID", NOT_SUPPORTED),
        ("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED),
    ],
)
def test_what_cannot_open_has_a_reason_and_the_host_steps_in(ask_nvml, function: str, code: int) -> None:
    script = f"{ONE}error {function} {code}\n"
    assert ask_nvml(script, "samples", "1")["error"].startswith("NVML: ")
    chosen = ask_nvml(script, "choose", "ours")
    assert chosen["name"] == "host"
    assert chosen["reason"].startswith("NVML: ")
    assert "resident memory" in chosen["reason"]
    assert chosen["used"][0] > 0


def test_a_server_that_is_not_ours_and_no_driver_is_unavailable(ask_nvml) -> None:
    chosen = ask_nvml(f"{ONE}error nvmlInitWithFlags {DRIVER_NOT_LOADED}\n", "choose", "theirs")
    assert (chosen["name"], chosen["used"]) == ("unavailable", [])
    assert "Driver Not Loaded" in chosen["reason"]


def test_a_driver_that_works_is_chosen(ask_nvml) -> None:
    assert ask_nvml(ONE, "choose", "ours") == {"name": "nvml", "reason": "", "used": [200]}


def test_no_library_at_all(tmp_path: Path) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    child = Path(__file__).with_name("child.py")
    done = subprocess.run(
        [sys.executable, child, "choose", "ours"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert '"name": "host"' in done.stdout
    assert "Shared Library Not Found" in done.stdout


def test_a_namesake_module_that_breaks_on_import_is_a_reason(ask_nvml, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(
        "import warnings\nwarnings.warn('deprecated', FutureWarning)\nraise RuntimeError('odd')\n"
    )
    chosen = ask_nvml(ONE, "choose", "ours", env={"PYTHONPATH": str(tmp_path)})
    assert chosen["name"] == "host"
    assert "odd" in chosen["reason"]


def test_a_namesake_module_that_only_warns_works_under_strict_filters(ask_nvml, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(
        "import pathlib, site, warnings\n"
        "warnings.warn('The pynvml package is deprecated', FutureWarning)\n"
        "real = next(p for f in site.getsitepackages() if (p := pathlib.Path(f) / 'pynvml.py').exists())\n"
        "exec(compile(real.read_text(), str(real), 'exec'))\n"
    )
    assert ask_nvml(ONE, "choose", "ours", env={"PYTHONPATH": str(tmp_path)})["name"] == "nvml"


def test_the_engine_s_own_bytes_where_its_pids_are_seen(ask_nvml) -> None:
    seen = f"{ONE}process {GPU} 4242 60\nprocess {GPU} 7 30\n"
    assert _column(ask_nvml(seen, "samples", "1"), "engine_bytes") == [[60]]


@pytest.mark.parametrize("processes", ["", f"process {GPU} 7 30\n", f"process {GPU} 4242\n"])
def test_else_they_are_null(ask_nvml, processes: str) -> None:
    """No process, only others' (or ours under another pid namespace), or bytes that NVML withholds."""
    assert _column(ask_nvml(ONE + processes, "samples", "1"), "engine_bytes") == [[None]]


def test_devices_are_described_with_their_tenants(ask_nvml) -> None:
    found = ask_nvml(f"{ONE}process {GPU} 7 30\nprocess {GPU} 8\n", "describe")
    assert found["driver_version"] == "570.86.15"
    assert found["reason"] == ""
    assert found["devices"] == [
        {
            "name": "NVIDIA H100 80GB HBM3",
            "uuid": GPU,
            "memory_bytes": 1000,
            "used_bytes": 200,
            "tenants": [{"pid": 7, "used_bytes": 30}, {"pid": 8, "used_bytes": None}],
        }
    ]


@pytest.mark.parametrize("function", ["nvmlSystemGetDriverVersion", "nvmlDeviceGetComputeRunningProcesses_v3"])
def test_a_description_does_without_what_is_refused(ask_nvml, function: str) -> None:
    found = ask_nvml(f"{ONE}error {function} {NO_PERMISSION}\n", "describe")
    assert [d["uuid"] for d in found["devices"]] == [GPU]


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetName"])
def test_a_description_that_cannot_be_had_is_a_reason(ask_nvml, function: str) -> None:
    found = ask_nvml(f"{ONE}error {function} {UNKNOWN}\n", "describe")
    assert found["devices"] == []
    assert found["reason"].startswith("NVML: ")


def test_the_sampler_gathers_a_timeline(ask_nvml) -> None:
    found = ask_nvml(
        f"device {GPU} 1000 H100\nused {GPU} 1 {' '.join(str(v) for v in range(100, 200))}\n", "sampler", "0.3"
    )
    assert found["source"] == "nvml"
    assert found["used"] == list(range(100, 100 + len(found["used"])))
    assert len(found["used"]) >= 3


def test_a_driver_that_never_opens_makes_the_timeline_unavailable(ask_nvml) -> None:
    found = ask_nvml(f"{ONE}error nvmlInitWithFlags {DRIVER_NOT_LOADED}\n", "sampler", "0.1")
    assert (found["source"], found["used"]) == ("unavailable", [])
    assert "Driver Not Loaded" in found["reason"]


def test_a_driver_that_hangs_does_not_hold_up_the_end(ask_nvml) -> None:
    found = ask_nvml(f"{ONE}hang nvmlDeviceGetUtilizationRates 20000\n", "sampler", "0.1")
    assert found["stop_s"] < 10
    assert "did not answer" in found["reason"]
