"""`teimgr ps`, `show`, `rm`, `start`, `stop`, `restart` and `wait`: instances of a running daemon."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions, Name, Names
from teimgr.cli.failures import ExitStatus, UsageError, exit_status, explain, report
from teimgr.cli.output import duration, leaves, say, shortened, size, spinner
from teimgr.cli.watch_commands import event_line
from teimgr.client.rest_client import RestClient
from teimgr.client.rest_values import Instance
from teimgr.errors import DeadlineExceeded, Forbidden, ModelLoadFailed, NotRunning, TeimgrError
from teimgr.spec import CUT_TEXTS, State, attempt_text

_COLUMNS = (
    "name",
    "status",
    "model",
    "kind",
    "dtype",
    "port",
    "workers",
    "device",
    "restarts",
    "uptime",
    "memory",
    "reason",
)
_MODEL_WIDTH = 28
_FIRST_CALLS = {
    "reranker": "teimgr rerank 'a question' 'a text' 'another text' -i {name}",
    "classifier": "teimgr classify 'some text' -i {name}",
}
_EMBED = "teimgr embed 'some text' -i {name}"
_SHOWN_EVENTS = 3
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5

Wait = Annotated[bool, typer.Option("--wait", "-w", help="Return when it serves or has failed.")]
Timeout = Annotated[float, typer.Option(metavar="S", help="Maximum seconds to wait.", min=0)]
Tag = Annotated[
    list[str] | None, typer.Option("--tag", metavar="KEY[:VALUE]", help="Only with this tag; several must all match.")
]


def ps(
    server: DaemonOptions,
    output: CommandOutput,
    tag: Tag = None,
    status: Annotated[
        list[State] | None,
        typer.Option(metavar="STATE", help=f"Only in this state: {', '.join(State)}; several: any of them."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="Only of this model; several: any of them.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the names.")] = False,
) -> None:
    """List the instances with their state."""
    query = [("tag", each) for each in tag or ()] + [("status", each.value) for each in status or ()]
    query += [("model_id", each) for each in model or ()]
    bodies = server.rest.request("GET", "/instances", query=query)
    if output.as_json:
        output.value(bodies)
        return
    instances = [Instance.from_json(body) for body in bodies]
    if quiet:
        say("\n".join(each.name for each in instances), end="\n" if instances else "")
        return
    if output.is_terminal:
        _print_fleet(output, instances)
    else:
        output.table(_COLUMNS, [_row(each) for each in instances])
    if not instances and output.is_terminal:
        output.note("no instances; `teimgr create NAME MODEL` makes one")


def list_instances(server: DaemonOptions, output: CommandOutput) -> None:
    """The same as `ps`; `models list` has what is in the cache."""
    ps(server, output)


def _print_fleet(output: CommandOutput, instances: Sequence[Instance]) -> None:
    """The table on a terminal; reasons, which are sentences, are lines below it."""
    rows = [_row(each) for each in instances]
    model = _COLUMNS.index("model")
    short = [(*row[:model], shortened(row[model], _MODEL_WIDTH), *row[model + 1 : -1]) for row in rows]
    output.table(_COLUMNS[:-1], short)
    for row in rows:
        if row[-1]:
            say(f"{row[0]}: {row[-1]}")


def _row(instance: Instance) -> Sequence[Any]:
    details = instance.details
    workers: Sequence[Mapping[str, Any]] = details.get("workers") or ()
    serving = sum(worker["state"] == "running" for worker in workers)
    cards = sorted({worker["gpu_id"] for worker in workers if worker.get("gpu_id") is not None})
    device = ("gpu " + ",".join(map(str, cards))) if cards else ("cpu" if serving else "")
    memory = [worker["private_bytes"] for worker in workers if worker.get("private_bytes")]
    update = details.get("update") or {}
    reason = "updating" if update.get("state") == "rolling" else _reason(instance)
    return (
        *(instance.name, instance.status.value, instance.model_id, instance.kind, instance.dtype, instance.port),
        *(f"{serving}/{len(workers)}" if workers else "0", device, instance.restarts),
        *(duration(instance.uptime_secs), size(sum(memory)) if memory else "", reason),
    )


def show(server: DaemonOptions, output: CommandOutput, name: Name) -> None:
    """Show everything about an instance; on a terminal also its last events, and where to call it."""
    instance = server.rest.get(name)
    if output.as_json:
        output.value(instance.details)
        return
    output.table(("key", "value"), leaves(instance.details))
    if output.is_terminal:
        with suppress(Forbidden):  # a restricted key cannot read the fleet's events
            for event in server.rest.events([name], last=_SHOWN_EVENTS, follow=False):
                say(event_line(event))
        for line in addresses(instance, server.connection.url) if instance.port else ():
            say(line)


def addresses(instance: Instance, url: str) -> list[str]:
    """Where to call an instance, and a first command."""
    route = "rerank" if instance.kind == "reranker" else "embeddings"
    body = (
        '{"model": "%s", "query": "a question", "documents": ["a text"]}'
        if route == "rerank"
        else '{"model": "%s", "input": "some text"}'
    )
    first = _FIRST_CALLS.get(instance.kind or "", _EMBED).format(name=instance.name)
    return [
        f"call it:   curl {url}/v1/{route} -H 'Content-Type: application/json' -d '{body % instance.name}'",
        f"or:        {first}",
        f"its port:  {instance.port}, as text-embeddings-inference",
    ]


def rm(
    server: DaemonOptions,
    output: CommandOutput,
    names: Names,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Stop and delete instances.

    On a terminal it asks first. The models stay in the cache.
    """
    if not yes and sys.stdin.isatty() and output.is_terminal:
        typer.confirm(f"Delete {', '.join(names)}?", abort=True, err=True)
    return _each(server, output, names, "deleted", lambda rest, name: rest.delete(name))


