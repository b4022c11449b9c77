"""The simulated scheduler under live control; `tests/vllm` puts the same checks to vLLM's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.live.checks import BLOCK, BLOCKS, CHECKS, CHUNK, LENGTH, SLOTS, Subject
from tuner.scheduler.folder import FolderChannel, make_folder
from tuner.sim.control import LiveCore
from tuner.sim.core import Request, SchedulerConfig, Step

CONFIG = SchedulerConfig(
    max_num_batched_tokens=CHUNK, max_num_seqs=SLOTS, max_model_len=LENGTH, num_blocks=BLOCKS, block_size=BLOCK
)


class SimulatedSubject:
    """`LiveCore` with so many steps under way as vLLM has."""

    def __init__(self, folder: Path, depth: int) -> None:
        self.folder = make_folder(folder)
        self.now_s = 1000.0
        self._depth = depth
        self._core = LiveCore(CONFIG, FolderChannel(self.folder, 0), 8192)
        self._under_way: deque[Step] = deque()

    def ask(self, name: str, prompt: list[int], tokens: int) -> None:
        self._core.add(Request(name, prompt, tokens, self.now_s))

    def step(self) -> int:
        step = self._core.plan(self.now_s)
        if step is not None:
            self._under_way.append(step)
        if self._under_way and (step is None or len(self._under_way) >= self._depth):
            self._core.finish(self._under_way.popleft(), self.now_s)
        return 0 if step is None else sum(part.tokens for part in step.parts)

    @property
    def idle(self) -> bool:
        return not self._core.unfinished and not self._under_way


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_it_is_switched_as_the_contract_says(check: Callable[[Subject], None], depth: int, tmp_path: Path) -> None:
    check(SimulatedSubject(tmp_path / "live", depth))
