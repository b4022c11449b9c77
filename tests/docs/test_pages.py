"""What the pages say about themselves: links, commands and the generated reference."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from tests.docs.commands import Block, command_blocks, pages
from tuner.cli.app import app
from tuner.engine.causes import CAUSES

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"\bchunktune ([a-z]+)((?:[^\n`|#;]|\\\n)*)")


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        linked = (page.parent / path) if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+\s+(.*)$", linked.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda p: p.name)
def test_every_command_and_option_exists(page: Path) -> None:
    """Also of the blocks that only a GPU node can run."""
    root = typer.main.get_command(app)
    commands = root.commands  # type: ignore[attr-defined]
    for block in command_blocks(page.read_text(encoding="utf-8")):
        for name, rest in _COMMAND.findall(block.script):
            assert name in commands, f"{page.name}, line {block.line}: chunktune {name}"
            known = {option for parameter in commands[name].params for option in parameter.opts}
            given = re.findall(r"(?<!\S)(--[a-z][a-z-]*)", rest.partition(" -- ")[0])
            assert set(given) <= known | {"--help"}, f"{page.name}, line {block.line}: {set(given) - known}"


def test_the_profile_reference_is_current() -> None:
    script = ROOT / "docs" / "make_profile_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], timeout=60, check=False)
    assert done.returncode == 0, "run: python docs/make_profile_reference.py"


def test_every_cause_code_is_explained() -> None:
    told = re.findall(r"`(\w+)`", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    assert set(CAUSES) - set(told) == set()


def test_blocks_are_read_with_their_marks() -> None:
    text = """# Page
```sh
echo one
```
<!-- exits 4 -->
```console
$ echo two \\
    three
two three
$ false
```
<!-- on a GPU node -->
```sh
nvidia-smi
```
<!-- not run: takes hours -->
```bash
sleep 9999
```
```python
print()
```
```sh
make test
```
## On a GPU node
```sh
pip install x
```
"""
    assert command_blocks(text) == [
        Block(2, "echo one", "", 0),
        Block(6, "echo two \\\n    three\nfalse", "", 4),
        Block(13, "nvidia-smi", "for a GPU node", 0),
        Block(17, "sleep 9999", "takes hours", 0),
        Block(23, "make test", "a make target, run by continuous integration itself", 0),
        Block(27, "pip install x", "for a GPU node", 0),
    ]


def test_the_claims_page_has_the_measured_tables() -> None:
    from benchmarks.claims import fill

    page = ROOT / "docs" / "claims.md"
    results = ROOT / "benchmarks" / "claims.json"
    known = json.loads(results.read_text()) if results.exists() else {}
    text = page.read_text(encoding="utf-8")
    assert fill(text, known) == text, "run: python benchmarks/claims.py --docs docs/claims.md"
