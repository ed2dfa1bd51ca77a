"""Conversion of an Infinity server, which serves one or several models at one address, to an instance per model.

Its clients name the model in the body, as those of the daemon's REST port do, which takes the place of Infinity's.
Options are flags, given once for all models or once for each, or INFINITY_* variables with `;` between the values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from teimgr.cli.migration.compose_file import Service, whole_number
from teimgr.cli.migration.containers import (
    MISSING,
    Option,
    note_other_ports,
    note_rest,
    place_of,
    published,
    put_gpu,
    put_model,
    put_processors,
    split_options,
)
from teimgr.cli.migration.draft import ALL_ADDRESSES, MAX_INSTANCES, Draft, InstanceDraft, KeyOutcome, Place
from teimgr.errors import InvalidConfig
from teimgr.spec import UNPRIVILEGED_PORT

PROGRAM = "infinity_emb"
_IMAGES = ("michaelf34/infinity", "infinity_emb", "infinity-emb")
_DEFAULT_MODEL = "michaelfeil/bge-small-en-v1.5"
_DEFAULT_PORT = "7997"
_CACHE_OF_IMAGE = "/app/.cache/huggingface"
_PREFIX = "INFINITY_"
_SHORT = {"--model-name-or-path": "--model-id"}  # the name of its command v1


@dataclass(frozen=True, slots=True)
class _Named:
    """An option with a key of instances: what is the same by default, and why some values are left out."""

    key: str
    default: str
    left_out: Mapping[str, str] = field(default_factory=dict)


_KEYS = {
    "--revision": _Named("revision", ""),
    "--dtype": _Named("dtype", "auto", {"int8": 'dtype = "int8" is for hosts without a GPU; set it if this is one'}),
    "--pooling-method": _Named("pooling", "auto"),
}
_WITHOUT_KEY: dict[str, tuple[str, str]] = {  # the value that is the same here, and why others are not carried over
    "--engine": ("torch", "models run in PyTorch"),
    "--device": ("auto", "an instance has a GPU where the host has one, else the CPU"),
    "--embedding-dtype": ("float32", "ask for it in the request, as OpenAI's, Cohere's or SIE's clients do"),
    "--model-warmup": ("true", "a worker serves once its self-test has passed"),
    "--vector-disk-cache": ("false", "vectors are not cached"),
    "--lengths-via-tokenize": ("true", "usage counts tokens"),
    "--compile": ("", "the forward is chosen when a model is loaded, and verified"),
    "--bettertransformer": ("", "the forward is chosen when a model is loaded, and verified"),
    "--preload-only": ("false", "`teimgr models pull` downloads a model"),
    "--redirect-slash": ("/docs", "the page of the fleet is at /, the documents are at /docs"),
    "--proxy-root-path": ("", "paths are not rewritten"),
    "--log-level": ("info", "log_level of the settings is that of the daemon and its workers"),
    "--host": ("0.0.0.0", "api_host is the address of the daemon's REST port"),
}
_MODELS_OWN = ("--served-model-name", "--batch-size", "--trust-remote-code", "--device-id")
_SERVERS_OWN = ("--model-id", "--port", "--api-key", "--url-prefix", "--permissive-cors")
_BOOLEANS = (
    *("--trust-remote-code", "--model-warmup", "--vector-disk-cache", "--lengths-via-tokenize", "--compile"),
    *("--bettertransformer", "--preload-only", "--permissive-cors"),
)
_KNOWN = (*_KEYS, *_WITHOUT_KEY, *_MODELS_OWN, *_SERVERS_OWN)


def is_infinity(service: Service) -> bool:
    """True if the service runs an image or the program of Infinity."""
    named = any(name in service.image for name in _IMAGES) or any(PROGRAM in word for word in service.words[:2])
    return named or any(name.startswith(f"{_PREFIX}MODEL_ID") for name in service.environ)


def convert(service: Service, draft: Draft) -> None:
    """Add an instance for each model of one service to the draft.

    Raises:
        InvalidConfig: It has more than `MAX_INSTANCES` models.
    """
    place = place_of(service, draft)
    options = _options(service, place)
    models = options.pop("--model-id", None)
    if models is None:
        place.found("command --model-id", KeyOutcome.CARRIED, note=f"Infinity's default: {_DEFAULT_MODEL}")
    given = models or Option((_DEFAULT_MODEL,), "command --model-id")
    if len(given.values) > MAX_INSTANCES:
        raise InvalidConfig(f"{place.file}: {place.path}: more than {MAX_INSTANCES} models")
    _put_address(draft, place, service, options)
    if (api_key := options.pop("--api-key", None)) is not None and api_key.value:
        _put_key(draft, place, service, api_key)
    for number, model in enumerate(given.values):
        own = {name: _of_model(place, option, number, len(given.values)) for name, option in options.items()}
        _instance(draft, place, service, Option((model,), given.key), own, len(given.values))
    note_rest(place, service, [name for name in service.environ if name.startswith(_PREFIX)], _cache(service))
    place.found("image", KeyOutcome.NONE, note="PyTorch workers in place of the image")


def _options(service: Service, place: Place) -> dict[str, Option]:
    """All values of each option, of the command or, weaker, of the environment."""
    words = list(service.words)
    if words and words[0].rpartition("/")[2] == PROGRAM:
        words.pop(0)
    if words and words[0] in ("v1", "v2"):
        words.pop(0)
    given: dict[str, Option] = {}
    for name, value in split_options(words, _takes_value, _SHORT):
        flag, value = (f"--{name[5:]}", "false") if name.startswith("--no-") else (name, value)
        if not name:
            place.found("command", KeyOutcome.DECIDE, note="a word without a flag: left out")
            continue
        if (value is None or (not value and flag == "--api-key")) and flag not in _BOOLEANS:
            place.found(f"command {name}", KeyOutcome.DECIDE, note=MISSING)
            continue
        before = given[flag].values if flag in given else ()
        given[flag] = Option((*before, "true" if value is None else value), f"command {name}")
    options: dict[str, Option] = {}
    for variable, text in service.environ.items():
        if not variable.startswith(_PREFIX):
            continue
        flag = "--" + variable.removeprefix(_PREFIX).lower().replace("_", "-")
        key = f"environment.{variable}"
        if flag in given:
            place.found(key, KeyOutcome.NONE, note=f"the command's {flag} is stronger")
        elif flag not in _KNOWN:
            place.found(key, KeyOutcome.NONE, note="no counterpart here, or not a variable of Infinity")
        else:
            values = [text] if flag in _SERVERS_OWN and flag != "--model-id" else text.removesuffix(";").split(";")
            options[flag] = Option(tuple(values), key)
    return {**options, **given}


def _takes_value(name: str, following: Sequence[str]) -> bool:
    return name not in _BOOLEANS and not name.startswith("--no-") and bool(following)


def _of_model(place: Place, option: Option, number: int, models: int) -> Option:
    """The option of one model: its own of as many as there are models, else the one for all."""
    if len(option.values) == models:
        return Option((option.values[number],), option.key)
    if len(option.values) > 1 and number == 0:
        place.found(
            option.key, KeyOutcome.DECIDE, note=f"{len(option.values)} values for {models} models; the first is used"
        )
    return Option(option.values[:1], option.key)


def _put_address(draft: Draft, place: Place, service: Service, options: dict[str, Option]) -> None:
    """The published address becomes that of the daemon's REST port, for the first Infinity server."""
    option = options.pop("--port", Option((_DEFAULT_PORT,), "ports"))
    inside = whole_number(option.value) or int(_DEFAULT_PORT)
    port = published(service, inside)
    if port is None or port.published is None:
        note = f"no published port: between containers it was http://{service.name}:{inside}; the daemon's is api_port"
        place.found(option.key, KeyOutcome.DECIDE, note=note)
    elif port.published < UNPRIVILEGED_PORT or draft.api_port not in (None, port.published):
        reason = "the REST port is that of another server" if draft.api_port else f"ports begin at {UNPRIVILEGED_PORT}"
        place.found("ports", KeyOutcome.DECIDE, "api_port", f"{reason}: clients of {port.published} must use api_port")
    else:
        draft.publish_api_port(port.published)
        note = "the REST port; clients of /classify and /models add /infinity to their base URL, all others may"
        place.found("ports", KeyOutcome.CARRIED, f"api_port = {port.published}", note)
        draft.hosts["api_host"].add(port.host or ALL_ADDRESSES)
    note_other_ports(place, service, [port])
    if (prefix := options.pop("--url-prefix", None)) is not None and prefix.value.strip("/"):
        place.found(prefix.key, KeyOutcome.DECIDE, note="clients replace this prefix in their base URL by /infinity")
    if (cors := options.pop("--permissive-cors", None)) is not None:
        draft.put(place, "allowed_origins", ["*"] if cors.value == "true" else [], cors.key, [])


