"""Addresses, loopback, proxies, secrets."""

from __future__ import annotations

import pytest

from tuner.cli.options import api_key
from tuner.errors import UsageError
from tuner.load.proxied import needs_proxy
from tuner.load.target import Target, split_address
from tuner.load.vocabulary import single_token_words


@pytest.mark.parametrize(
    "url", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/", " http://h:8000/v1"]
)
def test_with_or_without_v1(url: str) -> None:
    assert Target(url).base == "http://h:8000"


def test_a_path_before_v1_stays() -> None:
    assert split_address(Target("https://h/gateway/v1").base).path == "/gateway"


@pytest.mark.parametrize(
    "url",
    [
        "h:8000",
        "ftp://h",
        "http://",
        "http://h:99999",
        "http://u:p@h",
        "u:p@h:8000",
        "http://h/?key=sk-secret",
        "http://" + "h" * 64,
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        Target(url)
    assert "u:p" not in str(caught.value)
    assert "sk-secret" not in str(caught.value)


def test_the_key_is_not_shown() -> None:
    target = Target("http://h", api_key="sk-secret")
    assert "sk-secret" not in repr(target)
    assert target.headers["Authorization"] == "Bearer sk-secret"


def test_a_key_that_no_header_can_carry_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "sk-secret\n")
    with pytest.raises(UsageError, match="THE_KEY holds a control character") as caught:
        api_key("THE_KEY")
    assert "sk-secret" not in str(caught.value)


def test_proxies_of_the_environment_never_reach_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "near.example.org")
    assert not needs_proxy(Target("http://127.0.0.1:8000"))
    assert not needs_proxy(Target("http://localhost:8000"))
    assert not needs_proxy(Target("http://near.example.org"))
    assert needs_proxy(Target("http://far.example.org"))
    assert needs_proxy(Target("https://far.example.org"))
    monkeypatch.delenv("https_proxy")
    assert not needs_proxy(Target("https://far.example.org"))


def test_words_that_are_one_token() -> None:
    # 'The' is [1]; ' a' is [2]; ' bc' is [3, 4]; ' d' is [5].
    ids = [1, *[2] * 4, *[3, 4] * 4, *[5] * 4]
    assert single_token_words(ids, ("a", "bc", "d")) == ("a", "d")
    assert single_token_words([9, 8, *ids[1:]], ("a", "bc", "d")) == ("a", "d")
    assert single_token_words([1, 2, 3], ("a", "bc", "d")) == ()
