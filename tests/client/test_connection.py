"""Where the address and the key of a daemon are from, and the file of contexts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from teimgr.client.connection import VARIABLES, ConnectionValues, Contexts, DaemonConnection
from teimgr.config.sources import CLIENT_VARIABLES, unread_variables
from teimgr.errors import InvalidConfig, Unreachable


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment of contexts alone: `prod`, the current one, and `lab`."""
    tables = {
        "prod": ConnectionValues("http://prod:1", "http://prod:2", api_key="prod-key", ca="prod.pem"),
        "lab": ConnectionValues("http://lab:1"),
    }
    Contexts(tmp_path / "c" / "contexts.toml", "prod", tables).save()
    return {"TEIMGR_CONTEXTS": str(tmp_path / "c" / "contexts.toml")}


def test_without_anything_it_is_the_default(tmp_path: Path) -> None:
    found = DaemonConnection.resolve(environ={"HOME": str(tmp_path)})
    assert (found.url, found.api_key, found.is_default) == ("http://127.0.0.1:9000", None, True)


def test_the_current_context_counts_where_nothing_else_is_named(environ: dict[str, str]) -> None:
    found = DaemonConnection.resolve(environ=environ)
    assert (found.url, found.grpc(), found.api_key, found.tls.ca) == (
        "http://prod:1",
        "http://prod:2",
        "prod-key",
        "prod.pem",
    )
    assert found.source == "the context 'prod'"
    assert DaemonConnection.resolve(environ=environ | {"TEIMGR_CONTEXT": "lab"}).url == "http://lab:1"


def test_the_key_of_one_daemon_is_not_sent_to_another(environ: dict[str, str]) -> None:
    by_environment = DaemonConnection.resolve(environ=environ | {"TEIMGR_URL": "http://other:1"})
    assert (by_environment.url, by_environment.api_key, by_environment.tls.ca) == ("http://other:1", None, None)
    by_context = DaemonConnection.resolve(context="lab", environ=environ | {"TEIMGR_API_KEY": "mine"})
    assert (by_context.url, by_context.api_key) == ("http://lab:1", None)


@pytest.mark.parametrize(
    ("url", "grpc_url"), [("http://other:1", None), (None, "http://other:2"), ("http://prod:2", "http://prod:2")]
)
def test_another_address_by_a_flag_gets_none_of_a_contexts_credentials(
    environ: dict[str, str], url: str | None, grpc_url: str | None
) -> None:
    flags = ConnectionValues(url=url, grpc_url=grpc_url)
    for named in ({"environ": environ}, {"environ": environ, "context": "prod"}):
        found = DaemonConnection.resolve(flags, **named)
        assert (found.api_key, found.tls.ca) == (None, None)
    bringing = DaemonConnection.resolve(replace(flags, api_key="mine"), environ=environ)
    assert (bringing.api_key, bringing.tls.ca) == ("mine", None)


def test_the_same_address_by_a_flag_keeps_a_contexts_credentials(environ: dict[str, str]) -> None:
    for flags in (ConnectionValues(url="prod:1"), ConnectionValues(grpc_url="http://prod:7")):
        assert DaemonConnection.resolve(flags, environ=environ).api_key == "prod-key"


def test_a_key_of_the_environment_belongs_to_the_address_beside_it(environ: dict[str, str]) -> None:
    other = ConnectionValues(url="http://other:1")
    without_address = environ | {"TEIMGR_API_KEY": "mine"}
    assert DaemonConnection.resolve(other, environ=without_address).api_key == "mine"
    assert DaemonConnection.resolve(other, environ=without_address | {"TEIMGR_URL": "http://a:1"}).api_key is None
    grpc_alone = DaemonConnection.resolve(environ=environ | {"TEIMGR_GRPC_URL": "http://other:2"})
    assert (grpc_alone.grpc_url, grpc_alone.api_key) == ("http://other:2", None)


def test_environment_and_flags_replace_single_values_of_a_context(environ: dict[str, str], tmp_path: Path) -> None:
    assert DaemonConnection.resolve(environ=environ | {"TEIMGR_API_KEY": "mine"}).api_key == "mine"
    file = tmp_path / "key"
    file.write_text("from-file\n")
    flags = ConnectionValues(api_key_file=str(file), ca="mine.pem")
    found = DaemonConnection.resolve(flags, environ=environ)
    assert (found.url, found.api_key, found.tls.ca) == ("http://prod:1", "from-file", "mine.pem")
    assert DaemonConnection.resolve(ConnectionValues(url="http://a:1"), environ=environ).grpc_url is None


def test_keys_are_neither_shown_nor_readable_by_others(environ: dict[str, str]) -> None:
    assert "prod-key" not in repr(DaemonConnection.resolve(environ=environ))
    assert "prod-key" not in repr(Contexts.load(environ))
    assert Path(environ["TEIMGR_CONTEXTS"]).stat().st_mode & 0o077 == 0


def test_contexts_are_written_and_read_again(environ: dict[str, str]) -> None:
    contexts = Contexts.load(environ)
    replace(contexts, current="lab").save()
    assert Contexts.load(environ) == replace(contexts, current="lab")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nope = 1\n", "unknown key 'nope'"),
        ('[contexts.a]\nurll = "x"\n', "contexts.a: unknown key 'urll'"),
        ("[contexts.a]\nurl = 5\n", r"contexts\.a\.url must be a string"),
        ("[contexts.a]\n", "contexts.a: url is missing"),
        ("contexts = 3\n", "contexts must be a table"),
        ('contexts = ["a"]\n', "contexts must be a table"),
        ("current = 3\n", "current must be a string"),
        ("[", "contexts.toml: "),
    ],
)
def test_faults_of_the_file_are_named(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "contexts.toml"
    file.write_text(text)
    with pytest.raises(InvalidConfig, match=says):
        Contexts.load({"TEIMGR_CONTEXTS": str(file)})


def test_an_unknown_context_names_the_others(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidConfig, match="no context 'nope'; there are prod, lab"):
        DaemonConnection.resolve(context="nope", environ=environ)


def test_the_grpc_port_is_asked_of_the_daemon_only_where_it_answers(unused_port: int) -> None:
    with pytest.raises(Unreachable):
        DaemonConnection(f"http://127.0.0.1:{unused_port}").grpc()


def test_a_daemon_does_not_warn_of_the_clients_variables() -> None:
    assert {*VARIABLES.values(), "TEIMGR_CONTEXT", "TEIMGR_CONTEXTS"} <= CLIENT_VARIABLES
    assert list(unread_variables(dict.fromkeys(CLIENT_VARIABLES, "x"))) == []