def _put_key(draft: Draft, place: Place, service: Service, option: Option) -> None:
    """The server's key becomes one of the daemon's, of which the output has the digest alone."""
    auth = draft.settings.setdefault("auth", {"enabled": True, "providers": ["api_keys"], "api_keys": []})
    digest = hashlib.sha256(option.value.encode()).hexdigest()
    auth["api_keys"].append({"name": service.name, "key_sha256": digest, "rights": ["inference", "read"]})
    place.found(option.key, KeyOutcome.CARRIED, "auth.api_keys", "by its SHA-256: the key itself is not in the output")
    note = "the REST and gRPC ports now ask for a key: `teimgr key new operator --rights admin read` makes yours"
    place.found(option.key, KeyOutcome.DECIDE, "auth.api_keys", note)


def _instance(
    draft: Draft, place: Place, service: Service, model: Option, options: dict[str, Option], models: int
) -> None:
    served = options.pop("--served-model-name", Option(("",), "")).value or "/".join(model.value.split("/")[-2:])
    wanted = service.name if models == 1 else f"{service.name}-{served.rpartition('/')[2]}"
    instance = draft.instance(wanted, place, "name")
    put_model(instance, service, model.value, model.key)
    if served not in (instance.name, instance.keys.get("model_id")):
        _put_alias(draft, place, served, instance)
    if models == 1:
        note = "Infinity with one model ignores `model` in requests; here it is " + " or ".join(
            dict.fromkeys((served, instance.name))
        )
        place.found("command --served-model-name", KeyOutcome.NONE, note=note)
    for name, option in options.items():
        _put_option(instance, name, option)
    device = options.get("--device", Option(("",), "")).value
    if "--dtype" not in options and (device == "cpu" or "cpu" in service.tag):
        note = "Infinity's type on CPUs; without it `auto` may be a faster 16-bit type, cosine 0.9995 or more"
        instance.put("dtype", "float32", "image (no --dtype)", note)
    if "--trust-remote-code" not in options:
        note = "Infinity's default is true; a model with its own code needs trust_remote_code and allow_remote_code"
        place.found("command --trust-remote-code", KeyOutcome.NONE, note=note)
    if "--device-id" not in options or not options["--device-id"].value:
        put_gpu(instance, service)
    put_processors(instance, service, models)


