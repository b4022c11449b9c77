"""A driver without hardware, and a simulated engine's memory page."""

import http.server
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
FAKE = HERE.parents[1] / "fakes" / "nvml" / "fake_nvml.c"

Ask = Callable[..., Any]


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with a libnvidia-ml.so.1 of our own, compiled with some definitions."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here to build the library with NVML's symbols")
    built: dict[tuple[str, ...], Path] = {}

    def build(*definitions: str) -> Path:
        if definitions not in built:
            folder = tmp_path_factory.mktemp("driver")
            library = folder / "libnvidia-ml.so.1"
            flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *(f"-D{d}" for d in definitions)]
            subprocess.run([compiler, *flags, "-o", library, FAKE], check=True, timeout=60)
            built[definitions] = folder
        return built[definitions]

    return build


@pytest.fixture
def ask_nvml(drivers: Callable[..., Path], tmp_path: Path) -> Ask:
    """Run `child.py COMMAND` where nvidia-ml-py finds that driver, which follows the script given."""

    def ask(script: str, *command: str, definitions: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Any:
        path = tmp_path / "script"
        path.write_text(script)
        environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        environment |= {"LD_LIBRARY_PATH": str(drivers(*definitions)), "CHUNKTUNE_FAKE_NVML": str(path), **(env or {})}
        child = [sys.executable, "-W", "error", str(HERE / "child.py"), *command]
        done = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return ask


@pytest.fixture(scope="session")
def child() -> ModuleType:
    """`child.py` in this process, for the sources that need no library."""
    spec = importlib.util.spec_from_file_location("memory_source_child", HERE / "child.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class MemoryPage:
    """Serves /chunktune/memory; `answers` are (status, body) in turn, the last one stays."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = []
        page = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, body = page.answers.pop(0) if len(page.answers) > 1 else page.answers[0]
                self.send_response(status if self.path == "/chunktune/memory" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def says(self, *values: object) -> None:
        self.answers = [v if isinstance(v, tuple) else (200, json.dumps(v).encode()) for v in values]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(5)
        self._server.server_close()


@pytest.fixture
def memory_page() -> Iterator[MemoryPage]:
    page = MemoryPage()
    page.says(
        {
            "devices": [
                {"device": "sim-0", "used_bytes": 70, "total_bytes": 100, "utilization": 0.5},
                {"device": "sim-1", "used_bytes": 60, "total_bytes": 100, "utilization": 1.0},
            ],
            "breakdown": {
                "weights_bytes": 35,
                "activation_peak_bytes": 5,
                "kv_pool_bytes": 30,
                "kv_in_use_peak_bytes": 12,
            },
        }
    )
    yield page
    page.close()
