"""Which server to ask, how, and as whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from tuner.errors import UsageError
from tuner.web import is_loopback

Api = Literal["completions", "chat"]


@dataclass(frozen=True)
class Target:
    """An OpenAI-compatible server. `base_url` may end in `/v1` or not; `base` is it without.

    UsageError when the address is no http(s) URL with a host.
    """

    base_url: str
    model: str | None = None
    """None: the only model that the server has."""
    api: Api = "completions"
    api_key: str | None = field(default=None, repr=False)
    request_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        split_address(self.base_url)

    @property
    def base(self) -> str:
        """Scheme, host, port and path, without `/v1` and without a slash at the end."""
        return self.base_url.strip().rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries; holds the key, so it is never logged."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers

    @property
    def loopback(self) -> bool:
        """True when the server is this machine, where a proxy can only be in the way."""
        return is_loopback(split_address(self.base).host)


@dataclass(frozen=True)
class Address:
    """Where a URL points."""

    host: str
    port: int
    tls: bool
    path: str
    """What stands before `/v1/...`; '' for most servers."""

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def split_address(url: str) -> Address:
    """UsageError with the hint when the URL is none of ours."""
    hint = "Write it like http://127.0.0.1:8000."
    # What may carry a key or a password is not repeated.
    shown = "the server address" if set(url) & set("@?#") else repr(url)
    try:
        parts = urlsplit(url.strip())
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise UsageError(f"{shown} is no server address: {error}", hint) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{shown} is no http or https address with a host", hint)
    if parts.username or parts.password:
        raise UsageError("the server address carries a user name or password", "Use --api-key-env NAME instead.")
    if parts.query or parts.fragment:
        raise UsageError(f"{shown} has a query or fragment, which it cannot have", hint)
    tls = parts.scheme == "https"
    return Address(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))
