"""Keys and their lines, for every way that TOML has to write them."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from tests.config.loaded_settings import load

from teimgr.config.auth import ApiKeyEntry, Auth, Mtls, ServerTls
from teimgr.config.sections import BatchSettings, ClusterSettings, OnDemandSettings
from teimgr.config.settings import Otel, Settings, Webhook
from teimgr.config.sources import Source, key_lines, line_of, read
from teimgr.errors import InvalidConfig
from teimgr.spec import InstanceSpec

TEXT = '''# a comment
a = 1
"b c".d = 2
list = [
  1, # one
  [2],
]
long = """
[no.header]
x = 1
"""
inline = { k = { l = 1 } }

[t.u]  # a table
v = 'x'
[[arr]]
k = 1
[[arr]]
k = 2
[arr.sub]
z = 1
[[arr.deep]]
y = 1
[[arr.deep]]
y = 2
'''


def test_each_key_has_the_line_where_its_statement_begins() -> None:
    tomllib.loads(TEXT)
    lines = key_lines(TEXT)
    assert lines["a"] == 2
    assert lines["b c.d"] == 3
    assert lines["list"] == lines["list[1][0]"] == 4
    assert lines["long"] == 8
    assert lines["inline.k.l"] == 12
    assert lines["t.u"] == 14
    assert lines["t.u.v"] == 15
    assert (lines["arr[0]"], lines["arr[0].k"]) == (16, 17)
    assert (lines["arr[1]"], lines["arr[1].k"], lines["arr[1].sub.z"]) == (18, 19, 21)
    assert "no.header" not in lines
    assert "x" not in lines


def test_what_is_missing_has_the_line_of_what_it_should_be_in() -> None:
    lines = key_lines(TEXT)
    assert line_of("arr[1].missing.deeper", lines) == 18
    assert line_of("a[3]", lines) == 2
    assert line_of("nowhere.at.all", lines) is None


def test_an_empty_file_has_no_lines() -> None:
    assert key_lines("") == {}


def test_arrays_inside_arrays_begin_anew() -> None:
    lines = key_lines("[[a]]\n[[a.b]]\nk = 1\n[[a]]\n[[a.b]]\nk = 2\n")
    assert lines["a[0].b[0].k"] == 3
    assert lines["a[1].b[0].k"] == 6


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
    """A default as it is written in TOML."""
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def test_the_full_file_changes_nothing() -> None:
    assert load(CONFIGS / "teimgr.toml", {}) == Settings(auth=Auth())


@pytest.mark.clause("M3.2-keys")
def test_the_full_file_shows_every_key_with_its_default() -> None:
    given = tomllib.loads(FULL)
    tables = {
        "auth",
        "instances",
        "aliases",
        "default_instances",
        "batches",
        "on_demand",
        "cluster",
        "otel",
        "templates",
        "webhooks",
    }
    assert given.keys() - tables | commented("").keys() == {field.name for field in fields(Settings)} - tables
    defaults = Settings()
    assert {key: value for key, value in given.items() if key not in tables} == {
        key: plain(getattr(defaults, key)) for key in given if key not in tables
    }
    in_state_dir = {key: str(getattr(defaults, key)) for key in ("state_file", "run_dir", "log_dir")}
    values = commented("")
    assert values | in_state_dir == values
    assert all(getattr(defaults, key) is None for key in values.keys() - in_state_dir)


@pytest.mark.parametrize(
    ("table", "kind", "hidden"),
    [
        (
            "[[instances]]",
            InstanceSpec,
            {"wanted_running", "seeded", "pending_update", "confined", "by_call", "by_key"},
        ),
        ("[auth.mtls]", Mtls, set()),
        ("[auth.tls]", ServerTls, set()),
        ("[[auth.api_keys]]", ApiKeyEntry, set()),
        ("[[webhooks]]", Webhook, set()),
        ("[cluster]", ClusterSettings, set()),
    ],
)
def test_the_full_file_shows_every_key_of_its_tables(table: str, kind: type[Any], hidden: set[str]) -> None:
    values = commented(table)
    values.pop("template", None)  # of a seed, which the template's keys replace
    assert set(values) == {field.name for field in fields(kind)} - hidden
    defaults = {field.name: plain(field.default) for field in fields(kind)} | {"tags": {}, "labels": {}}
    assert shown(kind, values) == {key: defaults[key] for key in shown(kind, values)}


@pytest.mark.parametrize(
    ("table", "kind"), [("auth", Auth), ("otel", Otel), ("batches", BatchSettings), ("on_demand", OnDemandSettings)]
)
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


@pytest.mark.parametrize("text", ["api_port = " + "[" * 3000, "a." * 3000 + "b = 1"], ids=["arrays", "keys"])
def test_values_nested_too_deep_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "teimgr.toml"
    file.write_text(text)
    with pytest.raises(InvalidConfig, match="nested too deep"):
        read(Source(file=file, environ={}))
