"""The plug-ins are subclasses: none of their own names may be one that vLLM's scheduler, or the other one, has."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

VLLM = os.environ.get("CHUNKTUNE_TEST_VLLM", "")
pytestmark = pytest.mark.skipif(not VLLM, reason="CHUNKTUNE_TEST_VLLM names no vllm command")
OURS = Path(__file__).resolve().parents[2] / "tuner" / "scheduler"
BUDGET_REPLACES = {
    "__init__",
    "_reserve_prefill_lookahead",
    "add_request",
    "finish_requests",
    "reset_prefix_cache",
    "schedule",
    "update_from_output",
}
LIVE_REPLACES = {"__init__", "add_request", "schedule", "scheduler_config"}


def names_of(source: Path) -> set[str]:
    """Methods and attributes that the classes of a module whose names end in Scheduler give to their instances."""
    names: set[str] = set()
    for found in ast.walk(ast.parse(source.read_text())):
        if not isinstance(found, ast.ClassDef) or not found.name.endswith(("Scheduler", "SchedulerInterface")):
            continue
        for each in ast.walk(found):
            if isinstance(each, ast.FunctionDef) and each in found.body:
                names.add(each.name)
            elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                names |= {each.attr} if ast.unparse(each.value) == "self" else set()
    return names


def test_only_what_is_meant_to_replace_vllms_own_does() -> None:
    (folder,) = Path(VLLM).parents[1].glob("lib/python*/site-packages/vllm/v1/core/sched")
    vllms = set().union(*(names_of(folder / name) for name in ("interface.py", "scheduler.py", "async_scheduler.py")))
    assert {"_free_blocks", "running", "waiting"} <= vllms
    budgets, lives = names_of(OURS / "plugin.py"), names_of(OURS / "live.py")
    assert budgets & vllms == BUDGET_REPLACES
    assert lives & vllms == LIVE_REPLACES
    assert {"_control", "_prefilling"} <= lives
    assert lives & budgets <= BUDGET_REPLACES
