"""Conversion of Ollama's list of models: the output of `ollama list`, or the JSON of `/api/tags`.

Ollama's files are GGUF, often quantised. The instances load the original weights, so the vectors differ. Only the JSON
has the quantisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from teimgr.cli.migration.draft import Draft, InstanceDraft, KeyOutcome, Place
from teimgr.cli.migration.interpolation import read_text
from teimgr.errors import InvalidConfig

MAX_FILE_BYTES = 1024 * 1024
MAX_MODELS = 1000
_HEADER = ("NAME", "ID", "SIZE")
_LATEST = "latest"
_KEEP_ALIVE_S = 300
_PREFIXES = ("registry.ollama.ai/", "library/")
# Ids on the hub, by the name in Ollama's library and the first part of the tag; "": every other tag.
_QWEN, _ARCTIC, _GRANITE = (
    "Qwen/Qwen3-Embedding-",
    "Snowflake/snowflake-arctic-embed-",
    "ibm-granite/granite-embedding-",
)
_HUB_IDS: Mapping[str, Mapping[str, str]] = {
    "nomic-embed-text": {"v1": "nomic-ai/nomic-embed-text-v1", "": "nomic-ai/nomic-embed-text-v1.5"},
    "nomic-embed-text-v2-moe": {"": "nomic-ai/nomic-embed-text-v2-moe"},
    "mxbai-embed-large": {"": "mixedbread-ai/mxbai-embed-large-v1"},
    "all-minilm": {
        **dict.fromkeys(("33m", "l12"), "sentence-transformers/all-MiniLM-L12-v2"),
        "": "sentence-transformers/all-MiniLM-L6-v2",
    },
    "bge-m3": {"": "BAAI/bge-m3"},
    "bge-large": {"": "BAAI/bge-large-en-v1.5"},
    "paraphrase-multilingual": {"": "sentence-transformers/paraphrase-multilingual-mpnet-base-v2"},
    "snowflake-arctic-embed": {
        **{"22m": f"{_ARCTIC}xs", "xs": f"{_ARCTIC}xs", "33m": f"{_ARCTIC}s", "s": f"{_ARCTIC}s"},
        **{"110m": f"{_ARCTIC}m", "m": f"{_ARCTIC}m", "137m": f"{_ARCTIC}m-long"},
        **{"335m": f"{_ARCTIC}l", "l": f"{_ARCTIC}l", _LATEST: f"{_ARCTIC}l"},
    },
    "snowflake-arctic-embed2": {"": f"{_ARCTIC}l-v2.0"},
    "qwen3-embedding": {
        **{"0.6b": f"{_QWEN}0.6B", "4b": f"{_QWEN}4B", "8b": f"{_QWEN}8B", _LATEST: f"{_QWEN}8B"},
    },
    "embeddinggemma": {"": "google/embeddinggemma-300m"},
    "granite-embedding": {
        **{"30m": f"{_GRANITE}30m-english", _LATEST: f"{_GRANITE}30m-english"},
        "278m": f"{_GRANITE}278m-multilingual",
    },
}
# Ollama's names of weights that are not quantised; their vectors differ by rounding.
_WHOLE = ("F32", "F16", "BF16")
# Parts of an architecture or a name by which a model embeds, even if its id on the hub is not known here.
_EMBEDS = ("bert", "embed", "minilm", "bge", "gte", "e5-")


class _Listed(NamedTuple):
    """A line of the list; `quantisation` and `family` are empty where the list does not have them."""

    name: str
    quantisation: str = ""
    family: str = ""


def is_list(path: Path) -> bool:
    """True if a file is Ollama's: a JSON object, or a table with the head of `ollama list`."""
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except InvalidConfig:
        return False  # the reader of the other kind of file reports it
    return _is_json(text) or tuple(text.partition("\n")[0].split()[:3]) == _HEADER


def _is_json(text: str) -> bool:
    return text.lstrip().startswith("{")


