"""vLLM's scheduler under live control, put to the checks of `tests/contract/live`. Runs in vLLM's Python.

python live_contract.py MODEL_DIR      prints one JSON object: {"sync/check": null or what is wrong}
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import live_side_by_side as beside
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from tests.contract.live.checks import BLOCK, BLOCKS, CHECKS, CHUNK, LENGTH, SLOTS
from tuner.scheduler import LiveScheduler
from tuner.scheduler.folder import make_folder
from tuner.scheduler.handles import LiveHandleError
from tuner.scheduler.messages import FOLDER_VARIABLE


class VllmSubject:
    """The live scheduler with the clock of the checks."""

    def __init__(self, clock: beside.Clock, model: str, folder: Path, kind: str) -> None:
        self.folder = make_folder(folder)
        os.environ[FOLDER_VARIABLE] = str(self.folder)
        self._clock = clock
        scheduler = beside.build(LiveScheduler, model, BLOCKS, kind, {"max_num_batched_tokens": CHUNK})
        self._driver = beside.Driver(scheduler, 1 if kind == "sync" else 2)

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    @now_s.setter
    def now_s(self, value: float) -> None:
        self._clock.now_s = value

    def ask(self, name: str, prompt: list[int], tokens: int) -> None:
        self._driver.scheduler.add_request(beside.request(name, prompt, tokens))

    def step(self) -> int:
        return sum(self._driver.step()["shares"].values())

    @property
    def idle(self) -> bool:
        return self._driver.idle()


def refused_at_construction(model: str, folder: Path, says: str) -> str | None:
    """None when a scheduler is not even built with this folder, and says so in one line."""
    os.environ[FOLDER_VARIABLE] = str(folder) if folder.name else ""
    try:
        beside.build(LiveScheduler, model, BLOCKS, "async", {})
    except LiveHandleError as error:
        return None if says in str(error) and "\n" not in str(error) else str(error)
    return "was built"


def main() -> int:
    model = sys.argv[1]
    init_none_hash(sha256)
    beside.BLOCK, beside.LENGTH, beside.SLOTS = BLOCK, LENGTH, SLOTS
    clock = beside.Clock()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as parent:
        for kind in ("sync", "async"):
            for check in CHECKS:
                name = f"{kind}/{check.__name__}"
                clock.now_s = 1000.0
                results[name] = None
                try:
                    check(VllmSubject(clock, model, Path(parent) / name.replace("/", "-"), kind))
                except Exception:
                    results[name] = traceback.format_exc()[-900:]
        shared = Path(parent) / "shared"
        shared.mkdir()
        shared.chmod(0o750)
        results["shared folder"] = refused_at_construction(model, shared, "has mode 0750, which lets others in")
        results["no folder"] = refused_at_construction(model, Path(), "CHUNKTUNE_LIVE is not set")
        window = VllmSubject(clock, model, Path(parent) / "window", "window")
        results["two kinds of cache"] = no_budget(window)
    print(json.dumps(results))
    return 0


def no_budget(subject: VllmSubject) -> str | None:
    """None when all but the budget can be switched on a model with two KV cache groups."""
    from tests.contract.live.checks import BUDGET, Talk

    talk = Talk(subject)
    report = talk.apply(max_num_batched_tokens=32, reuse_budget=dict.fromkeys(BUDGET, 0))
    refused = talk.command("apply", {"reuse_budget": BUDGET})
    fine = not report.budget_supported and refused.state == "refused" and "this model has 2" in refused.reason
    return None if fine else f"{report} {refused}"


if __name__ == "__main__":
    sys.exit(main())
