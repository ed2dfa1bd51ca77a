"""Form fields of an instance's settings, made from the declaration of its keys (`spec.InstanceSpec`).

A field describes only how a value is entered; the REST routes validate it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from teimgr.config.instance_keys import shown_args
from teimgr.spec import KEYS, InstanceKey, InstanceSpec

Widget = Literal["text", "number", "auto", "count", "choice", "switch", "lines", "pairs"]
"""auto: a number or "auto"; count: a number or one of `words`; lines: a list of strings; pairs: a table of strings."""

ESSENTIAL = ("model_id", "name")
"""The required keys of a new instance."""

POPULAR = (
    ("sentence-transformers/all-MiniLM-L6-v2", "small and fast, English"),
    ("BAAI/bge-small-en-v1.5", "small, English"),
    ("intfloat/multilingual-e5-small", "small, 100 languages"),
    ("BAAI/bge-m3", "100 languages, long texts"),
    ("Qwen/Qwen3-Embedding-0.6B", "100 languages, very long texts"),
    ("BAAI/bge-reranker-v2-m3", "reranker, 100 languages"),
    ("cross-encoder/ms-marco-MiniLM-L6-v2", "reranker, small, English"),
)
"""Suggested models; docs/how-to/choose-a-model.md has their figures."""

_GROUPS: Mapping[str, Mapping[str, str]] = {
    "Model": {
        "model_id": "Model",
        "name": "Name",
        "revision": "Revision",
        "kind": "Kind",
        "pooling": "Pooling",
        "dtype": "Precision",
    },
    "Where it runs": {
        "replicas": "Replicas",
        "gpu_id": "GPU",
        "placement": "Spread or pack",
        "node": "Host",
        "labels": "Labels of its hosts",
        "threads": "CPU threads of a worker",
        "port": "Port",
        "prometheus_port": "Port of its metrics",
    },
    "When it is loaded": {
        "load": "Load",
        "idle_timeout_secs": "Unload after idle time (s)",
        "pinned": "Never unload",
        "startup_timeout_secs": "Start timeout (s)",
    },
    "Replicas by load": {
        "min_replicas": "Minimum replicas",
        "max_replicas": "Maximum replicas",
        "scale_up_wait_ms": "Scale up above a wait of (ms)",
        "scale_down_wait_ms": "Scale down below a wait of (ms)",
        "scale_down_delay_secs": "Delay before scaling down (s)",
    },
    "Limits": {
        "max_batch_tokens": "Tokens per batch",
        "max_concurrent_requests": "Concurrent calls",
        "max_waiting": "Waiting calls",
        "max_queue_wait_secs": "Maximum wait (s)",
        "max_queued_tokens": "Waiting tokens",
        "cache_bytes": "Result cache (bytes)",
        "max_rss_mib": "Memory limit of a worker (MiB)",
    },
    "Trust": {
        "trust_remote_code": "Run the model's own code",
        "code_revision": "Revision of that code",
        "safetensors_only": "Refuse pickled weights",
    },
    "Requests": {"token_inputs": "Token ids", "token_encoding": "Encoding of token ids"},
    "Tags and flags": {"tags": "Tags", "extra_args": "Flags of TEI"},
}
_OF_CLUSTERS = ("node", "labels")
_HINTS = get_type_hints(InstanceSpec)
_DEFAULTS = {
    item.name: item.default if item.default_factory is MISSING else item.default_factory()
    for item in fields(InstanceSpec)
}


class FormField(NamedTuple):
    """One field: `value` is the initial value, `placeholder` the meaning of an empty input."""

    name: str
    label: str
    widget: Widget
    meaning: str
    value: str
    placeholder: str
    words: tuple[str, ...]
    low: float | None
    high: float | None
    required: bool


class FieldGroup(NamedTuple):
    """Fields under one heading."""

    title: str
    fields: list[FormField]


def groups(
    chosen: Callable[[str], bool], spec: InstanceSpec | None = None, *, is_cluster: bool = False
) -> list[FieldGroup]:
    """The fields of the keys that REST takes and `chosen` accepts, with the values of `spec`."""

    def is_shown(name: str) -> bool:
        return KEYS[name].in_rest and chosen(name) and (is_cluster or name not in _OF_CLUSTERS)

    found = (
        FieldGroup(title, [_field(name, label, spec) for name, label in members.items() if is_shown(name)])
        for title, members in _GROUPS.items()
    )
    return [group for group in found if group.fields]


def _field(name: str, label: str, spec: InstanceSpec | None) -> FormField:
    key, default = KEYS[name], _DEFAULTS[name]
    widget = _widget(name, key)
    value = getattr(spec, name) if spec is not None else None
    if name == "extra_args" and value:
        value = shown_args(value)
    words = key.words or tuple(_words_in(_HINTS[name]))
    placeholder = "" if default is MISSING else _text(default, key)
    return FormField(
        name, label, widget, key.meaning, _text(value, key), placeholder, words, key.low, key.high, default is MISSING
    )


def _widget(name: str, key: InstanceKey) -> Widget:
    hint = _HINTS[name]
    kinds = {get_origin(kind) or kind for kind in (get_args(hint) if get_origin(hint) is not tuple else ()) or (hint,)}
    if key.words:
        return "choice"
    if key.auto:
        return "auto"
    if get_origin(hint) is tuple:
        return "lines"
    if get_origin(hint) is Mapping:
        return "pairs"
    if bool in kinds:
        return "switch"
    if int in kinds:
        return "count" if Literal in kinds else "number"
    return "text"


def _words_in(hint: Any) -> Iterator[str]:
    for kind in get_args(hint):
        if get_origin(kind) is Literal:
            yield from get_args(kind)


def _text(value: Any, key: InstanceKey) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if key.auto and value == 0:
        return "auto"
    if isinstance(value, Mapping):
        return "\n".join(f"{name}={text}" for name, text in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\n".join(map(str, value))
    return str(value)
