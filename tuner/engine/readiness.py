"""Asking a starting engine over HTTP: whether it is the one we started, and what it runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from tuner.domain.setting import Scalar
from tuner.engine.diagnosis import cause
from tuner.engine.effective import EffectiveConfig, with_metrics, with_server_info
from tuner.errors import EngineError
from tuner.web import read_reply

_PROBE_TIMEOUT_S = 5.0
_READ_BACK_TIMEOUT_S = 20.0
_SERVER_INFO_TIMEOUT_S = 60.0
"""It runs pip, nvcc and several nvidia-smi before it answers (vLLM 0.32)."""
_NO_SERVER_INFO = (
    "/server_info gave no configuration (it needs pip beside vLLM), so the engine's options were checked against its "
    "log and /metrics only"
)
_REFUSED = (401, 403)
_FAILURES = (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError, ValueError, OSError)


@asynccontextmanager
async def open_client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that ignores proxy variables: the engine is on loopback."""
    async with aiohttp.ClientSession(trust_env=False) as client:
        yield client


async def is_ready(client: aiohttp.ClientSession, base_url: str, model_id: str) -> bool:
    """True when the server is healthy and serves `model_id`, which only the engine of this start knows.

    EngineError `auth` when it is up but wants a key: that does not go away by waiting.
    """
    if await _get(client, f"{base_url}/health", _PROBE_TIMEOUT_S) is None:
        return False
    models = await _get(client, f"{base_url}/v1/models", _PROBE_TIMEOUT_S, as_json=True)
    if models in _REFUSED:
        raise EngineError(
            cause(
                "auth",
                f"the engine answers {models} to requests without an API key",
                hint="Start it without one: it listens on 127.0.0.1 only (look for --api-key in the vLLM command).",
            )
        )
    data = models.get("data") if isinstance(models, Mapping) else None
    return isinstance(data, list) and any(isinstance(m, Mapping) and m.get("id") == model_id for m in data)


async def read_back(
    client: aiohttp.ClientSession, base_url: str, from_log: EffectiveConfig, asked: Mapping[str, Scalar]
) -> EffectiveConfig:
    """What the log said, completed by `/server_info` (where there is one) and `/metrics`."""
    config = from_log
    info = await _get(client, f"{base_url}/server_info?config_format=json", _SERVER_INFO_TIMEOUT_S, as_json=True)
    if isinstance(info, Mapping):
        config = with_server_info(config, info, asked)
    else:
        config = replace(config, warning=_NO_SERVER_INFO)
    metrics = await _get(client, f"{base_url}/metrics", _READ_BACK_TIMEOUT_S)
    return with_metrics(config, metrics) if isinstance(metrics, str) else config


async def send_one_token(base_url: str, model_id: str, headers: Mapping[str, str]) -> None:
    """One request of one token. Its reply is not looked at: a failure shows in what it should have brought about."""
    # Of one token only, the prompt would end a bfloat16 engine on a CPU with AMX (vLLM 0.32).
    body = {"model": model_id, "prompt": "One word of an answer is enough.", "max_tokens": 1, "temperature": 0}
    timeout = aiohttp.ClientTimeout(total=_READ_BACK_TIMEOUT_S)
    try:
        async with (
            open_client() as client,
            client.post(f"{base_url}/v1/completions", json=body, headers=headers, timeout=timeout) as reply,
        ):
            await read_reply(reply)
    except _FAILURES:
        return


async def reset_prefix_cache(base_url: str) -> None:
    """Ask for it; a server without the development mode refuses, and then nothing has changed."""
    timeout = aiohttp.ClientTimeout(total=_READ_BACK_TIMEOUT_S)
    try:
        async with open_client() as client, client.post(f"{base_url}/reset_prefix_cache", timeout=timeout) as reply:
            await read_reply(reply)
    except _FAILURES:
        return


async def _get(client: aiohttp.ClientSession, url: str, timeout_s: float, *, as_json: bool = False) -> Any:
    """The body of a 200 reply, the status of a refused one, None for anything else."""
    try:
        async with client.get(url, timeout=aiohttp.ClientTimeout(total=timeout_s)) as reply:
            if reply.status in _REFUSED:
                return reply.status
            if reply.status != 200:
                return None
            body = await read_reply(reply)
            return json.loads(body) if as_json else body.decode("utf-8", errors="replace")
    except _FAILURES:
        return None
