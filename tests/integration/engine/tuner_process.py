"""A tuner in one file: starts an engine as the argument says, reports it, and waits to be killed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tuner.engine.launch import LaunchSpec, launched


async def main() -> None:
    given = json.loads(sys.argv[1])
    spec = LaunchSpec(
        launcher=(sys.executable, given["fake"]),
        kind="vllm",
        model="fake/model",
        args={},
        env={"FAKE_VLLM": json.dumps(given["script"])},
        log_path=Path(given["folder"]) / "engine.log",
        startup_timeout_s=20,
        record_dir=Path(given["folder"]) / "records",
        term_wait_s=0.5,
    )
    async with launched(spec) as engine:
        print(json.dumps({"pids": engine.process_ids(), "port": engine.port}), flush=True)
        await asyncio.sleep(60)


asyncio.run(main())
