"""Takes and gives back device memory on request, so that a sampler can be checked against it.

Reads lines from standard input: `take BYTES` (answers the bytes taken), `give` (gives all back, answers 0).
The first line it writes is the UUID of the device. By torch where it is installed, else by the driver's own
library.
"""

from __future__ import annotations

import ctypes
import sys
import uuid
from typing import Any


class WithTorch:
    """Device 0 by torch."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise ImportError("this torch sees no CUDA device")
        self._torch = torch
        self._kept: list[Any] = []
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()

    def uuid(self) -> str:
        return f"GPU-{self._torch.cuda.get_device_properties(0).uuid}"

    def take(self, size: int) -> int:
        before = self._torch.cuda.memory_reserved()
        self._kept.append(self._torch.zeros(size, dtype=self._torch.uint8, device="cuda"))
        self._torch.cuda.synchronize()
        return int(self._torch.cuda.memory_reserved() - before)

    def give(self) -> None:
        self._kept.clear()
        self._torch.cuda.synchronize()
        self._torch.cuda.empty_cache()


class WithDriver:
    """Device 0 by libcuda."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._kept: list[ctypes.c_uint64] = []
        self._device = ctypes.c_int()
        context = ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            raise SystemExit(f"{name} failed with {code}")

    def uuid(self) -> str:
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid", raw, self._device)
        return f"GPU-{uuid.UUID(bytes=bytes(raw))}"

    def take(self, size: int) -> int:
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        self._call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(1), ctypes.c_size_t(size))
        self._call("cuCtxSynchronize")
        self._kept.append(pointer)
        return size

    def give(self) -> None:
        while self._kept:
            self._call("cuMemFree_v2", self._kept.pop())


def main() -> None:
    try:
        device: WithTorch | WithDriver = WithTorch()
    except ImportError:
        device = WithDriver()
    print(device.uuid(), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["take", size]:
                print(device.take(int(size)), flush=True)
            case ["give"]:
                device.give()
                print(0, flush=True)
            case other:
                raise SystemExit(f"no request {other}")


if __name__ == "__main__":
    main()
