"""API keys in the configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.credentials import AUTH, KEYS, SECRETS

from teimgr.config.auth import ApiKeyEntry, faults
from teimgr.errors import InvalidConfig
from teimgr.http.auth.policy import digest


def test_keys_from_files_and_variables_are_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRETS['read']}\n")
    from_file = ApiKeyEntry(name="a", key_file=file, rights=("read",))
    from_variable = ApiKeyEntry(name="b", key_env="THE_KEY", rights=("read",))
    assert from_file.read().sha256 == from_variable.read({"THE_KEY": SECRETS["read"]}).sha256 == digest(SECRETS["read"])
    file.write_text(SECRETS["admin"])
    assert from_file.read().sha256 == digest(SECRETS["admin"])
    with pytest.raises(InvalidConfig, match="the environment variable THE_KEY must have at least 16 characters"):
        from_variable.read({})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ({"key": "short"}, "auth.api_keys[0]: key must have at least 16 characters (has 5)"),
        ({}, "auth.api_keys[0]: give one of key, key_sha256, key_file, key_env (got none)"),
        (
            {"key": "k" * 20, "key_env": "X"},
            "auth.api_keys[0]: give one of key, key_sha256, key_file, key_env (got key_sha256 and key_env)",
        ),
        ({"key_sha256": "abc"}, "auth.api_keys[0].key_sha256: must be 64 hex digits in lower case"),
        ({"key_file": Path("/nowhere")}, "auth.api_keys[0]: key_file: /nowhere cannot be read: No such file"),
        ({"key": "k" * 20, "rights": ()}, "auth.api_keys[0].rights: cannot be empty"),
        ({"key": "k" * 20, "instances": ()}, "auth.api_keys[0].instances: neither the list nor a name"),
        ({"key": "k" * 20, "name": ""}, "auth.api_keys[0].name: cannot be empty"),
    ],
)
def test_a_key_that_is_wrong_is_refused(key: dict[str, Any], message: str) -> None:
    auth = replace(AUTH, api_keys=(ApiKeyEntry(**{"name": "a", "rights": ("read",)} | key),))
    assert next(str(fault) for fault in faults(auth)).startswith(message)


def test_keys_are_told_apart() -> None:
    same = (KEYS[0], replace(KEYS[0], name="again"), replace(KEYS[1], name="admin"))
    assert [str(fault) for fault in faults(replace(AUTH, api_keys=same))] == [
        "auth.api_keys[1]: is the same key as 'admin'",
        "auth.api_keys[2].name: Duplicate name of a key: 'admin'",
    ]
    assert [fault.path for fault in faults(replace(AUTH, api_keys=()))] == ["auth.api_keys"]
