"""Form fields of an instance's settings, made from the declaration of its keys (`spec.InstanceSpec`).

The page sends what a form holds to the REST routes, which validate it: a field here only describes how a value is
entered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from teimgr.config.instance_keys import shown_args
from teimgr.spec import KEYS, InstanceKey, InstanceSpec

Widget = Literal["text", "number", "auto", "count", "choice", "switch", "lines", "pairs"]
"""auto: a number or "auto"; count: a number or one of `words`; lines: a list of texts; pairs: a table of texts."""

ESSENTIAL = ("model_id", "name")
"""The keys that a new instance needs."""

_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model": (*ESSENTIAL, "revision", "kind", "pooling", "dtype"),
    "Where it runs": ("gpu_id", "replicas", "threads", "port", "prometheus_port"),
    "Trust": ("trust_remote_code", "code_revision", "safetensors_only"),
    "Limits": (
        *("max_batch_tokens", "max_concurrent_requests", "max_waiting", "max_queue_wait_secs", "startup_timeout_secs"),
        *("max_queued_tokens", "cache_bytes", "max_rss_mib"),
    ),
}
_REST = "Labels and flags"
_HINTS = get_type_hints(InstanceSpec)
_DEFAULTS = {
    item.name: item.default if item.default_factory is MISSING else item.default_factory()
    for item in fields(InstanceSpec)
}


class FormField(NamedTuple):
    """One field: `value` is what the input holds at first, `placeholder` what an empty one means."""

    name: str
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


def groups(chosen: Callable[[str], bool], spec: InstanceSpec | None = None) -> list[FieldGroup]:
    """The fields of the keys that REST takes and `chosen` accepts, with the values of `spec`."""
    names = [name for name, key in KEYS.items() if key.in_rest and chosen(name)]
    grouped = {name for members in _GROUPS.values() for name in members}
    rest = tuple(name for name in names if name not in grouped)
    found = (
        FieldGroup(title, [_field(name, spec) for name in members if name in names])
        for title, members in (*_GROUPS.items(), (_REST, rest))
    )
    return [group for group in found if group.fields]


def _field(name: str, spec: InstanceSpec | None) -> FormField:
    key, default = KEYS[name], _DEFAULTS[name]
    widget = _widget(name, key)
    value = getattr(spec, name) if spec is not None else None
    if name == "extra_args" and value:
        value = shown_args(value)
    words = key.words or tuple(_words_in(_HINTS[name]))
    placeholder = "" if default is MISSING else _text(default, key)
    return FormField(
        name, widget, key.meaning, _text(value, key), placeholder, words, key.low, key.high, default is MISSING
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
