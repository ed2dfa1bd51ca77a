"""Conversion of a container of Text Embeddings Inference, its flags and variables, to an instance.

`config/instance_keys.py` declares what each flag is here; the variable of a flag is its name in upper case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
from teimgr.cli.migration.draft import ALL_ADDRESSES, Draft, InstanceDraft, KeyOutcome, Place
from teimgr.config.instance_keys import API_KEY_FLAG, FLAGS, REFUSED
from teimgr.spec import KEYS, WorkerSpec

PROGRAM = "text-embeddings-router"
_PORT_OF_IMAGE = 80
_PROMETHEUS_PORT = 9000
_CACHE_OF_IMAGE = "/data"
_CACHE_FLAG = "--huggingface-hub-cache"
_OF_TEIMGR = ("--kind",)  # in FLAGS, but not TEI's
_SHORT = {"-p": "--port", "-r": "--revision"}
# Variables that are not flags of TEI's router.
_OTHER_VARIABLES = {
    "LOG_LEVEL": "log_level of the settings is that of the daemon and its workers",
    "RUST_LOG": "log_level of the settings is that of the daemon and its workers",
    "TASK": "the task is that of the model's files; the key kind overrides it",
    "USE_FLASH_ATTENTION": "the attention of a model is chosen when it is loaded, and verified",
    "HF_HOME": "HF_HOME or HF_HUB_CACHE of the daemon's environment is where its models are",
    "MKL_ENABLE_INSTRUCTIONS": "not used by PyTorch here",
    "GRPC_MAX_PARALLEL_STREAM_REQUESTS": "grpc_max_parallel_streams of the settings is that of the daemon",
}
_DEFAULT_PROMPTS = frozenset(("--default-prompt", "--default-prompt-name"))
_ONE_PROMPT = "left out: TEI refuses --default-prompt beside --default-prompt-name"
_UNKNOWN = "not a flag of TEI 1.9: left out"
_KEY_NOTE = "only the file's owner can read it; it guards the instance's own port, not the daemon's ports"
_CPU_NOTE = "TEI's type on CPUs; without it `auto` may be a faster 16-bit type, cosine 0.9995 or more"
_GPU_NOTE = "TEI's is float16; `auto` is a 16-bit type, or float32 where the cosine would be below 0.9995"


def is_tei(service: Service) -> bool:
    """True if the service runs an image or the program of TEI."""
    return "text-embeddings-inference" in service.image or any(PROGRAM in word for word in service.words[:2])


def convert(service: Service, draft: Draft) -> None:
    """Add the instance of one service to the draft."""
    place = place_of(service, draft)
    options = _options(service, place)
    model = options.pop("--model-id", None)
    if model is None or not model.value:
        place.found("command --model-id", KeyOutcome.DECIDE, note="no model is named: the service was left out")
        return
    instance = draft.instance(service.name, place, "name")
    put_model(instance, service, model.value, model.key)
    _put_ports(instance, service, options)
    put_gpu(instance, service)
    put_processors(instance, service)
    cache = options.pop(_CACHE_FLAG, Option((_CACHE_OF_IMAGE,), "")).value
    otlp = options.pop("--otlp-endpoint", None)
    if otlp is not None:
        _put_otlp(draft, place, otlp)
    put_flags(instance, options)
    note_rest(place, service, [*map(variable_of, (*FLAGS, *REFUSED)), *_OTHER_VARIABLES], cache)
    for name, note in _OTHER_VARIABLES.items():
        if name in service.environ:
            place.found(f"environment.{name}", KeyOutcome.NONE, note=note)
    if "--dtype" not in options:
        _put_dtype(instance, service)
    if service.image:
        note = "PyTorch workers in place of the image; instances are placed on GPUs where the host has them"
        place.found("image", KeyOutcome.NONE, note=note)


def variable_of(flag: str) -> str:
    """The environment variable of a flag: MAX_BATCH_TOKENS of `--max-batch-tokens`."""
    return flag.lstrip("-").replace("-", "_").upper()


def put_flags(instance: InstanceDraft, options: Mapping[str, Option]) -> None:
    """Give an instance the flags of TEI: a key where there is one, `extra_args` otherwise; each has a finding."""
    place = instance.place
    conflict = _DEFAULT_PROMPTS if options.keys() >= _DEFAULT_PROMPTS else frozenset[str]()
    for name, option in options.items():
        if name in conflict:
            place.found(option.key, KeyOutcome.DECIDE, note=_ONE_PROMPT)
            continue
        if name in REFUSED:
            if name == "--dense-path":  # it may name another Dense than modules.json does, of another width
                place.found(option.key, KeyOutcome.DECIDE, note=REFUSED[name])
            elif name not in ("--hf-token", "--hf-api-token"):
                place.found(option.key, KeyOutcome.NONE, note=REFUSED[name])
            else:
                place.draft.environment["HF_TOKEN"] = ""
                place.found(option.key, KeyOutcome.CARRIED, "HF_TOKEN in the daemon's environment", REFUSED[name])
            continue
        if name not in FLAGS:
            place.found(option.key, KeyOutcome.DECIDE, note=_UNKNOWN)
            continue
        flag = FLAGS[name]
        try:
            value = flag.read(option.value)
        except ValueError as error:
            place.found(option.key, KeyOutcome.DECIDE, note=f"left out: its value {error}")
            continue
        if flag.field is None:
            place.found(option.key, KeyOutcome.NONE, note=flag.why)
        elif flag.field in KEYS:
            instance.put(flag.field, value, option.key)
            if flag.field == "trust_remote_code" and value:
                note = "set allow_remote_code = true as well, to run the model's own code outside of a container"
                place.found(option.key, KeyOutcome.DECIDE, "allow_remote_code", note)
        elif value == _worker_default(flag.field):
            place.found(option.key, KeyOutcome.SAME, f"{name} {option.value}")
        else:
            for each in option.values if flag.repeats else option.values[-1:]:
                instance.add_flag(name, each, option.key, _KEY_NOTE if name == API_KEY_FLAG else "")


def options_of(words: Iterable[str], place: Place, key: str) -> dict[str, Option]:
    """Flags of TEI by name; `key` of the file has the words. Words without a flag have a finding."""
    options: dict[str, Option] = {}
    for name, value in split_options(words, _takes_value, _SHORT):
        if not name:
            place.found(key, KeyOutcome.DECIDE, note="a word without a flag: left out")
        elif (value is None or (not value and name == API_KEY_FLAG)) and name in FLAGS and FLAGS[name].has_value(()):
            place.found(f"{key} {name}", KeyOutcome.DECIDE, note=MISSING)
        else:
            before = options[name].values if name in options else ()
            options[name] = Option((*before, "true" if value is None else value), f"{key} {name}")
    return options


def _takes_value(name: str, following: list[str]) -> bool:
    if name in FLAGS:
        return FLAGS[name].has_value(following)
    return name in REFUSED or bool(following and not following[0].startswith("-"))


def _options(service: Service, place: Place) -> dict[str, Option]:
    """Flags of the command and, weaker, of the environment."""
    words = list(service.words)
    if words and words[0].rpartition("/")[2] == PROGRAM:
        words.pop(0)
    elif words and service.table.get("entrypoint"):
        place.found(
            "entrypoint", KeyOutcome.DECIDE, note=f"not {PROGRAM}: what it does with the command is not known here"
        )
    given = options_of(words, place, "command")
    options: dict[str, Option] = {}
    for flag in (*FLAGS, *REFUSED):
        variable = variable_of(flag)
        if flag in _OF_TEIMGR or variable not in service.environ or flag in _SHORT:
            continue
        option = Option((service.environ[variable],), f"environment.{variable}")
        if flag in given:
            place.found(option.key, KeyOutcome.NONE, note=f"the command's {flag} is stronger")
        elif not option.value and flag == API_KEY_FLAG:
            place.found(option.key, KeyOutcome.DECIDE, note=MISSING)
        else:
            options[flag] = option
    return {**options, **given}


def _put_ports(instance: InstanceDraft, service: Service, options: dict[str, Option]) -> None:
    place = instance.place
    given = options.pop("--port", None)
    inside = (whole_number(given.value) if given else None) or _PORT_OF_IMAGE
    if given:
        place.found(given.key, KeyOutcome.NONE, note="a port of the container; the instance has the published one")
    own = published(service, inside)
    metrics = (
        published(service, _metrics_port(options)) if "-grpc" in service.tag or "--prometheus-port" in options else None
    )
    if own is None or own.published is None:
        note = (
            f"no published port: between containers it was http://{service.name}:{inside}; `teimgr ps` shows the port"
        )
        place.found("ports", KeyOutcome.DECIDE, note=note)
    else:
        place.draft.put_port(instance, own.published, "ports")
        place.draft.hosts["instance_host"].add(own.host or ALL_ADDRESSES)
    if metrics is not None and metrics is not own and metrics.published:
        options.pop("--prometheus-port", None)
        instance.put("prometheus_port", metrics.published, "ports", "te_* metrics")
    note_other_ports(place, service, [own, metrics])


def _put_dtype(instance: InstanceDraft, service: Service) -> None:
    """Keep the type of the vectors that clients have stored: TEI's default is float32 on CPUs, else float16."""
    if service.tag.startswith("cpu"):
        instance.put("dtype", "float32", "image (no --dtype)", _CPU_NOTE)
    else:
        instance.put("dtype", "auto", "image (no --dtype)", _GPU_NOTE)


def _metrics_port(options: Mapping[str, Option]) -> int:
    given = options.get("--prometheus-port")
    return (whole_number(given.value) if given else None) or _PROMETHEUS_PORT


def _put_otlp(draft: Draft, place: Place, option: Option) -> None:
    """The first endpoint becomes that of the daemon, whose workers have no other."""
    current = draft.settings.setdefault("otel", {}).setdefault("endpoint", option.value)
    if current == option.value:
        place.found(option.key, KeyOutcome.CARRIED, "otel.endpoint", "that of the daemon and all its workers")
    else:
        place.found(option.key, KeyOutcome.DECIDE, "otel.endpoint", "the daemon has one, which is another service's")


def _worker_default(field: str) -> object:
    return WorkerSpec.__dataclass_fields__[field].default
