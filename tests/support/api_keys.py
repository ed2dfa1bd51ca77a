"""API keys of tests, one per right and one for some instances."""

from __future__ import annotations

from teimgr.config.auth import ApiKeyEntry, Auth

SECRETS = {name: f"{name}-{'k' * 32}" for name in ("admin", "inference", "read", "team")}
KEYS = (
    *(ApiKeyEntry(name=name, key=SECRETS[name], rights=(name,)) for name in ("admin", "inference", "read")),
    ApiKeyEntry(name="team", key=SECRETS["team"], rights=("admin", "inference", "read"), instances=("mine", "team-*")),
)
AUTH = Auth(enabled=True, providers=("api_keys",), api_keys=KEYS)
