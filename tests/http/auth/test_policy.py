"""The policy: comparison of keys, subjects of certificates, its JSON form."""

from __future__ import annotations

import time
from contextlib import suppress
from fnmatch import fnmatchcase

import pytest
from tests.support.credentials import AUTH, KEYS, SECRETS

from teimgr.config.auth import policy_of
from teimgr.errors import Unauthenticated
from teimgr.http.auth.policy import (
    NO_CERTIFICATE,
    Caller,
    Policy,
    certificate_from_tls,
    new_key,
    subject_attributes,
)


def test_every_key_is_compared_whatever_was_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def noting(given: str, known: str) -> bool:
        compared.append(known)
        return given == known

    monkeypatch.setattr("teimgr.http.auth.policy.hmac.compare_digest", noting)
    policy = policy_of(AUTH)
    for key in (SECRETS["admin"], SECRETS["team"], "nobody's", None):
        compared.clear()
        with suppress(Unauthenticated):
            policy.authenticate(NO_CERTIFICATE, key)
        assert len(compared) == len(KEYS)


def test_a_key_for_thousands_of_instances_costs_no_long_turn_and_covers_names_and_globs() -> None:
    names = tuple(f"team-{number}-embedder" for number in range(5000))
    caller = Caller("k", frozenset(), (*names, "a.b", "x-*", "[ab]?"))
    began = time.process_time()
    assert not caller.covers("other")
    assert time.process_time() - began < 0.02
    for name in (names[-1], names[0][:-1], "a.b", "acb", "x-", "ax-1", "b7", "[ab]?", "c7", "x-1\n"):
        assert caller.covers(name) == any(fnmatchcase(name, each) for each in caller.instances or ())
    assert not Caller("k", frozenset(), ()).covers("")


def test_a_policy_travels_to_the_muxes_whole() -> None:
    policy = policy_of(AUTH)
    assert Policy.from_json(policy.to_json()) == policy
    assert Policy.from_json(Policy().to_json()) == Policy()


def test_a_new_key_is_long_and_never_the_same() -> None:
    assert len({new_key() for _ in range(100)}) == 100
    assert len(new_key()) > 40


def test_a_subject_is_the_same_by_python_and_by_grpc() -> None:
    certificate = {"subject": ((("organizationName", "Se,arch"),), (("commonName", "ü"), ("userId", "7")))}
    expected = frozenset({"O=Se,arch", "CN=ü", "UID=7"})
    assert certificate_from_tls(certificate).subject == expected
    assert subject_attributes(r"UID=7+CN=\C3\BC,O=Se\,arch") == expected
    assert certificate_from_tls({}).subject == subject_attributes("") == frozenset()
