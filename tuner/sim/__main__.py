"""`python -m tuner.sim serve MODEL ...`: takes the place of `vllm serve` where there is no GPU."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from tuner.clock import SYSTEM_CLOCK
from tuner.errors import UsageError
from tuner.scheduler.folder import channel_of
from tuner.scheduler.handles import LiveHandleError
from tuner.scheduler.messages import LIVE_CLASS, Channel
from tuner.sim.boot import ConfigError, Hardware, Plan, StartError, dev_mode, make_plan
from tuner.sim.options import VERSION, parse_serve

USAGE = """usage: python -m tuner.sim [-h] [-v] {serve} ...

The simulated engine of chunktune: takes the argv of `vllm serve` and speaks its API. The pretended machine is
described by the environment variable CHUNKTUNE_SIM (JSON: gpu, count, cost_model, noise, seed, speed,
step_time_scale); step times come from aiconfigurator-core.
"""


def main(argv: Sequence[str]) -> int:
    """The process: 0 after SIGTERM or SIGINT, 1 when the engine does not start, 2 for wrong options."""
    if argv[:1] in (["-v"], ["--version"]):
        print(VERSION)  # noqa: T201
        return 0
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)  # noqa: T201
        return 0
    if argv[:1] != ["serve"]:
        print(USAGE, file=sys.stderr)  # noqa: T201
        return 2
    options = parse_serve(argv[1:])
    log = _Log()
    try:
        plan = make_plan(options, Hardware.from_environment(os.environ))
        channel = channel_of(os.environ, 0) if options.scheduler_cls == LIVE_CLASS else None
    except UsageError as error:
        return log.wrong_settings(error)
    except ConfigError as error:
        log.refused(error)
        return 1
    except (StartError, LiveHandleError) as error:
        log.engine("ERROR", "EngineCore failed to start.")
        log.engine("ERROR", f"ValueError: {error}")
        log.plain("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        return 1
    for line in plan.config_lines():
        log.api("INFO", line)
    for line in plan.engine_lines():
        log.engine("INFO", line)
    try:
        return _run(plan, options, channel, log)
    except UsageError as error:
        return log.wrong_settings(error)


class _Log:
    """Lines as vLLM writes them."""

    def api(self, level: str, text: str) -> None:
        self._write("APIServer", level, text)

    def engine(self, level: str, text: str) -> None:
        self._write("EngineCore", level, text)

    def wrong_settings(self, error: UsageError) -> int:
        """The hardware or its cost model, said like an option that the command line does not take; the exit code."""
        self.plain(f"vllm serve: error: {' '.join(str(error).split())}")
        return 1

    def refused(self, error: ConfigError) -> None:
        """The end of the traceback that pydantic leaves of options that contradict each other."""
        self.plain("pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig")
        self.plain(f"  Value error, {error} [type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]")

    def plain(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201

    def _write(self, process: str, level: str, text: str) -> None:
        stamp = time.strftime("%m-%d %H:%M:%S")
        for line in text.splitlines():
            self.plain(f"({process} pid={os.getpid()}) {level} {stamp} [sim.py:1] {line}")


def _run(plan: Plan, options: argparse.Namespace, channel: Channel | None, log: _Log) -> int:
    # The tables are big: their reading starts before the web server's import, which waits for nothing.
    from tuner.sim.cost import MeasuredCost

    cost = MeasuredCost(plan.cost_model, plan.gpu, plan.tp)
    host = options.host or "0.0.0.0"
    try:
        listener = socket.create_server((host, options.port), backlog=2048, reuse_port=False)
    except OSError as error:
        log.plain(f"OSError: [Errno {error.errno}] {error.strerror}: {host}:{options.port}")
        return 1
    with listener:
        serving = _serve(plan, options, channel, cost, listener, log)
        try:
            import uvloop
        except ImportError:
            asyncio.run(serving)
        else:
            uvloop.run(serving)
    return 0


async def _serve(
    plan: Plan, options: argparse.Namespace, channel: Channel | None, cost: Any, listener: socket.socket, log: _Log
) -> None:
    from aiohttp import web

    from tuner.sim.api import Api, vocabulary_size
    from tuner.sim.control import LiveCore
    from tuner.sim.core import Core
    from tuner.sim.live import LiveEngine
    from tuner.sim.policy import BudgetPolicy

    budget = plan.budget if plan.budget is not None and not plan.budget.off else None
    if budget is not None:
        log.engine("INFO", f"chunktune reuse budget: {budget}")
    core: Core
    if channel is not None:
        log.engine("INFO", "chunktune live control of the simulated scheduler")
        core = LiveCore(plan.scheduler, channel, plan.stock_chunk, budget, vocabulary=vocabulary_size())
    else:
        policy = BudgetPolicy(budget, plan.scheduler.num_blocks) if budget is not None else None
        core = Core(plan.scheduler, policy, vocabulary=vocabulary_size())
    engine = LiveEngine(plan, core, cost, SYSTEM_CLOCK)
    api = Api(
        engine,
        token_details=options.enable_prompt_tokens_details,
        force_usage=options.enable_force_include_usage,
        api_keys=options.api_key or ([os.environ["VLLM_API_KEY"]] if os.environ.get("VLLM_API_KEY") else []),
        dev_mode=dev_mode(),
        server_info={"vllm_config": _described(plan, options)},
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(api.application(), access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    running = asyncio.create_task(engine.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await web.SockSite(runner, listener).start()
        address = listener.getsockname()
        log.api("INFO", f"Starting vLLM server on http://{address[0]}:{address[1]} (simulated)")
        log.plain("INFO:     Application startup complete.")
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        stopping.cancel()
        running.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)
        await runner.cleanup()


def _described(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    scheduler = plan.scheduler
    return {
        "model_config": {"model": plan.model, "max_model_len": scheduler.max_model_len, "seed": options.seed},
        "scheduler_config": {
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_num_seqs": scheduler.max_num_seqs,
            "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
            "enable_chunked_prefill": scheduler.enable_chunked_prefill,
            "async_scheduling": plan.timing.depth == 2,
            "scheduler_cls": options.scheduler_cls,
        },
        "cache_config": {
            "block_size": scheduler.block_size,
            "num_gpu_blocks": scheduler.num_blocks,
            "enable_prefix_caching": scheduler.enable_prefix_caching,
            "gpu_memory_utilization": plan.utilization,
        },
        "parallel_config": {"tensor_parallel_size": plan.tp},
        "additional_config": options.additional_config,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