def start(
    server: DaemonOptions, output: CommandOutput, names: Names, wait: Wait = False, timeout: Timeout = 300.0
) -> int:
    """Start stopped or failed instances."""
    status = _each(server, output, names, "starting", lambda rest, name: rest.start(name), quiet=wait)
    return status or (_await(server, output, names, timeout) if wait else ExitStatus.OK)


def stop(server: DaemonOptions, output: CommandOutput, names: Names) -> int:
    """Stop instances.

    They stay stopped, also after a restart of the daemon.
    """
    return _each(server, output, names, "stopped", lambda rest, name: rest.stop(name))


def restart(
    server: DaemonOptions,
    output: CommandOutput,
    names: Names,
    rolling: Annotated[bool, typer.Option("--rolling", help="Start new workers before the old ones end.")] = False,
    wait: Wait = False,
    timeout: Timeout = 300.0,
) -> int:
    """Stop instances and start them again."""

    def call(rest: RestClient, name: str) -> Instance:
        return rest.restart(name, rolling=rolling)

    status = _each(server, output, names, "restarting", call, quiet=wait)
    return status or (_await(server, output, names, timeout) if wait else ExitStatus.OK)


def wait(
    server: DaemonOptions,
    output: CommandOutput,
    names: Annotated[list[str] | None, typer.Argument(help="Names of instances; default: all that should run.")] = None,
    timeout: Timeout = 300.0,
) -> int:
    """Wait until instances serve.

    It ends at once, with the reason, where one failed or is stopped.
    """
    chosen = names or [each.name for each in server.rest.list() if each.wanted_running]
    return _await(server, output, chosen, timeout)


def _each(
    server: DaemonOptions,
    output: CommandOutput,
    names: Sequence[str],
    done: str,
    call: Callable[[RestClient, str], Instance | None],
    *,
    quiet: bool = False,
) -> int:
    """Apply a call to every name; the status is that of the first failure, which does not keep the others."""
    if len(set(names)) < len(names):
        raise UsageError(f"a name is given twice: {', '.join(names)}")
    bodies, status = [], ExitStatus.OK
    for name in names:
        try:
            instance = call(server.rest, name)
        except TeimgrError as error:
            report(explain(error, server.source_of(error), server.names, server.cause), as_json=output.as_json)
            status = status or exit_status(error)
        else:
            details = instance.details if instance else {"name": name}
            bodies.append(details)
            if notice := details.get("notice"):
                output.note(f"{name}: {notice}")
            if not output.as_json and not quiet:
                say(f"{name}\t{done}" if not output.is_terminal else f"{name}: {done}")
    if output.as_json and not quiet:
        output.value(bodies)
    return status


