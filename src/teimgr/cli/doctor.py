"""`teimgr doctor`: checks of this host, each with advice, before a daemon starts or while it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from teimgr.cli.doctor_checks import CHECKS, Finding
from teimgr.cli.doctor_hosts import check_hosts, check_node
from teimgr.cli.output import say
from teimgr.client.connection import ConnectionValues
from teimgr.config.settings import Settings
from teimgr.config.sources import Source, read, unread_variables
from teimgr.errors import TeimgrError


def main(
    file: Path | None, *, node: Path | None = None, flags: ConnectionValues | None = None, as_json: bool = False
) -> int:
    """Run every check and print the findings; the result is the exit status.

    `node` is the folder of a joined host, which is checked in place of a daemon's; `flags` lead to the daemon that
    knows the other hosts.
    """
    findings = list(examine(file, flags) if node is None else check_node(node))
    if as_json:
        say(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            advice = f"\n{'':14}→ {finding.advice}" if finding.advice else ""
            say(f"{finding.outcome:5} {finding.check:8}{finding.text}{advice}")
    return int(any(finding.outcome == "fail" for finding in findings))


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
    yield from check_hosts(settings, flags or ConnectionValues())
