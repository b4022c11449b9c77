"""Small questions to a server: JSON in, JSON out, through aiohttp."""

from __future__ import annotations

import os
from typing import Any

import aiohttp
import orjson

from tuner.errors import LoadError
from tuner.load.proxied import session_for
from tuner.load.reply import body_text
from tuner.load.target import Target
from tuner.web import ReplyTooLong, read_reply

ASK_TIMEOUT_S = 60.0
NOT_OPENAI = "The address has to be that of an OpenAI-compatible server, such as `vllm serve`."


class Questions:
    """A session for questions beside the load; an async context manager."""

    def __init__(self, target: Target, timeout_s: float = ASK_TIMEOUT_S) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Questions:
        self._session = session_for(self._target, self._timeout_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Status and body; LoadError `refused` where nothing answers, `timeout` where nothing comes, `not_openai`
        where the reply has no end."""
        assert self._session is not None
        data = None if body is None else orjson.dumps(body)
        try:
            # A redirect is followed by no request of the load, so not here either.
            async with self._session.request(
                method, self._target.base + path, data=data, allow_redirects=False
            ) as response:
                if 300 <= response.status < 400:
                    raise _redirected(self._target.base, path, response.headers.get("Location", ""))
                return response.status, await read_reply(response)
        except TimeoutError:
            raise LoadError(
                "timeout",
                f"{self._target.base}{path} did not answer within {self._timeout_s:g} s",
                "Is the server still starting, or busy with other load?",
            ) from None
        except (ReplyTooLong, aiohttp.ClientPayloadError, aiohttp.ClientResponseError, ValueError) as error:
            reason = getattr(error, "message", "") or str(error)
            raise LoadError(
                "not_openai", f"the answer of {self._target.base}{path} cannot be read: {shortened(reason)}", NOT_OPENAI
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise LoadError(
                "refused",
                f"no connection to {self._target.base}: {_reason(error)}",
                "Is the server up, and is this its address?",
            ) from None

    @property
    def secret(self) -> str | None:
        """The key, to be blotted out of whatever is kept."""
        return self._target.api_key or None

    def shown(self, body: bytes) -> str:
        """What a reply's body says, without the key."""
        text = body_text(body)
        key = self._target.api_key
        return text.replace(key, "***") if key else text


def _redirected(base: str, path: str, where: str) -> LoadError:
    near = where.partition("?")[0].removesuffix(path)
    there = f" to {shortened(near)}" if near.startswith(("http://", "https://")) else ""
    return LoadError("not_openai", f"{base} redirects{there}", "Give the address that answers by itself.")


def shortened(text: str) -> str:
    """A server's words on one line, at most some 200 characters of them."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]}..."


def _reason(error: Exception) -> str:
    """In the system's words: aiohttp's own sentence speaks of ssl whatever the address is."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, aiohttp.ServerDisconnectedError):
        return "the server closed the connection without an answer"
    if not isinstance(cause, OSError):
        return shortened(str(cause))
    # A resolver's errors are negative, and name themselves.
    return os.strerror(cause.errno) if cause.errno is not None and cause.errno > 0 else cause.strerror or str(cause)


def as_object(body: bytes) -> dict[str, Any] | None:
    """The JSON object in a body, None when there is none."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