def _await(server: DaemonOptions, output: CommandOutput, names: Sequence[str], timeout_s: float) -> int:
    running = await_running(server.rest, names, timeout_s, output)
    if output.as_json:
        output.value([each.details for each in running])
    elif not output.is_terminal:
        output.table(("name", "status", "port"), [(each.name, each.status.value, each.port) for each in running])
    return ExitStatus.OK


def await_running(rest: RestClient, names: Sequence[str], timeout_s: float, output: CommandOutput) -> list[Instance]:
    """The instances once all of them serve and no update is under way; changes of state are noted on stderr.

    Raises:
        ModelLoadFailed: one failed for good, or its update did; the message has the reason.
        NotRunning: one is stopped.
        DeadlineExceeded: not all serve within `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    began = time.monotonic()
    waiting, found, noted = list(names), {}, dict[str, str]()
    pause_s = _FIRST_PAUSE_S
    with spinner(f"waiting for {', '.join(names)}") as update:
        while True:
            for name in list(waiting):
                instance = found[name] = rest.get(name)
                state = _state(instance)
                if noted.get(name) != state:
                    noted[name] = state
                    output.note(
                        f"{name}: {state}" + (f", after {time.monotonic() - began:.1f} s" if _serves(instance) else "")
                    )
                if _serves(instance):
                    waiting.remove(name)
                    for warning in _cut(instance):
                        output.note(f"{name}: {warning}")
            if not waiting:
                return [found[name] for name in names]
            update("waiting for " + "; ".join(f"{name}: {noted[name]}" for name in waiting))
            if time.monotonic() >= end:
                states = "; ".join(f"{name} is {noted[name]}" for name in waiting)
                raise DeadlineExceeded(f"not ready after {timeout_s:g} s: {states}")
            time.sleep(min(pause_s, max(end - time.monotonic(), 0)))
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


def _cut(instance: Instance) -> list[str]:
    """The warning that texts are cut to `max_batch_tokens`, if there is one."""
    warnings = (instance.details.get("model") or {}).get("warnings", ())
    return [each for each in warnings if each.startswith(CUT_TEXTS)]


def _serves(instance: Instance) -> bool:
    """True if it runs, or is loaded by its first call, and no update is under way.

    Raises:
        ModelLoadFailed: it failed, or its last update failed and was rolled back.
        NotRunning: it is stopped.
    """
    if instance.status is State.FAILED:
        raise ModelLoadFailed(f"Instance '{instance.name}' failed: {instance.reason or 'its log has the reason'}")
    if instance.status is State.STOPPED:
        raise NotRunning(instance.name, instance.status.value)
    update = instance.details.get("update") or {}
    if update.get("state") == "failed":
        raise ModelLoadFailed(f"The update of '{instance.name}' failed and was rolled back: {update.get('reason')}")
    return instance.status in (State.RUNNING, State.UNLOADED) and update.get("state") != "rolling"


def _state(instance: Instance) -> str:
    update = instance.details.get("update") or {}
    word = "updating" if update.get("state") == "rolling" else instance.status.value
    return f"{word} ({instance.reason})" if instance.reason else word


def _reason(instance: Instance) -> str | None:
    """Why it does not serve, behind the number of the start where it is started again and again."""
    workers: Sequence[Mapping[str, Any]] = instance.details.get("workers") or ()
    attempt = attempt_text((each.get("attempt"), each.get("next_attempt_secs")) for each in workers)
    return ": ".join(filter(None, (attempt, instance.reason))) or None
