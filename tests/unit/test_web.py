"""Which addresses are this machine's."""

from __future__ import annotations

import pytest

from tuner.web import is_loopback


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("0.0.0.0", True),
        ("10.0.0.1", False),
        ("a.localhost", True),
        ("", False),
        ("example.org", False),
        ("localhost.example.org", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
