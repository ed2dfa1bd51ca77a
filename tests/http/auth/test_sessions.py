"""Sessions of the page: bounds, ends, the cookie, and which requests may use it."""

from __future__ import annotations

from typing import Any

import pytest

from teimgr.http.auth.policy import digest
from teimgr.http.auth.sessions import LIFETIME_S, MAX_SESSIONS, MAX_SESSIONS_OF_KEY, Sessions, is_same_origin

KEY = digest("k" * 32)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def scope(cookie: str = "", scheme: str = "http") -> dict[str, Any]:
    return {"scheme": scheme, "headers": [(b"cookie", cookie.encode("latin-1"))] if cookie else []}


def test_a_session_stands_for_its_key_until_it_ends() -> None:
    clock = Clock()
    sessions = Sessions(9000, clock=clock)
    token, other = sessions.begin(KEY), sessions.begin(KEY)
    assert token != other
    assert sessions.key_of(token) == KEY
    assert sessions.key_of(token + "x") is None
    sessions.end(token)
    assert sessions.key_of(token) is None
    clock.now = LIFETIME_S
    assert sessions.key_of(other) is None


def test_the_oldest_gives_way() -> None:
    clock = Clock()
    sessions = Sessions(9000, clock=clock)
    first = sessions.begin(KEY)
    for _ in range(MAX_SESSIONS_OF_KEY):
        last = sessions.begin(KEY)
    assert len(sessions) == MAX_SESSIONS_OF_KEY
    assert sessions.key_of(first) is None
    for number in range(MAX_SESSIONS):
        newest = sessions.begin(digest(str(number)))
    assert len(sessions) == MAX_SESSIONS
    assert sessions.key_of(last) is None
    clock.now = LIFETIME_S
    sessions.begin(KEY)
    assert len(sessions) == 1
    assert sessions.key_of(newest) is None


def test_the_cookie_is_for_this_server_alone() -> None:
    sessions = Sessions(9000)
    plain, secure = sessions.cookie(scope(), "abc"), sessions.cookie(scope(scheme="https"), "abc")
    assert plain.startswith("teimgr-session-9000=abc;")
    assert all(word in plain for word in ("HttpOnly", "SameSite=Strict", "Path=/", "Max-Age=43200"))
    assert "Secure" not in plain
    assert secure.startswith("__Host-teimgr-session-9000=abc;")
    assert "Secure" in secure
    assert "Max-Age=0" in sessions.cookie(scope(), "")


def test_the_token_among_other_cookies() -> None:
    sessions = Sessions(9000)
    assert sessions.token_in(scope("a=b; teimgr-session-9000=abc=; c=d")) == "abc="
    assert sessions.token_in(scope("teimgr-session-9001=abc; xteimgr-session-9000=no")) is None
    assert sessions.token_in(scope("teimgr-session-9000=abc", "https")) is None
    assert sessions.token_in(scope("teimgr-session-9000=")) is None
    assert sessions.token_in(scope("\xff" * 20_000 + "; teimgr-session-9000=abc")) is None
    assert sessions.token_in(scope()) is None


@pytest.mark.parametrize(
    ("headers", "reads", "changes"),
    [
        ({}, True, False),  # no browser of this decade
        ({"origin": "http://h:9000", "host": "h:9000"}, True, True),
        ({"origin": "http://h:9000", "host": "h:9000", "sec-fetch-site": "same-origin"}, True, True),
        ({"origin": "http://h:3000", "host": "h:9000", "sec-fetch-site": "same-site"}, False, False),
        ({"origin": "https://evil.example", "host": "h:9000", "sec-fetch-site": "cross-site"}, False, False),
        ({"origin": "null", "host": "h:9000"}, True, False),
        ({"host": "h:9000", "sec-fetch-site": "same-site", "sec-fetch-mode": "navigate"}, True, False),
        ({"host": "h:9000", "sec-fetch-site": "none"}, True, False),
    ],
)
def test_only_our_own_page_uses_a_session(headers: dict[str, str], reads: bool, changes: bool) -> None:
    assert is_same_origin(True, headers) is reads
    assert is_same_origin(False, headers) is changes
