"""Failures that only a GPU node has, as vLLM, PyTorch and NCCL word them."""

from __future__ import annotations

import pytest

from tuner.engine.diagnosis import CAUSES, diagnose
from tuner.engine.policy import POLICIES

WORKER = "(Worker_TP2 pid=4242) ERROR 11-29 10:54:19 [multiproc_executor.py:822] "


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error "
            "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
            "nccl_failed",
        ),
        ("RuntimeError: NCCL error: ncclUnhandledCudaError: Call to CUDA function failed.", "nccl_failed"),
        ("OSError: [Errno 28] No space left on device: '/psm_9a1c2f'", "shm_too_small"),
        (
            "RuntimeError: unable to write to file </torch_1_2_3>: No space left on device (28) /dev/shm",
            "shm_too_small",
        ),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 12040).",
            "driver_too_old",
        ),
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display "
            "driver / cuda driver combination",
            "driver_too_old",
        ),
        (
            "huggingface_hub.errors.HfHubHTTPError: 401 Client Error: Unauthorized for url. Invalid credentials in "
            "Authorization header",
            "bad_token",
        ),
        (
            "AssertionError: Error in memory profiling. Initial free memory 70.1 GiB, current free memory 75.0 GiB.",
            "memory_profiling_failed",
        ),
        ("AssertionError: local_rank 2 is out of bounds for 2 devices", "too_few_gpus"),
        (
            "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "device_busy",
        ),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu_fault"),
        (
            "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.",
            "rendezvous_timeout",
        ),
    ],
)
def test_a_gpu_nodes_failure_has_its_cause(text: str, code: str) -> None:
    log = [
        f"{WORKER}Traceback (most recent call last):",
        f"{WORKER}{text}",
        "RuntimeError: Engine core initialization failed.",
    ]
    found = diagnose(log, 1, phase="start")
    assert found.code == code
    assert CAUSES[code].hint
    assert code in POLICIES


def test_out_of_memory_while_the_weights_are_loaded_is_not_the_chunks_fault() -> None:
    info = "(Worker_TP0 pid=9) INFO 11-29 10:54:19 [gpu_model_runner.py:5040] "
    oom = f"{WORKER}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB."
    loading = f"{info}Starting to load model meta-llama/Llama-3.1-70B-Instruct..."
    loaded = f"{info}Model loading took 65.7 GiB memory and 80.1 seconds"
    assert diagnose([loading, oom], 1, phase="start").code == "weights_too_large"
    assert diagnose([loading, loaded, oom], 1, phase="start").code == "cuda_oom"
    assert POLICIES["weights_too_large"] == "fatal"


def test_every_cause_has_a_policy() -> None:
    assert set(CAUSES) <= set(POLICIES)
