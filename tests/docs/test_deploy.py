"""The image, the manifest and the batch script: checked by their own linters, and that what they name is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from tuner.cli.app import app
from tuner.scheduler.handles import supports_budget, supports_live

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"
MANIFESTS = sorted((ROOT / "examples").rglob("*.yaml"))
BATCH = sorted((ROOT / "examples").rglob("*.sbatch"))


def options_of(command: str) -> set[str]:
    """What `chunktune COMMAND` takes."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {option for parameter in commands[command].params for option in parameter.opts}


def check_call(words: list[str]) -> None:
    """A call as `sweep PROFILE --out ...`."""
    given = {word for word in words[1:] if word.startswith("--")}
    assert given <= options_of(words[0]), words


def test_the_dockerfile_passes_hadolint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_image_copies_what_is_there_and_takes_a_vllm_that_is_supported() -> None:
    text = DOCKERFILE.read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in re.findall(r"^COPY (.*) \S+$", text, re.M):
        for name in source.split():
            assert (ROOT / name).exists(), name
            assert f"!{name}" in ignored, f"{name} is not sent to the build"
    tag = re.search(r"^ARG VLLM_TAG=v(\S+)$", text, re.M)
    assert tag is not None
    assert (supports_live(tag[1]), supports_budget(tag[1])) == ("", "")


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda p: p.name)
def test_a_manifest_is_valid_and_calls_what_there_is(manifest: Path) -> None:
    validate = Path(sys.executable).with_name("kubernetes-validate")
    done = subprocess.run([validate, "--strict", manifest], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = list(containers(yaml.safe_load(manifest.read_text())))
    assert calls
    for container in calls:
        check_call(container["args"])
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/cache/huggingface", "/dev/shm"} <= mounted


def containers(document: Any) -> Any:
    """Every container anywhere in a manifest."""
    if isinstance(document, dict):
        yield from document.get("containers", [])
        for value in document.values():
            yield from containers(value)


@pytest.mark.parametrize("script", BATCH, ids=lambda p: p.name)
def test_a_batch_script_is_shell_and_calls_what_there_is(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == 0, done.stderr
    calls = re.findall(r"^\s*chunktune (.*)$", script.read_text(), re.M)
    assert calls
    for call in calls:
        check_call(shlex.split(call))
