"""Join tokens and the list of nodes."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from teimgr.cluster import enrolment as module
from teimgr.cluster.enrolment import MAX_TOKENS, RENEWALS_NOTED_S, Enrolment, JoinToken, TokenRecord
from teimgr.errors import Forbidden, InvalidConfig, Unauthenticated, ValidationError

NOW = 1_000_000.0


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def enrolment(tmp_path: Path, clock: Clock) -> Enrolment:
    return Enrolment(tmp_path / "enrolment.json", clock)


def test_a_token_admits_one_node_once(enrolment: Enrolment, tmp_path: Path) -> None:
    token = JoinToken.parse(str(enrolment.create_token("f" * 64)))

    enrolment.redeem(token, "gpu-1")
    with pytest.raises(Unauthenticated, match="was used by node 'gpu-1'"):
        enrolment.redeem(token, "gpu-2")

    again = Enrolment(tmp_path / "enrolment.json")  # another daemon, after a crash
    assert [each.name for each in again.nodes] == ["gpu-1"]
    with pytest.raises(Unauthenticated):
        again.redeem(token, "gpu-2")


def test_the_secret_is_not_on_disk(enrolment: Enrolment, tmp_path: Path) -> None:
    token = enrolment.create_token("f" * 64)
    file = tmp_path / "enrolment.json"

    assert token.secret not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def test_an_expired_token_is_refused(enrolment: Enrolment, clock: Clock) -> None:
    token = enrolment.create_token("f" * 64, life_s=60)
    clock.now += 60

    with pytest.raises(Unauthenticated, match="expired"):
        enrolment.redeem(token, "a")


def test_a_guessed_secret_is_refused(enrolment: Enrolment) -> None:
    token = enrolment.create_token("f" * 64)

    with pytest.raises(Unauthenticated, match="unknown"):
        enrolment.redeem(token._replace(secret="guessed"), "a")
    enrolment.redeem(token, "a")  # a wrong attempt does not use it up


def test_a_token_for_a_name_is_for_no_other(enrolment: Enrolment) -> None:
    with pytest.raises(Forbidden, match="not for node 'b'"):
        enrolment.redeem(enrolment.create_token("f" * 64, node="a"), "b")


def test_a_name_in_the_fleet_is_taken_over_only_by_a_token_for_it(enrolment: Enrolment) -> None:
    enrolment.redeem(enrolment.create_token("f" * 64), "a")

    with pytest.raises(Forbidden, match="'a' is in the fleet"):
        enrolment.redeem(enrolment.create_token("f" * 64), "a")
    enrolment.redeem(enrolment.create_token("f" * 64, node="a"), "a")


def test_a_removed_node_is_not_renewed(enrolment: Enrolment) -> None:
    enrolment.redeem(enrolment.create_token("f" * 64), "a")
    enrolment.renew("a", NOW)

    assert enrolment.remove("a")
    assert not enrolment.remove("a")
    assert enrolment.removed["a"] > NOW
    with pytest.raises(Forbidden, match="not in the fleet"):
        enrolment.renew("a", NOW)


def test_a_host_that_takes_over_a_name_takes_the_others_certificate_away(enrolment: Enrolment) -> None:
    enrolment.redeem(enrolment.create_token("f" * 64), "a")
    enrolment.redeem(enrolment.create_token("f" * 64, node="a"), "a")

    enrolment.renew("a", NOW)
    with pytest.raises(Forbidden, match="Another host is node 'a'"):
        enrolment.renew("a", NOW - 1)


def test_removals_are_kept_as_long_as_the_certificates_live(clock: Clock, tmp_path: Path) -> None:
    enrolment = Enrolment(tmp_path / "e.json", clock)
    enrolment.redeem(enrolment.create_token("f" * 64), "a")
    enrolment.remove("a")
    assert Enrolment(tmp_path / "e.json").removed == enrolment.removed

    clock.now += 73 * 3600
    enrolment.redeem(enrolment.create_token("f" * 64), "b")
    assert not enrolment.removed


@pytest.mark.parametrize("name", ["", "A", "a/b", "-a", "a" * 64, "a b", "daemon\n"])
def test_names_are_those_of_hosts(enrolment: Enrolment, name: str) -> None:
    with pytest.raises(ValidationError, match="node:"):
        enrolment.redeem(enrolment.create_token("f" * 64), name)


@pytest.mark.parametrize("text", ["", "abc", "teimgr1.a.b", "teimgr1.a..c", "teimgr2.a.b.c", "teimgr1." + "a" * 300])
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="token:"):
        JoinToken.parse(text)


@pytest.mark.parametrize("life_s", [0, -1, 8 * 86_400.0, float("nan")])
def test_the_life_of_a_token_is_bounded(enrolment: Enrolment, life_s: float) -> None:
    with pytest.raises(ValidationError, match="life:"):
        enrolment.create_token("f" * 64, life_s=life_s)


def test_the_number_of_tokens_is_bounded_and_expired_ones_make_room(tmp_path: Path, clock: Clock) -> None:
    waiting = [TokenRecord(str(number), "hash", clock.now + 60) for number in range(MAX_TOKENS)]
    file = tmp_path / "enrolment.json"
    file.write_text(json.dumps({"tokens": [asdict(each) for each in waiting], "nodes": []}))
    enrolment = Enrolment(file, clock)

    with pytest.raises(ValidationError, match="tokens:"):
        enrolment.create_token("f" * 64)
    clock.now += 60
    enrolment.create_token("f" * 64)


def test_tokens_that_were_used_do_not_count_as_waiting(
    enrolment: Enrolment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 256 hosts none more could join for as long as the tokens of those would have lived."""
    monkeypatch.setattr(module, "MAX_TOKENS", 4)
    for number in range(10):
        enrolment.redeem(enrolment.create_token("f" * 64, life_s=86_400), f"n{number}")

    assert len(json.loads((tmp_path / "enrolment.json").read_text())["tokens"]) == 4


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """A block in which the disk refuses to write, with an OSError that leaves the block."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    @contextmanager
    def full() -> Iterator[None]:
        with monkeypatch.context() as refusing:
            refusing.setattr(module, "write_atomically", refuse)
            with pytest.raises(OSError, match="No space"):
                yield

    return full


def test_a_removal_that_the_disk_refuses_is_not_made_and_may_be_repeated(
    enrolment: Enrolment, tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    """The second one was answered "not in the fleet", and the certificate counted on."""
    enrolment.redeem(enrolment.create_token("f" * 64), "a")
    with full_disk():
        enrolment.remove("a")
    assert enrolment.has("a")
    assert not enrolment.removed

    assert enrolment.remove("a")
    assert not Enrolment(tmp_path / "enrolment.json").has("a")


def test_a_token_is_not_used_up_by_a_join_that_the_disk_refuses(
    enrolment: Enrolment, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    with full_disk():
        enrolment.create_token("f" * 64)
    token = enrolment.create_token("f" * 64)
    with full_disk():
        enrolment.redeem(token, "a")
    assert not enrolment.has("a")

    enrolment.redeem(token, "a")


def test_renewals_in_a_row_write_nothing(
    enrolment: Enrolment, clock: Clock, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    """Each one synced the file, on the daemon's event loop."""
    enrolment.redeem(enrolment.create_token("f" * 64), "a")
    clock.now += RENEWALS_NOTED_S
    enrolment.renew("a", NOW)
    with full_disk():
        enrolment.renew("a", NOW)
        enrolment.create_token("f" * 64)
    assert enrolment.nodes[0].renewed_at == clock.now


def test_a_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "enrolment.json").write_text('{"tokens": [{}]}')

    with pytest.raises(InvalidConfig, match=r"enrolment\.json"):
        Enrolment(tmp_path / "enrolment.json")
