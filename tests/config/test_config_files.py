"""The shipped configurations: the full one tells the truth about every key, and each of them loads."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from teimgr.config.auth import ApiKeyEntry, Auth, Mtls, ServerTls
from teimgr.config.settings import Otel, Settings, Webhook
from teimgr.config.sources import load
from teimgr.spec import InstanceSpec

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FULL = (CONFIGS / "teimgr.toml").read_text()
COMMENTED = re.compile(r"^# (\w+) = ([^#\n]+)", re.MULTILINE)


def commented(table: str) -> dict[str, Any]:
    """The keys of a table that the full file shows behind comment signs; "" is the top level."""
    section = (
        re.split(r"\n(?:#)?\n", FULL.partition(f"# {table}\n")[2])[0] if table else FULL.partition("# ---- Seeds")[0]
    )
    return tomllib.loads("\n".join(f"{key} = {value}" for key, value in COMMENTED.findall(section)))


def shown(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """`values` without the keys that have no default."""
    optional = {field.name for field in fields(kind) if field.default in (None, MISSING)} - {"tags"}
    return {key: value for key, value in values.items() if key not in optional}


def plain(value: object) -> object:
    """A default as TOML says it."""
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def test_the_full_file_changes_nothing() -> None:
    assert load(CONFIGS / "teimgr.toml", {}) == Settings(auth=Auth())


@pytest.mark.clause("M3.2-keys")
def test_the_full_file_shows_every_key_with_its_default() -> None:
    given = tomllib.loads(FULL)
    tables = {"auth", "instances", "aliases", "otel", "templates", "webhooks"}
    assert given.keys() - tables | commented("").keys() == {field.name for field in fields(Settings)} - tables
    defaults = Settings()
    assert {key: value for key, value in given.items() if key not in tables} == {
        key: plain(getattr(defaults, key)) for key in given if key not in tables
    }
    assert all(getattr(defaults, key) is None for key in commented(""))


@pytest.mark.parametrize(
    ("table", "kind", "hidden"),
    [
        ("[[instances]]", InstanceSpec, {"wanted_running", "seeded"}),
        ("[auth.mtls]", Mtls, set()),
        ("[auth.tls]", ServerTls, set()),
        ("[[auth.api_keys]]", ApiKeyEntry, set()),
        ("[[webhooks]]", Webhook, set()),
    ],
)
def test_the_full_file_shows_every_key_of_its_tables(table: str, kind: type[Any], hidden: set[str]) -> None:
    values = commented(table)
    values.pop("template", None)  # of a seed, which the template's keys replace
    assert set(values) == {field.name for field in fields(kind)} - hidden
    defaults = {field.name: plain(field.default) for field in fields(kind)} | {"tags": {}}
    assert shown(kind, values) == {key: defaults[key] for key in shown(kind, values)}


@pytest.mark.parametrize(("table", "kind"), [("auth", Auth), ("otel", Otel)])
def test_the_full_file_shows_every_key_of_a_table_that_it_has(table: str, kind: type[Any]) -> None:
    defaults = {field.name: plain(field.default) for field in fields(kind)}
    for name in ("mtls", "tls", "api_keys"):  # tables of their own
        defaults.pop(name, None)
    assert tomllib.loads(FULL)[table] == defaults


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.name)
def test_every_configuration_loads(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "certs").mkdir()
    for name in ("ca.pem", "server.pem", "server.key"):
        (tmp_path / "certs" / name).touch()
    settings = load(file, {})
    opens = any(not host.startswith("127.") for host in (settings.api_host, settings.grpc_host))
    assert opens == (file.name in ("container.toml", "mtls.toml", "api-keys.toml"))
    assert (settings.mtls is not None) == (file.name == "mtls.toml")
    assert (settings.tls_files is not None) == (file.name in ("mtls.toml", "api-keys.toml"))