def _put_alias(draft: Draft, place: Place, served: str, instance: InstanceDraft) -> None:
    aliases = draft.settings.setdefault("aliases", {})
    if aliases.setdefault(served, instance.name) == instance.name:
        place.found("command --served-model-name", KeyOutcome.CARRIED, f"aliases.{served} = {instance.name}")
    else:
        note = f"the alias {served} is {aliases[served]}: clients have to name {instance.name}"
        place.found("command --served-model-name", KeyOutcome.DECIDE, note=note)


def _put_option(instance: InstanceDraft, name: str, option: Option) -> None:
    place, value = instance.place, option.value
    if name in _KEYS:
        named = _KEYS[name]
        if value == named.default:
            place.found(option.key, KeyOutcome.SAME, named.key)
        elif value in named.left_out:
            place.found(option.key, KeyOutcome.DECIDE, named.key, f"left out: {named.left_out[value]}")
        else:
            instance.put(named.key, value, option.key)
    elif name == "--batch-size":
        if whole_number(value):
            instance.add_flag("--max-batch-requests", value, option.key, "beside max_batch_tokens")
        else:
            place.found(option.key, KeyOutcome.DECIDE, note="left out: not a positive number")
    elif name == "--trust-remote-code":
        instance.put("trust_remote_code", value.lower() in ("true", "1"), option.key)
        if value.lower() in ("true", "1"):
            note = "set allow_remote_code = true as well, to run the model's own code outside of a container"
            place.found(option.key, KeyOutcome.DECIDE, "allow_remote_code", note)
    elif name == "--device-id":
        _put_devices(instance, option)
    elif name in _WITHOUT_KEY:
        same, why = _WITHOUT_KEY[name]
        place.found(option.key, KeyOutcome.SAME if value == same else KeyOutcome.NONE, note=why)
    else:
        place.found(option.key, KeyOutcome.DECIDE, note="not a flag of Infinity's v2: left out")


def _put_devices(instance: InstanceDraft, option: Option) -> None:
    """`0` is a GPU; `0,1` is a replica on each of two."""
    devices = [each for each in option.value.split(",") if each.strip()]
    if len(devices) == 1 and (gpu := whole_number(devices[0])) is not None:
        instance.put("gpu_id", gpu, option.key)
    elif devices:
        note = 'placed on the GPUs with most free memory; "per-gpu" is one on each'
        instance.put("replicas", len(devices), option.key, note)


def _cache(service: Service) -> str:
    """The container's directory of downloaded models."""
    home = service.environ.get("HF_HOME", _CACHE_OF_IMAGE)
    return service.environ.get("HF_HUB_CACHE", f"{home}/hub")