def convert(path: Path, draft: Draft) -> None:
    """Add an instance for each embedder of the list whose id on the hub is known, and an alias for each tag of it.

    Raises:
        InvalidConfig: the file cannot be read, or is not a list of models.
    """
    text = read_text(path, MAX_FILE_BYTES)
    found = list(_of_json(path, text) if _is_json(text) else _of_table(text))
    if len(found) > MAX_MODELS:
        raise InvalidConfig(f"{path}: more than {MAX_MODELS} models")
    made: dict[str, InstanceDraft] = {}
    for listed in found:
        _model(draft, draft.place(str(path), listed.name), listed, made)


def _of_table(text: str) -> Iterator[_Listed]:
    for line in text.splitlines()[1:]:
        if words := line.split():
            yield _Listed(words[0])


def _of_json(path: Path, text: str) -> Iterator[_Listed]:
    try:
        table = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidConfig(f"{path}: not JSON: {error}") from error
    models = table.get("models") if isinstance(table, dict) else None
    if not isinstance(models, list) or not all(isinstance(each, dict) for each in models):
        raise InvalidConfig(f"{path}: not the JSON of /api/tags: `models` must be a list of objects")
    for each in models:
        name = each.get("model") or each.get("name")
        details = each.get("details")
        details = details if isinstance(details, dict) else {}
        if isinstance(name, str):
            yield _Listed(name, _text(details.get("quantization_level")), _text(details.get("family")))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _model(draft: Draft, place: Place, listed: _Listed, made: dict[str, InstanceDraft]) -> None:
    bare = listed.name
    for prefix in _PREFIXES:
        bare = bare.removeprefix(prefix)
    base, _, tag = bare.partition(":")
    tag = tag or _LATEST
    hub_id = _hub_id(base, tag)
    if hub_id is None:
        _unknown(place, listed)
        return
    instance = made.get(hub_id)
    if instance is None:
        instance = made[hub_id] = draft.instance(base if tag == _LATEST else f"{base}-{tag}", place, "name")
        instance.put("model_id", hub_id, "model", "the weights that Ollama's file was made from")
        instance.put("load", "on_demand", "keep_alive", "as Ollama does; without it the daemon loads it at its start")
        instance.put("idle_timeout_secs", _KEEP_ALIVE_S, "keep_alive", "Ollama's default")
    if instance.name != base or tag != _LATEST:
        draft.settings.setdefault("aliases", {})[bare.removesuffix(f":{_LATEST}")] = instance.name
        place.found("tag", KeyOutcome.CARRIED, f"aliases.{bare} = {instance.name}")
    _vectors(place, listed)


def _hub_id(base: str, tag: str) -> str | None:
    tags = _HUB_IDS.get(base.lower())
    if tags is None:
        return None
    lowered = tag.lower()
    return tags.get(lowered) or tags.get(lowered.partition("-")[0]) or tags.get("")


def _vectors(place: Place, listed: _Listed) -> None:
    """Whether vectors that Ollama made can stay beside new ones."""
    level = listed.quantisation.upper()
    if level in _WHOLE:
        note = "vectors agree with Ollama's up to rounding: compare some before mixing them"
        place.found("quantization_level", KeyOutcome.CARRIED, 'dtype = "auto"', f"{level}: {note}")
    elif level:
        note = f"{level}: Ollama's vectors are those of quantised weights and differ: embed again what is stored"
        place.found("quantization_level", KeyOutcome.DECIDE, 'dtype = "auto"', note)
    else:
        note = "not in this list: save /api/tags as JSON; vectors of quantised weights differ and must not be mixed"
        place.found("quantization_level", KeyOutcome.DECIDE, 'dtype = "auto"', note)


def _unknown(place: Place, listed: _Listed) -> None:
    text = f"{listed.name} {listed.family}".lower()
    if any(word in text for word in _EMBEDS):
        note = "its id on the hub is not known here: add an instance with the model that the GGUF file was made from"
        place.found("name", KeyOutcome.DECIDE, note=note)
    else:
        place.found("name", KeyOutcome.NONE, note="not known as an embedder: it stays with Ollama")
