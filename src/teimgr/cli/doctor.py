"""`teimgr doctor`: checks this host, the daemon and its hosts; `--bundle` writes a support bundle."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
import ssl
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from teimgr import __version__
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
from teimgr.cli.failures import explain
from teimgr.cli.output import say
from teimgr.client.connection import ConnectionValues, DaemonConnection
from teimgr.client.connection_causes import diagnose
from teimgr.client.rest_client import RestClient
from teimgr.client.server_address import ServerAddress
from teimgr.config.settings import Settings, is_loopback
from teimgr.config.sources import Source, read, unread_variables
from teimgr.daemon.watches import disk_usage, level_of
from teimgr.errors import InvalidConfig, TeimgrError, Unauthenticated, Unreachable
from teimgr.files import write_atomically
from teimgr.spec import State

_CLOCK_LIMIT_S = 2.0
"""Larger differences make the order of merged logs and events misleading; certificates tolerate minutes."""
_LIMIT_S = 10.0
_ANSWER_LIMIT_S = 5.0
_OF_LEVEL: Mapping[int | None, Outcome] = {90: "warn", 95: "fail"}
_MANY_FILES = 0.90  # of the limit
_MANY_RESTARTS = 5
_FEW_DAYS = 21
_FOLDERS = ("state_dir", "log_dir", "run_dir")
_BUNDLE_LINES, _BUNDLE_EVENTS, _BUNDLE_MODE = 500, 500, 0o600
_HIDING = (
    (re.compile(r"""(?i)(\bauthorization["']?\s*[:=]\s*["']?)[^"'\n]+"""), r"\1(hidden)"),
    (
        re.compile(r"""(?i)((?:\b|_)(?:api[_-]?key|token|secret|password)["']?\s*[:=]\s*["']?)[^\s"',}]+"""),
        r"\1(hidden)",
    ),
    (re.compile(r"(?i)(\bbearer\s+)\S+"), r"\1(hidden)"),
    (re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"), "(hidden)"),
    (re.compile(r"\b(?:hf_[A-Za-z0-9]{8,}|teimgr_[\w-]{16,}|teimgr1\.\S+)"), "(hidden)"),
)


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
        found = connection.rest_client(_LIMIT_S).hosts()["hosts"]
    except TeimgrError as error:
        yield Finding(
            "hosts", "warn", f"no daemon to ask: {error.message}", "start it, or use another: --url, --api-key"
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
        return Finding("hosts", "fail", f"{name} ({host['address']}) accepts no workers: {host['problem']}", _REMEDY)
    if ahead is not None and abs(ahead) > _CLOCK_LIMIT_S:
        outcome, advice = "warn", "synchronise its clock (chrony, systemd-timesyncd)"
    elif not enough_memory(memory):
        outcome, advice = "warn", "little memory is left for another worker"
    elif disk is not None and not enough_disk(disk):
        outcome, advice = "warn", "further models may not fit: set HF_HOME there, or delete some"
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


def connection_of(settings: Settings, flags: ConnectionValues) -> DaemonConnection:
    """The daemon that flags, environment or context name, else that of these settings."""
    connection = DaemonConnection.resolve(flags)
    if not connection.is_default:
        return connection
    scheme = "https" if settings.tls_files is not None else "http"
    host = "127.0.0.1" if settings.api_host in ("0.0.0.0", "::") else settings.api_host
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.api_port}"
    return DaemonConnection.resolve(ConnectionValues(url=url).over(flags))


def check_daemon(connection: DaemonConnection, *, is_named: bool) -> Iterator[Finding]:
    """Whether the daemon answers, and which problems it reports.

    `is_named`: a user has named it, so that none is a fault.
    """
    rest = connection.rest_client(_LIMIT_S)
    began = time.time()
    try:
        health = rest.health()
    except TeimgrError as error:
        yield _absent(connection, error, is_named=is_named)
        return
    ended = time.time()
    version = health.details.get("version")
    yield Finding("daemon", "ok", f"{connection.url} answers, version {version}")
    if version != __version__:
        text = f"the daemon has version {version}, this program {__version__}"
        yield Finding("daemon", "warn", text, "upgrade the older one: docs/operations/upgrade.md")
    yield _clock(str(health.details.get("timestamp", "")), began, ended)
    for alarm in health.details.get("alarms", ()):
        yield Finding("alarms", "fail", str(alarm), "`teimgr events` shows the history")
    for check in (_instances, _folders, _limits):
        try:
            yield from check(connection, rest)
        except Unauthenticated as error:
            key = "the daemon does not accept the key" if connection.api_key else "no key was sent"
            yield Finding("daemon", "fail", f"{error.message}; {key}", "give one: --api-key-file FILE, TEIMGR_API_KEY")
            break
        except TeimgrError as error:
            yield Finding("daemon", "warn", f"not all checks were possible: {error.message}", explain(error).do)
    yield from check_certificates(connection)


def _absent(connection: DaemonConnection, error: TeimgrError, *, is_named: bool) -> Finding:
    if isinstance(error, Unreachable):
        if cause := diagnose(ServerAddress.parse(connection.url), connection.tls):
            return Finding("daemon", "fail", f"{cause.what}: {cause.why}", cause.do)
        text = f"none answers at {connection.url}: {error.reason}"
        return Finding("daemon", "fail" if is_named else "ok", text, "start it, or name another: --url")
    return Finding("daemon", "fail", f"{connection.url}: {error.message}", "give a key of it: --api-key-file")


def _clock(timestamp: str, began: float, ended: float) -> Finding:
    """The daemon's clock beside that of this host; the time of the call itself does not count."""
    try:
        theirs = datetime.fromisoformat(timestamp).timestamp()
    except ValueError:
        return Finding("clock", "warn", "the daemon does not report its time", "does it have this version?")
    ahead = theirs - min(max(theirs, began), ended)
    if abs(ahead) > _CLOCK_LIMIT_S:
        advice = "synchronise both clocks (chrony, systemd-timesyncd): certificates and merged logs depend on them"
        return Finding("clock", "warn", f"the daemon's clock is {ahead:+.1f} s from this one", advice)
    return Finding("clock", "ok", "the daemon's clock agrees with this one")


def _instances(connection: DaemonConnection, rest: RestClient) -> Iterator[Finding]:
    """Instances that failed or start again and again."""
    found = rest.list()
    bad = 0
    for each in found:
        if each.status is State.FAILED:
            text = f"{each.name} failed: {each.reason or 'its log has the reason'}"
        elif each.restarts >= _MANY_RESTARTS and each.status is not State.STOPPED:
            text = f"{each.name} was restarted {each.restarts} times and is {each.status.value}: {each.reason or ''}"
        else:
            continue
        bad += 1
        yield Finding(
            "instance", "fail", text.rstrip(": "), f"`teimgr logs {each.name}` and `teimgr events {each.name}`"
        )
    running = sum(each.status is State.RUNNING for each in found)
    yield Finding("instance", "ok", f"{running} of {len(found)} run" + (f", {bad} need help" if bad else ""))


def _folders(connection: DaemonConnection, rest: RestClient) -> Iterator[Finding]:
    """The daemon's folders and their disks, where it runs on this host."""
    address = ServerAddress.parse(connection.url)
    if not address.path and not is_loopback(address.host):
        yield Finding("disk", "ok", "the daemon is on another host: run `teimgr doctor` there for its folders")
        return
    values = {each["key"]: each["value"] for each in rest.config()}
    for key in _FOLDERS:
        folder = Path(str(values.get(key) or ""))
        if not folder.is_absolute() or not folder.is_dir():
            continue
        _, used, left = disk_usage(folder)
        outcome: Outcome = _OF_LEVEL.get(level_of(used), "ok")
        text = f"{key} {folder}: {gib(left)} free, {used:.0%} used"
        yield Finding(
            "disk", outcome, text, "" if outcome == "ok" else "make room: a full disk stops changes and starts"
        )
        if not is_writable(folder):
            yield Finding("disk", "warn", f"{key} {folder} is not writable by this user", "")


def _limits(connection: DaemonConnection, rest: RestClient) -> Iterator[Finding]:
    """The daemon's open files beside their limit, by its metrics."""
    text = rest.metrics()
    found = {name: re.search(rf"(?m)^{name} ([0-9.e+]+)", text) for name in ("process_open_fds", "process_max_fds")}
    opened, most = (float(each[1]) if each else None for each in found.values())
    if opened is None or not most:
        return
    outcome: Outcome = "warn" if opened / most > _MANY_FILES else "ok"
    advice = "" if outcome == "ok" else "raise LimitNOFILE of its service, or `ulimit -n`"
    yield Finding("limits", outcome, f"the daemon has {opened:.0f} of {most:.0f} files open", advice)


def check_certificates(connection: DaemonConnection) -> Iterator[Finding]:
    """How long the daemon's certificate is valid."""
    address = ServerAddress.parse(connection.url)
    if not address.secure or address.path:
        return
    try:
        name = connection.tls.server_name or address.host
        with (
            socket.create_connection((address.host, address.port), timeout=_LIMIT_S) as sock,
            connection.tls.ssl_context().wrap_socket(sock, server_hostname=name) as secured,
        ):
            ends = ssl.cert_time_to_seconds(str((secured.getpeercert() or {})["notAfter"]))
        yield _validity("the daemon's certificate", ends)
    except (OSError, KeyError, ValueError, InvalidConfig) as error:
        yield Finding("tls", "warn", f"the daemon's certificate cannot be read: {error}")


def _validity(what: str, ends: float) -> Finding:
    days = (ends - time.time()) / 86_400
    outcome: Outcome = "fail" if days < 0 else "warn" if days < _FEW_DAYS else "ok"
    until = datetime.fromtimestamp(ends, UTC).date()
    text = f"{what} is valid for {max(days, 0):.0f} days, until {until}"
    return Finding("tls", outcome, text, "" if outcome == "ok" else "renew it; the daemon reloads changed files")


def write_bundle(file: Path, connection: DaemonConnection, findings: Sequence[Finding]) -> list[str]:
    """Write the support bundle, a .tar.gz of findings, settings, instances, events, metrics and logs; its entries.

    Secrets are hidden: the daemon shows none, and what looks like a key, a token or a password is replaced.

    Raises:
        InvalidConfig: the file cannot be written.
    """
    rest = connection.rest_client(_LIMIT_S)
    entries: dict[str, str] = {
        "doctor.json": json.dumps([asdict(each) for each in findings], indent=2),
        "about.json": json.dumps(
            {"version": __version__, "made": datetime.now(UTC).isoformat(), "url": connection.url}
        ),
    }
    asked: Mapping[str, Callable[[], Any]] = {
        "health.json": lambda: rest.request("GET", "/health"),
        "settings.json": lambda: list(rest.config()),
        "instances.json": lambda: rest.request("GET", "/instances"),
        "events.json": lambda: rest.request("GET", "/events", query=[("last", str(_BUNDLE_EVENTS))]),
        "gpus.json": rest.gpus,
        "hosts.json": rest.hosts,
    }
    for name, ask in asked.items():
        entries[name] = _answer(partial(_as_json, ask))
    entries["metrics.txt"] = _answer(rest.metrics)
    try:
        names = [each.name for each in rest.list()]
    except TeimgrError:
        names = []
    for instance in (None, *names):
        entries[f"logs/{instance or '_daemon'}.log"] = _answer(partial(_log, rest, instance))
    try:
        write_atomically(file, _packed(entries), mode=_BUNDLE_MODE)
    except OSError as error:
        raise InvalidConfig(f"{file}: cannot be written: {error.strerror}") from error
    return list(entries)


def _as_json(ask: Callable[[], Any]) -> str:
    return json.dumps(ask(), indent=2, default=str)


def _log(rest: RestClient, name: str | None) -> str:
    return "\n".join(rest.logs(name, -_BUNDLE_LINES).lines)


def _answer(ask: Callable[[], str]) -> str:
    """A reply, or why it failed: a bundle of a broken daemon is made too."""
    try:
        return ask()
    except TeimgrError as error:
        return f"not available: {error.message}"


def _packed(entries: Mapping[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in entries.items():
            content = redacted(text).encode()
            entry = tarfile.TarInfo(f"teimgr-support/{name}")
            entry.size, entry.mode, entry.mtime = len(content), _BUNDLE_MODE, int(time.time())
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def redacted(text: str) -> str:
    """The text without what looks like a key, a token or a password."""
    for pattern, shown in _HIDING:
        text = pattern.sub(shown, text)
    return text
