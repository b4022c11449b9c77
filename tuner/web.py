"""What every room that asks a server shares: which addresses are this machine's, and how long a reply may be."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

SIMULATED_OWNER = "chunktune-sim"
"""`owned_by` of the simulated engine's model, so that its numbers are labelled wherever they are measured."""
LARGEST_REPLY_BYTES = 2**26
"""Far above any reply that is ours to read; a server that is none of ours may never end one."""


class ReplyTooLong(OSError):
    """A reply longer than LARGEST_REPLY_BYTES; what came of it is dropped."""

    def __init__(self) -> None:
        super().__init__(f"the reply is longer than {LARGEST_REPLY_BYTES >> 20} MiB")


async def read_reply(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, decompressed; ReplyTooLong once it passes the limit."""
    pieces: list[bytes] = []
    held = 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        held += len(piece)
        if held > LARGEST_REPLY_BYTES:
            response.close()
            raise ReplyTooLong
    return b"".join(pieces)


def is_loopback(host: str) -> bool:
    """True for this machine's own addresses and names, where a proxy can only be in the way."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
