"""The plug-in is a subclass: none of its own names may be one that vLLM's scheduler already has."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

VLLM = os.environ.get("CHUNKTUNE_TEST_VLLM", "")
pytestmark = pytest.mark.skipif(not VLLM, reason="CHUNKTUNE_TEST_VLLM names no vllm command")
PLUGIN = Path(__file__).resolve().parents[2] / "tuner/scheduler/plugin.py"
REPLACED = {
    "__init__",
    "_reserve_prefill_lookahead",
    "add_request",
    "finish_requests",
    "schedule",
    "update_from_output",
}


def names_of(source: Path) -> set[str]:
    """Methods and attributes that the classes of a module give to their instances."""
    names: set[str] = set()
    for each in ast.walk(ast.parse(source.read_text())):
        if isinstance(each, ast.ClassDef):
            names |= {item.name for item in each.body if isinstance(item, ast.FunctionDef)}
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            names.add(each.attr)
    return names


def test_only_what_is_meant_to_replace_vllms_own_does() -> None:
    (folder,) = Path(VLLM).parents[1].glob("lib/python*/site-packages/vllm/v1/core/sched")
    vllms = set().union(*(names_of(folder / name) for name in ("interface.py", "scheduler.py", "async_scheduler.py")))
    assert {"_free_blocks", "running", "waiting"} <= vllms
    assert names_of(PLUGIN) & vllms == REPLACED
