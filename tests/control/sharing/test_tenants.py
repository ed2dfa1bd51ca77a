"""The registry of tenants in a folder of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from teimgr.control.sharing import tenants
from teimgr.control.sharing.tenants import USAGE_FILE, TenantRegistry
from teimgr.files import write_atomically
from teimgr.http.auth.policy import Key, Policy, digest
from teimgr.wire.tenants.table import TenantKey

LIMIT_S = 5.0


async def test_a_slow_disk_does_not_hold_the_loop_while_usage_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename took a second on a busy disk, and calls waited for it."""
    writes, goes_on = threading.Event(), threading.Event()

    def write_late(path: Path, content: bytes, **options: Any) -> None:
        writes.set()
        assert goes_on.wait(LIMIT_S)
        write_atomically(path, content, **options)

    monkeypatch.setattr(tenants, "write_atomically", write_late)
    monkeypatch.setattr(tenants, "_EVERY_S", 0.01)
    registry = TenantRegistry(tmp_path / "run", tmp_path / "state.toml")
    policy = Policy(keys=(Key("one", digest("teimgr_" + "x" * 20), ("inference",)),))
    registry.configure(policy, [TenantKey("one")])
    async with registry.running():
        assert await asyncio.to_thread(writes.wait, LIMIT_S)
        goes_on.set()
    registry.close()

    assert json.loads((tmp_path / USAGE_FILE).read_bytes())["names"] == {"1": "one"}
