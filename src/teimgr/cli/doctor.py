"""`teimgr doctor`: checks of this host and of others of its fleet, with advice, before a daemon starts or beside it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from teimgr.cli.doctor_checks import (
    CHECKS,
    Finding,
    Outcome,
    check_clock,
    check_devices,
    check_limits,
    enough_disk,
    enough_memory,
    gib,
    is_writable,
)
from teimgr.cli.doctor_daemon import check_daemon, connection_of, write_bundle
from teimgr.cli.output import say
from teimgr.client.connection import ConnectionValues, DaemonConnection
from teimgr.config.settings import Settings
from teimgr.config.sources import Source, read, unread_variables
from teimgr.errors import TeimgrError

_CLOCK_LIMIT_S = 2.0
"""Clocks further apart make the order of merged logs and events misleading; certificates tolerate minutes."""
_ANSWER_LIMIT_S = 5.0
_REST_LIMIT_S = 10.0


def main(
    file: Path | None,
    *,
    node: Path | None = None,
    flags: ConnectionValues | None = None,
    bundle: Path | None = None,
    as_json: bool = False,
) -> int:
    """Run every check and print the findings; the result is the exit status.

    `node` is the folder of a joined host, which is checked in place of a daemon's; `flags` lead to the daemon that is
    judged too and knows the other hosts. `bundle` is a file for its state, without secrets.
    """
    findings = list(examine(file, flags) if node is None else check_node(node))
    if as_json:
        say(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            advice = f"\n{'':15}→ {finding.advice}" if finding.advice else ""
            say(f"{finding.outcome:5} {finding.check:9}{finding.text}{advice}")
    if bundle is not None:
        entries = write_bundle(bundle, connection_of(_settings(file), flags or ConnectionValues()), findings)
        say(f"{bundle}: {len(entries)} entries; read it before you send it", file=sys.stderr)
    return int(any(finding.outcome == "fail" for finding in findings))


def _settings(file: Path | None) -> Settings:
    """The settings of the file; the defaults where it has faults."""
    try:
        return read(Source(file=file)).settings
    except TeimgrError:
        return Settings()


def examine(file: Path | None, flags: ConnectionValues | None = None) -> Iterator[Finding]:
    """The findings of every check, in the order of `CHECKS`; without a valid configuration, the checks of the host."""
    try:
        settings = read(Source(file=file)).settings
        if settings.tls_files is not None:
            settings.tls_files.context()
    except TeimgrError as error:
        yield Finding("config", "fail", error.message, "fix the file; `teimgr config check FILE` names every fault")
        settings = Settings()
    else:
        yield Finding("config", "ok", f"{file or 'defaults'}: {len(settings.instances)} seeds")
        for warning in (*settings.warnings(), *map(str, settings.missing_models()), *unread_variables()):
            yield Finding("config", "warn", warning)
    for check in CHECKS:
        yield from check(settings)
    flags = flags or ConnectionValues()
    try:
        is_named = not DaemonConnection.resolve(flags).is_default
        yield from check_daemon(connection_of(settings, flags), is_named=is_named)
    except TeimgrError as error:
        yield Finding("daemon", "fail", error.message)
    yield from check_hosts(settings, flags)


def check_hosts(settings: Settings, flags: ConnectionValues) -> Iterator[Finding]:
    """Every host of the cluster, from the running daemon; nothing where the fleet is this host alone."""
    if not settings.cluster.address:
        return
    try:
        connection = connection_of(settings, flags)
        found = connection.rest_client(_REST_LIMIT_S).hosts()["hosts"]
    except TeimgrError as error:
        yield Finding(
            "hosts", "warn", f"no daemon tells: {error.message}", "start it; --url and --api-key reach another"
        )
        return
    for host in found:
        yield _host(host)


def _host(host: Mapping[str, Any]) -> Finding:
    """One host: what is wrong with it first."""
    name, memory, disk, ahead = host["name"], host["memory_free_bytes"], host["disk_free_bytes"], host["clock_ahead_s"]
    facts = [
        f"{host['cores']} cores",
        f"{gib(memory)} memory free",
        "disk unknown" if disk is None else f"{gib(disk)} free for models",
        "clock unknown" if ahead is None else f"clock {ahead:+.2f} s",
        " ".join(f"{package} {version}" for package, version in host["versions"].items()),
    ]
    text = f"{name} ({host['address']}): {', '.join(filter(None, facts))}"
    outcome: Outcome = "ok"
    advice = ""
    if host["problem"]:
        return Finding("hosts", "fail", f"{name} ({host['address']}) takes no workers: {host['problem']}", _REMEDY)
    if ahead is not None and abs(ahead) > _CLOCK_LIMIT_S:
        outcome, advice = "warn", "synchronise its clock (chrony, systemd-timesyncd)"
    elif not enough_memory(memory):
        outcome, advice = "warn", "little memory is left for another worker"
    elif disk is not None and not enough_disk(disk):
        outcome, advice = "warn", "models that are not there yet may not fit: set HF_HOME there, or delete some"
    return Finding("hosts", outcome, text, advice)


_REMEDY = "`teimgr doctor --node DIR` on that host; its log is the output of `teimgr node join`"


def check_node(state_dir: Path) -> Iterator[Finding]:
    """A host that has joined, or is about to, by its folder."""
    for noun, folder in (("state", state_dir), ("logs", state_dir / "logs"), ("run", state_dir / "run")):
        if is_writable(folder):
            yield Finding(noun, "ok", str(folder.absolute()))
        else:
            advice = f"give it to the user {os.geteuid()}, or use another --state-dir"
            yield Finding(noun, "fail", f"{folder.absolute()} cannot be written", advice)
    yield asyncio.run(_agent(state_dir))
    settings = Settings(state_dir=state_dir)
    checks: tuple[Callable[[Settings], Iterator[Finding]], ...] = (check_limits, check_clock, check_devices)
    for check in checks:
        yield from check(settings)


async def _agent(state_dir: Path) -> Finding:
    """Whether the host's agent answers, and as what."""
    from teimgr.cluster.messages import LINE_LIMIT_BYTES, agent_socket, read_message
    from teimgr.wire.json_messages import write_line

    path = agent_socket(state_dir.absolute() / "run")
    try:
        async with asyncio.timeout(_ANSWER_LIMIT_S):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=LINE_LIMIT_BYTES)
            try:
                write_line(writer, op="facts")
                answer = await read_message(reader) or {}
            finally:
                writer.close()
        facts = answer["facts"]
    except (OSError, KeyError) as error:  # TimeoutError is an OSError
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or "no answer"
        return Finding("node", "warn", f"not joined: {reason}", "start `teimgr node join`")
    state = "is leaving" if facts["draining"] else "has joined"
    return Finding("node", "ok", f"{facts['name']} {state}, with {facts['workers']} workers")
