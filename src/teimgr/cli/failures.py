"""Exit codes of `teimgr`, and errors as three lines: what failed, why, and what to do."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum

from teimgr.cli.output import say
from teimgr.client.connection_causes import Cause
from teimgr.errors import (
    Code,
    Forbidden,
    InstanceNotFound,
    InvalidConfig,
    ModelNotFound,
    Refused,
    TeimgrError,
    TryLater,
    Unauthenticated,
    Unreachable,
)


class ExitStatus(IntEnum):
    """Exit status of a command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    NOT_ALLOWED = 5
    REFUSED = 6
    NOT_NOW = 7
    INCOMPLETE = 8
    INTERRUPTED = 130


MEANINGS = {
    ExitStatus.OK: "done",
    ExitStatus.FAILED: "failed: a model or the daemon, or a configuration with faults",
    ExitStatus.USAGE: "wrong command line",
    ExitStatus.UNREACHABLE: "no daemon answers",
    ExitStatus.NOT_FOUND: "no such instance or model",
    ExitStatus.NOT_ALLOWED: "no or wrong credentials, or a key without the right",
    ExitStatus.REFUSED: "refused: an invalid value, or not possible in the present state",
    ExitStatus.NOT_NOW: "not now: overloaded, not running, or out of time; trying again may help",
    ExitStatus.INCOMPLETE: "done in part: some rows or instances failed",
    ExitStatus.INTERRUPTED: "interrupted",
}

_TO_DO = {
    Code.UNAUTHENTICATED: "give a key: --api-key-file FILE, TEIMGR_API_KEY, or `teimgr context add`",
    Code.FORBIDDEN: "use a key with this right; `teimgr key new --rights …` makes one for the daemon's configuration",
    Code.INSTANCE_NOT_FOUND: "`teimgr ps` lists the instances",
    Code.MODEL_NOT_FOUND: "`teimgr models list` lists the models of the daemon's host",
    Code.INSTANCE_EXISTS: "`teimgr edit` changes it without a gap, `teimgr rm` deletes it",
    Code.ALREADY_RUNNING: "`teimgr restart` starts it again, `teimgr wait` waits until it serves",
    Code.NOT_RUNNING: "`teimgr start` starts it",
    Code.BACKEND_UNAVAILABLE: "`teimgr ps` shows its state, `teimgr start` starts it, `teimgr logs` has its log",
    Code.MODEL_LOAD_FAILED: "`teimgr logs NAME` has the details; `teimgr models check MODEL` loads a model on trial",
    Code.MODEL_IN_USE: "delete the instances first: `teimgr rm`",
    Code.WRONG_MODEL_KIND: "`teimgr ps` shows what kind of model each instance has",
    Code.UPDATE_IN_PROGRESS: "wait for it: `teimgr wait`",
    Code.OVERLOADED: "try again later, or give the instance more: `teimgr edit NAME --replicas N`",
    Code.TIMEOUT: "give it more time with --timeout, or look at `teimgr top`",
    Code.AMBIGUOUS_INSTANCE: "name one with --instance",
    Code.PORT_CONFLICT: "choose another port, or leave it to the daemon",
    Code.MAX_INSTANCES_REACHED: "delete one with `teimgr rm`, or raise `max_instances`",
}


@dataclass(frozen=True, slots=True)
class CommandFailure:
    """An error as a person reads it; `code` is the stable name of its kind."""

    what: str
    why: str
    do: str
    code: str


class UsageError(Refused):
    """The command line asks for something that cannot be meant."""


def exit_status(error: TeimgrError) -> ExitStatus:
    if isinstance(error, UsageError):
        return ExitStatus.USAGE
    if isinstance(error, Unreachable):
        return ExitStatus.UNREACHABLE
    if isinstance(error, InstanceNotFound | ModelNotFound):
        return ExitStatus.NOT_FOUND
    if isinstance(error, Unauthenticated | Forbidden):
        return ExitStatus.NOT_ALLOWED
    if isinstance(error, InvalidConfig):
        return ExitStatus.FAILED
    if isinstance(error, Refused):
        return ExitStatus.REFUSED
    return ExitStatus.NOT_NOW if isinstance(error, TryLater) else ExitStatus.FAILED


def explain(
    error: TeimgrError,
    source: str = "",
    names: Callable[[], Sequence[str]] = tuple,
    cause: Callable[[Unreachable], Cause | None] = lambda error: None,
) -> CommandFailure:
    """The error in three parts. `source` names where the address is from, `names` lists the daemon's instances,
    `cause` looks for the reason of a failed connection."""
    if isinstance(error, Unreachable):
        if found := cause(error):
            return CommandFailure(found.what, f"{found.why}; the address is from {source}", found.do, "UNREACHABLE")
        return CommandFailure(
            f"no daemon answers at {error.address}",
            f"{error.reason}; the address is from {source}" if source else error.reason,
            "start one with `teimgr up` or `teimgr serve`, or name another: --url, TEIMGR_URL, `teimgr context use`",
            "UNREACHABLE",
        )
    if isinstance(error, InvalidConfig | UsageError) or type(error) is Refused:  # of this program, not of a daemon
        return CommandFailure(error.message, "", "", error.code.name if isinstance(error, InvalidConfig) else "USAGE")
    do = _TO_DO.get(error.code, "")
    if "`normalize` is not available" in error.message:
        do = "add --no-normalize"
    if isinstance(error, InstanceNotFound):
        do = _nearest(error, names) + do
    code = error.code.name
    return CommandFailure(error.message, f"error code {code}; `teimgr explain {code}` has its causes", do, code)


def _nearest(error: InstanceNotFound, names: Callable[[], Sequence[str]]) -> str:
    _, quote, rest = error.message.partition("'")
    near = difflib.get_close_matches(rest.partition("'")[0], names(), n=1) if quote else []
    return f"did you mean {near[0]!r}? " if near else ""


def report(failure: CommandFailure, *, as_json: bool = False) -> None:
    """Print a failure on stderr."""
    if as_json:
        say(json.dumps({"error": asdict(failure)}), file=sys.stderr)
        return
    for line in failure.what.splitlines() or [""]:
        say(f"teimgr: {line}", file=sys.stderr)
    if failure.why:
        say(f"  why:  {failure.why}", file=sys.stderr)
    if failure.do:
        say(f"  next: {failure.do}", file=sys.stderr)
