"""Causes and remedies of every error code: for `teimgr explain`, `/docs/errors` and docs/troubleshooting.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from teimgr.errors import Broken, Code, Refused, TeimgrError, TryLater, error_from_code


@dataclass(frozen=True, slots=True)
class Advice:
    """The cause of an error code and its remedy, one Markdown sentence each."""

    causes: tuple[str, ...]
    remedies: tuple[str, ...]


def class_of(code: Code) -> type[TeimgrError]:
    """The exception class of a code."""
    return type(error_from_code(code, ""))


def meaning(code: Code) -> str:
    """The first line of the docstring of the exception class."""
    return (class_of(code).__doc__ or "").strip().splitlines()[0]


def repetition(code: Code) -> str:
    """Whether repeating the request may help."""
    kind = class_of(code)
    if issubclass(kind, Refused):
        return "Repeating the request changes nothing."
    if issubclass(kind, TryLater):
        return "The request is valid and may succeed later."
    assert issubclass(kind, Broken)
    return "A failure on the server's side."


def to_text(code: Code) -> str:
    """The advice as plain text of several lines, for a terminal."""
    return "\n".join(_lines(code))


def _lines(code: Code) -> Iterator[str]:
    advice = ADVICE[code]
    yield f"{code.name}: {meaning(code)} {repetition(code)}"
    for title, sentences in (("Causes", advice.causes), ("Remedies", advice.remedies)):
        yield ""
        yield f"{title}:"
        for sentence in sentences:
            yield f"  * {sentence}"


_SHOW_LOG = "`teimgr logs NAME` has the log of the worker, `GET /instances/{name}/events` its history."
_SMALLER_CALL = "Send fewer or shorter texts per call."
_LIMITS = "`GET /instances/{name}` and `/info` of the instance show the limits in effect."

ADVICE: Mapping[Code, Advice] = MappingProxyType(
    {
        Code.VALIDATION_ERROR: Advice(
            ("A body or query parameter of REST has an unknown name, a wrong type, or a value beyond its limit.",),
            ("Correct the field that the message names; `/openapi.json` and the settings reference have all limits.",),
        ),
        Code.EMPTY_INPUT: Advice(
            ("`inputs` is an empty list, or a text in it is empty.",), ("Leave out empty texts before the call.",)
        ),
        Code.INVALID_INPUT: Advice(
            (
                "A text has more tokens than the model takes and the call does not truncate.",
                "A call has more texts than `max_client_batch_size`.",
                "An option is of the wrong type, or the model does not have it (a prompt name, a dimension).",
            ),
            (
                "Set `truncate` (TEI) or split the text; `/info` has `max_input_length`.",
                "Send several calls, use Arrow over gRPC, or raise `max_client_batch_size`.",
            ),
        ),
        Code.TOKENIZER_ERROR: Advice(
            ("The tokenizer library failed on the text, or on the token ids.",),
            ("Try the text alone with `POST /tokenize` of the instance; the message has the library's reason.",),
        ),
        Code.WRONG_MODEL_KIND: Advice(
            ("The call asks for something that this kind of model does not do: `/rerank` of an embedding model.",),
            (
                "`teimgr ps` shows the kind of each instance; name another one.",
                "If the kind was detected wrongly, set `kind` or `pooling` of the instance.",
            ),
        ),
        Code.INVALID_CONFIG: Advice(
            ("A key of the configuration, a flag in `extra_args`, a certificate or a model file is invalid.",),
            ("`teimgr config check FILE` reports every fault with its line.",),
        ),
        Code.INVALID_PORT: Advice(
            ("`port` of an instance is below 1024 or above 65535.",),
            ("Choose another port, or leave it out: the daemon takes a free one of its range.",),
        ),
        Code.INVALID_INSTANCE_NAME: Advice(
            ("The name has characters other than `A-Z a-z 0-9 . _ -` or more than 64, or begins with a sign.",),
            ("Choose another name.",),
        ),
        Code.INVALID_GPU_ID: Advice(
            (
                "`gpu_id` names a card that does not exist.",
                "The driver or the container shows no cards: the message has the reason in brackets.",
            ),
            ("`teimgr gpus` lists the cards; leave `gpu_id` out to let the daemon choose.", "Run `teimgr doctor`."),
        ),
        Code.INSTANCE_NOT_FOUND: Advice(
            ("No instance has this name: a typing error, another daemon, or it was deleted.",),
            ("`teimgr ps` lists the instances; check `TEIMGR_URL` and `teimgr context list`.",),
        ),
        Code.MODEL_NOT_FOUND: Advice(
            (
                "The path is not a directory on the daemon's host, or holds no model.",
                "The hub has no such model or revision, or it is private.",
                "The hub cannot be reached and the model is not in the cache, nor in that of another host.",
                "No running instance serves the model id of a call.",
            ),
            (
                "`teimgr models list` shows what is on the host; the message lists similar names.",
                "Relative paths are taken from the daemon's working directory: give absolute ones.",
                "For a private model set `HF_TOKEN` in the daemon's environment.",
            ),
        ),
        Code.MODEL_GATED: Advice(
            ("The hub requires an accepted licence for this model, and no token of such an account was given.",),
            ("Accept the licence on the hub, and set `HF_TOKEN` in the daemon's environment.",),
        ),
        Code.MODEL_BUSY: Advice(
            ("A download, trial or deletion of the model is going on.",),
            ("Wait for it: `teimgr models list` shows the state.",),
        ),
        Code.MODEL_IN_USE: Advice(
            ("Instances use the model that was to be deleted; stopped ones count too.",),
            ("Delete those instances first, or give them another model.",),
        ),
        Code.INSTANCE_EXISTS: Advice(
            ("An instance of this name was created before, by a user or by the configuration.",),
            ("Change it with `teimgr edit`, or delete it with `teimgr rm`.",),
        ),
        Code.ALREADY_RUNNING: Advice(
            ("The instance to start is running or starting already.",),
            ("`teimgr restart` starts it again, `teimgr wait` waits for it.",),
        ),
        Code.NOT_RUNNING: Advice(
            ("The instance to stop, or to wait for, is stopped.",), ("`teimgr start NAME --wait` starts it.",)
        ),
        Code.PORT_CONFLICT: Advice(
            (
                "Another instance, the daemon itself or another process has the port; the message names it.",
                "A second daemon on this host has the same ports.",
            ),
            (
                "Choose another port, or leave it out.",
                "For a second daemon set `api_port`, `grpc_port`, `instance_port_start`, `instance_port_end`, "
                "`prometheus_port_start` and `state_dir`.",
            ),
        ),
        Code.UNIMPLEMENTED: Advice(
            ("The method, the option or the message's compression is not implemented.",),
            ("The message names it; the references of REST and gRPC list what there is.",),
        ),
        Code.AMBIGUOUS_INSTANCE: Advice(
            ("The call names no instance, and several instances run, or none.",),
            (
                "Give `model` in the body, `--instance` on the command line, or the metadata `x-teimgr-instance`.",
                "`teimgr ps` shows which instances run.",
            ),
        ),
        Code.UPDATE_IN_PROGRESS: Advice(
            ("An update of this instance is not finished.",), ("`teimgr wait NAME`, then repeat the change.",)
        ),
        Code.UPDATE_FAILED: Advice(
            (
                "The workers with the new settings did not pass their self-test; the old ones serve on.",
                "The next daemon of a `daemon restart` did not get ready; the present one serves on.",
            ),
            ("The message has the reason of the new process.", _SHOW_LOG),
        ),
        Code.UNAUTHENTICATED: Advice(
            (
                "The call has no key, or one that the configuration does not have.",
                "The client's certificate is not on the list of allowed ones.",
            ),
            (
                "Send `Authorization: Bearer KEY`; on the command line `--api-key-file` or `TEIMGR_API_KEY`.",
                "After a change of keys: `teimgr reload`.",
            ),
        ),
        Code.FORBIDDEN: Advice(
            (
                "The key lacks the right (`admin`, `inference`, `read`), or is for other instances.",
                "A web page of another origin tries to change something.",
                "A restricted key asks for code of a repository, pickled weights or a directory.",
            ),
            (
                "Use another key; `teimgr key new` makes one with the rights that are needed.",
                "For a page of your own add its origin to `allowed_origins`.",
            ),
        ),
        Code.OBJECT_NOT_FOUND: Advice(
            (
                "The id of a file or batch is mistyped, or another API key made it: each key sees only its own.",
                "It was deleted, or has expired (`expires_after`, `batches.retention_days`).",
            ),
            ("`GET /v1/files` and `GET /v1/batches` list what this key has.",),
        ),
        Code.OBJECT_IN_USE: Advice(
            ("A file is the input of a batch that has not ended.", "The batch to cancel has ended already."),
            ("Cancel the batch, or wait for its end; `GET /v1/batches/{id}` has its status.",),
        ),
        Code.SPACE_DIFFERS: Advice(
            (
                "The model's files, pooling, prompts, lengths or dimensions differ from those of the index, "
                "or the call went to another instance, or its precision is coarser than the request allows.",
            ),
            (
                "Compare the two fingerprints in the message with those in `/info` and `GET /instances/NAME`.",
                "Use the instance of the index, or make the index again and expect the new fingerprint.",
            ),
        ),
        Code.STORAGE_QUOTA_EXCEEDED: Advice(
            ("A limit of the table `[batches]` on stored bytes, files or unfinished batches is reached.",),
            ("Delete files by `DELETE /v1/files/{id}`, wait until they expire, or raise the limit that is named.",),
        ),
        Code.MAX_INSTANCES_REACHED: Advice(
            ("The daemon has as many instances as `max_instances` allows, stopped ones included.",),
            ("Delete one, or raise `max_instances`.",),
        ),
        Code.PORT_ALLOCATION_FAILED: Advice(
            ("All ports from `instance_port_start` on, or those for metrics, are taken.",),
            ("Delete an instance, widen the range, or move it away from the other process.",),
        ),
        Code.OVERLOADED: Advice(
            (
                "More calls arrive than the workers answer: a queue is full, or the call would wait for longer than "
                "its deadline or `max_queue_wait_secs`, or `max_queued_tokens` wait already.",
                "Calls in flight have used up a budget of bytes.",
            ),
            (
                "Wait for the time of `Retry-After` or `grpc-retry-pushback-ms`, and try again.",
                "Add replicas (`teimgr edit NAME --replicas N`), GPUs or CPU threads; see the page on sizing.",
                "`teimgr top` shows queues and rates; the alert `TeimgrOverloaded` counts refusals.",
            ),
        ),
        Code.MESSAGE_TOO_LARGE: Advice(
            ("A body, a message or a reply is larger than its limit; the message has both sizes.",),
            (_SMALLER_CALL, "Raise `inference_max_body_mb` and `grpc_max_message_size_mb`."),
        ),
        Code.OUT_OF_DEVICE_MEMORY: Advice(
            (
                "The model, or a batch of its largest size, does not fit into the free memory of the device.",
                "Other processes or instances use the card.",
            ),
            (
                "Lower `max_batch_tokens`, or choose another card with `gpu_id`; `teimgr gpus` shows what is free.",
                'On GPUs `dtype = "auto"` takes half of the memory of `float32` where it is faithful.',
            ),
        ),
        Code.KILLED_FOR_MEMORY: Advice(
            (
                "The cgroup of the daemon (a container's limit, `MemoryMax=` of a unit) or the host has less memory "
                "than its workers took; the message has the limit and what the worker held.",
                "Other processes in the same cgroup or on the host use the memory.",
            ),
            (
                "Raise the limit, stop an instance or load some on demand; `teimgr plan` shows what each takes.",
                'Choose a smaller model, `dtype = "bfloat16"` or `"int8"`, or lower `max_batch_tokens`.',
                "The worker is tried again after 15 s to 10 minutes; `teimgr start NAME` tries at once.",
            ),
        ),
        Code.BACKEND_UNAVAILABLE: Advice(
            (
                "The instance is starting, stopped or failed; the message has state and reason.",
                "Its worker was lost during the call.",
                "The client found no server at this address.",
            ),
            (
                "`teimgr ps` shows the state, `teimgr start NAME --wait` starts a stopped instance.",
                "A worker that died is restarted automatically; repeat the call after `Retry-After`.",
                _SHOW_LOG,
            ),
        ),
        Code.TIMEOUT: Advice(
            (
                "The deadline of the call passed, or `grpc_request_timeout_secs` or `inference_timeout_secs`.",
                "The client sent its message too slowly.",
            ),
            (
                "Give the call more time, or less work.",
                "`teimgr top` shows whether the instance is busy, `teimgr logs NAME` whether it is slow.",
            ),
        ),
        Code.CANCELLED: Advice(
            ("The client closed its connection or cancelled the call.", "The client did not read the reply."),
            ("None if the client meant to cancel; otherwise raise the client's timeout.",),
        ),
        Code.STATE_NOT_SAVED: Advice(
            ("The state file cannot be written: the disk is full, or the folder is read-only or another user's.",),
            (
                "Make room or fix the permissions of `state_dir`; the first line of the daemon's log has its path.",
                "`teimgr doctor` checks the folders. The change was not made: repeat it.",
            ),
        ),
        Code.STORAGE_FULL: Advice(
            (
                "The disk of the folder `batches`, beside the state file, is full, or this user's quota of it.",
                "A model of another host does not fit into the hub cache of the worker's host; the message has the path"
                " and the missing bytes.",
            ),
            (
                "Make room, or delete files by `DELETE /v1/files/{id}`. A running batch then continues automatically.",
                "`GET /hosts` has what is free for models on each host; the worker is retried automatically.",
            ),
        ),
        Code.NO_HOST: Advice(
            (
                "`node` or `labels` of the instance name hosts that are not in the cluster, or are leaving it.",
                "The host has another version of teimgr, Ray, Python or torch than the daemon.",
                "Ray did not place the worker within `placement_timeout_secs` of `[cluster]`.",
            ),
            (
                "The message has the reason for each host; `teimgr cluster status` shows them all.",
                "The daemon tries again, with growing pauses: a host that joins gets the worker.",
            ),
        ),
        Code.TOKEN_RATE_EXCEEDED: Advice(
            ("The key has used its `tokens_per_second` and `burst_tokens`.",),
            (
                "Wait for as long as `Retry-After` says; then the call is served.",
                "Raise the key's quota under `[[auth.api_keys]]`, and reload the configuration.",
            ),
        ),
        Code.DAILY_TOKENS_EXCEEDED: Advice(
            ("The key has used its `tokens_per_day`.",),
            (
                "The next day begins at midnight in UTC; `Retry-After` has the seconds.",
                "`teimgr usage --by key,model` shows what has used them.",
            ),
        ),
        Code.CONCURRENT_TOKENS_EXCEEDED: Advice(
            ("Calls of the key that are not answered yet have its `concurrent_tokens`.",),
            ("Send fewer calls at a time, or smaller ones.",),
        ),
        Code.CALL_OVER_QUOTA: Advice(
            ("The call alone has more tokens than a quota of its key; the message has both numbers.",),
            (
                "Divide the call into smaller ones.",
                "Raise `burst_tokens`, `tokens_per_day` or `concurrent_tokens` of the key.",
            ),
        ),
        Code.MODEL_LOAD_FAILED: Advice(
            (
                "The model is neither a directory of the daemon's host nor in its cache, and cannot be fetched: a"
                " mistyped name, or a host without the hub.",
                "A file of the model is truncated or broken.",
                "The model is of a kind that is not served, or its code must be run.",
            ),
            (
                "`teimgr models check MODEL` loads it on trial and shows the reason.",
                "Delete and fetch it again: `teimgr models rm MODEL`, `teimgr models pull MODEL`.",
                "For its own code: `allow_remote_code` of the daemon and `trust_remote_code` of the instance.",
            ),
        ),
        Code.INFERENCE_FAILED: Advice(
            (
                "The forward pass failed on the device.",
                "The result has NaN or infinity: 16 bits are too few for the model, or its files are broken.",
            ),
            ("Set `dtype` of the instance to `float32`.", _SHOW_LOG),
        ),
        Code.INTERNAL_ERROR: Advice(
            ("A defect of teimgr.",),
            (
                "The daemon's log has the traceback, under the `x-request-id` of the reply.",
                "Report it with that part of the log and the output of `teimgr doctor`.",
            ),
        ),
        Code.MODEL_DOWNLOAD_FAILED: Advice(
            (
                "The hub did not answer, or closed the connection.",
                "The disk of the hub cache is full; the message has both sizes.",
                "A file differs from what the hub, or another host of the fleet, announced; it was thrown away.",
            ),
            (
                "Repeat `teimgr models pull MODEL`: received bytes are kept and the download continues.",
                "Check `HF_ENDPOINT`, proxies and `HF_HOME`.",
            ),
        ),
    }
)
"""Advice for every code."""
