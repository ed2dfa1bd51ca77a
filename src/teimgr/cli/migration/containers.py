"""What services of TEI and Infinity have in common: options, ports, GPUs, model directories, and docker's own keys.

Also containers of Kubernetes manifests as such services.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teimgr.cli.migration.compose_file import PlainValues, PublishedPort, Service, service_of, whole_number
from teimgr.cli.migration.draft import Draft, InstanceDraft, KeyOutcome, Place
from teimgr.models.source import is_hub_id

NOT_FOLLOWED = "not followed: import the output of `docker compose config`, which has all of it"
"""The note about a key that names another file."""

# Keys of a service that are read elsewhere.
_READ = ("image", "command", "entrypoint", "environment", "env_file", "ports", "volumes", "deploy", "gpus", "runtime")
_DOCKER: dict[str, tuple[KeyOutcome, str]] = {
    "restart": (KeyOutcome.SAME, "a worker that dies is started again; the daemon itself is systemd's or docker's"),
    "healthcheck": (KeyOutcome.SAME, "workers are probed and verify their vectors; /health and /ready of the daemon"),
    "container_name": (KeyOutcome.NONE, "there is no container"),
    "network_mode": (KeyOutcome.SAME, "instances listen on the host's network"),
    "networks": (KeyOutcome.NONE, "there is no container"),
    "expose": (KeyOutcome.NONE, "there is no container"),
    "hostname": (KeyOutcome.NONE, "there is no container"),
    "shm_size": (KeyOutcome.NONE, "workers use no shared memory"),
    "ipc": (KeyOutcome.NONE, "workers use no shared memory"),
    "pull_policy": (KeyOutcome.NONE, "there is no image"),
    "platform": (KeyOutcome.NONE, "there is no image"),
    "build": (KeyOutcome.NONE, "there is no image"),
    "depends_on": (KeyOutcome.NONE, "instances start in parallel; /ready answers when all of them serve"),
    "stop_grace_period": (KeyOutcome.NONE, "graceful_shutdown_timeout_secs is the daemon's"),
    "logging": (KeyOutcome.NONE, "log_max_bytes and log_keep of the settings bound the files of logs"),
    "mem_limit": (KeyOutcome.NONE, "a worker of PyTorch needs other amounts; max_rss_mib replaces one above a limit"),
    "labels": (KeyOutcome.NONE, "tags of an instance are for people and filters"),
    "extends": (KeyOutcome.DECIDE, NOT_FOLLOWED),
    "profiles": (KeyOutcome.NONE, "every instance is started; `teimgr stop` stops one for good"),
}
# Variables of a container that are the daemon's environment here; True: the value is a secret.
_DAEMON_VARIABLES: dict[str, bool] = {
    "HF_TOKEN": True,
    "HF_API_TOKEN": True,
    "HUGGING_FACE_HUB_TOKEN": True,
    **dict.fromkeys(("HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), False),
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"), True),
}
_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Option:
    """The value of a flag, and the key of the file that has it: `command --pooling`, `environment.POOLING`.

    `values` are all of a flag that was given several times, the last of which is `value`.
    """

    values: tuple[str, ...]
    key: str

    @property
    def value(self) -> str:
        return self.values[-1]


def split_options(words: Iterable[str], takes_value: Any, short: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Flags and their values, `--flag value` and `--flag=value`; None for a flag without one, "" for a stray word.

    `takes_value(flag, following words)` decides whether the next word belongs to the flag. Another flag never does: its
    value was a variable that is not set.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            yield "", word
            continue
        name, equals, value = word.partition("=")
        name = short.get(name, name)
        if equals:
            yield name, value
        elif takes_value(name, rest) and rest and not rest[0].startswith("--"):
            yield name, rest.pop(0)
        else:
            yield name, None


MISSING = "left out: its value is missing, as of a variable that is not set"


def place_of(service: Service, draft: Draft) -> Place:
    """Where findings about a service are."""
    return Place(draft, str(service.file), f"{service.section}.{service.name}", service.names)


def put_model(instance: InstanceDraft, service: Service, model: str, key: str) -> None:
    """Give an instance its model: a hub id as it is, a directory of the container as that of the host."""
    path = service.on_host(model) if model.startswith("/") else None
    if path is not None:
        instance.put("model_id", path, key, "the directory of the host that is mounted there")
        return
    instance.put("model_id", model, key)
    if not is_hub_id(model):
        note = "a directory in the container that no directory of the host is mounted to: copy it out, and name it here"
        instance.place.found(key, KeyOutcome.DECIDE, f"model_id of {instance.name}", note)


def published(service: Service, port: int) -> PublishedPort | None:
    """The first port of the host that leads to `port` of the container; the same on the host's own network."""
    if service.table.get("network_mode") == "host":
        return PublishedPort(port, port)
    return next((each for each in service.ports if each.target == port and each.published is not None), None)


def note_other_ports(place: Place, service: Service, used: Iterable[PublishedPort | None]) -> None:
    """Findings for published ports that lead to nothing here."""
    for each in service.ports:
        if each not in used:
            text = f"{each.published or 'a free port'} to {each.target}"
            place.found("ports", KeyOutcome.DECIDE, note=f"{text}: teimgr has nothing that listens there")


def put_gpu(instance: InstanceDraft, service: Service) -> None:
    """Give an instance the GPU that the container had, by its index on the host."""
    place, environ = instance.place, service.environ
    devices, reserved = _devices(service)
    given = [reserved] if reserved else []
    given += [f"environment.{name}" for name in _GPU_VARIABLES if name in environ]
    visible = environ.get("NVIDIA_VISIBLE_DEVICES", "")
    if devices is None and visible not in ("", "all", "void", "none"):
        devices = visible.split(",")
    chosen = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if devices and (index := whole_number(chosen)) is not None:  # counts among those that the container has
        devices = devices[index : index + 1] or devices
    elif chosen:
        devices = [chosen]
    if not given:
        return
    key = ", ".join(given)
    if devices is None:
        place.found(key, KeyOutcome.SAME, note="without gpu_id an instance has the GPU with most free memory")
    elif (gpu := whole_number(devices[0])) is None:
        note = "gpu_id is an index: `teimgr gpus` shows which GPU has this id; without it the most free one is taken"
        place.found(key, KeyOutcome.DECIDE, note=note)
    else:
        others = 'the server used the first of several; replicas = "per-gpu" uses all' if len(devices) > 1 else ""
        instance.put("gpu_id", gpu, key, others)


def _devices(service: Service) -> tuple[list[str] | None, str]:
    """Ids of the reserved GPUs, None if any will do; the key that reserves them, empty where none does."""
    deploy = as_table(as_table(service.table.get("deploy")).get("resources"))
    reserved = as_table(deploy.get("reservations")).get("devices")
    gpus = service.table.get("gpus")
    for key, entries in (("deploy.resources.reservations.devices", reserved), ("gpus", gpus)):
        if isinstance(entries, str):
            return None, key
        for entry in entries if isinstance(entries, list) else []:
            words = {str(word) for word in as_table(entry).get("capabilities") or []}
            if key == "gpus" or "gpu" in words or as_table(entry).get("driver") == "nvidia":
                ids = as_table(entry).get("device_ids")
                return ([str(each) for each in ids] if isinstance(ids, list) and ids else None), key
    return None, "runtime" if service.table.get("runtime") == "nvidia" else ""


def put_processors(instance: InstanceDraft, service: Service, number: int = 1) -> None:
    """Give an instance its CPU threads and its replicas; `number` is how many models share the service's CPUs."""
    deploy = as_table(service.table.get("deploy"))
    limits = as_table(as_table(deploy.get("resources")).get("limits"))
    given = [(f"environment.{name}", service.environ.get(name)) for name in _THREAD_VARIABLES]
    given += [("cpus", service.table.get("cpus")), ("deploy.resources.limits.cpus", limits.get("cpus"))]
    for key, value in given:
        if value is None:
            continue
        if "threads" in instance.keys or number > 1 or not re.fullmatch(r"[0-9]{1,4}(\.[0-9]+)?", str(value)):
            instance.place.found(key, KeyOutcome.NONE, note="cores are shared out; threads is the key for them")
        else:
            instance.put("threads", max(1, int(float(value))), key, "CPU threads of each worker")
    if "memory" in limits:
        instance.place.found("deploy.resources.limits.memory", *_without_target("mem_limit"))
    for key in deploy.keys() - {"resources", "replicas"}:
        instance.place.found(f"deploy.{key}", KeyOutcome.NONE, note="of the container, not of the model")
    for key, value in (("deploy.replicas", deploy.get("replicas")), ("scale", service.table.get("scale"))):
        if value is not None:
            number_of = whole_number(str(value))
            instance.put("replicas", value if number_of is None else number_of, key)


def note_rest(place: Place, service: Service, used_variables: Iterable[str], cache: str) -> None:
    """Findings for variables, mounts and keys of the service that nothing else has read.

    `cache` is the container's directory of downloaded models.
    """
    known = {*used_variables, *_GPU_VARIABLES, *_THREAD_VARIABLES}
    for name in service.environ:
        key = f"environment.{name}"
        if name in _DAEMON_VARIABLES:
            is_secret = _DAEMON_VARIABLES[name]
            place.draft.environment[name] = "" if is_secret else service.environ[name]
            note = "its value is not written anywhere" if is_secret else ""
            place.found(key, KeyOutcome.CARRIED, f"{name} in the daemon's environment", note)
        elif name in _GPU_VARIABLES:
            continue
        elif name not in known:
            place.found(key, KeyOutcome.NONE, note="not a variable of the server, as far as is known here")
    _note_volumes(place, service, cache)
    for key in service.table:
        if (name := key.lstrip("-").replace("-", "_")) in _DOCKER:
            place.found(key, *_without_target(name))
        elif key not in (*_READ, "cpus", "scale") and not key.startswith("x-"):
            place.found(key, KeyOutcome.NONE, note="of the container, not of the model")


def _note_volumes(place: Place, service: Service, cache: str) -> None:
    for volume in service.volumes:
        key = f"volumes {volume.target}"
        if cache == volume.target.rstrip("/") or cache.startswith(volume.target.rstrip("/") + "/"):
            if volume.is_directory:
                path = service.on_host(cache) or volume.source
                place.draft.environment.setdefault("HF_HUB_CACHE", path)
                place.found(key, KeyOutcome.CARRIED, "HF_HUB_CACHE in the daemon's environment", "downloaded models")
            else:
                note = "models in no directory of the host: without HF_HUB_CACHE they are downloaded once more"
                place.found(key, KeyOutcome.NONE, note=note)
        elif volume.is_directory:
            place.found(key, KeyOutcome.CARRIED, "paths of the host", "workers read the host's files themselves")
        else:
            place.found(key, KeyOutcome.NONE, note="no directory of the host")


def _without_target(key: str) -> tuple[KeyOutcome, str, str]:
    outcome, note = _DOCKER[key]
    return outcome, "", note


def as_table(value: Any) -> Mapping[str, Any]:
    """The value where it is a table, an empty one for any other."""
    return value if isinstance(value, dict) else {}


_WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Pod")
_GPU = "nvidia.com/gpu"
_TOKENS = ("HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_READ_HERE = ("name", "args", "command", "env", "envFrom", "ports", "resources", "volumeMounts")
_NAMES = (
    *(("environment.", "env."), ("command", "args"), ("entrypoint", "command"), ("volumes ", "volumeMounts ")),
    *(("gpus", f"resources.{_GPU}"), ("cpus", "resources.cpu"), ("scale", "replicas")),
)


def is_manifest(documents: Sequence[Any]) -> bool:
    """True if the documents of a file are objects of Kubernetes."""
    return any(isinstance(each, dict) and "apiVersion" in each and "kind" in each for each in documents)


def manifest_services(path: Path, documents: Sequence[Any], draft: Draft) -> list[Service]:
    """A service for each container of the workloads; other objects, and what is beside the containers, are findings.

    Raises:
        InvalidConfig: Something in it cannot be understood, or is beyond a limit.
    """
    plain = PlainValues(path, lambda text, place: text)
    tables = [as_table(plain(each, "")) for each in documents]
    objects = [each for table in tables for each in (_tables(table["items"]) if "items" in table else [table])]
    found: list[Service] = []
    for each in filter(None, objects):
        place = draft.place(str(path), f"{each.get('kind')}.{_name(each)}")
        if each.get("kind") in _WORKLOADS:
            found += _containers(path, each, place)
        else:
            note = "of Kubernetes, not of a model; a Service leads to teimgr and the port of the instance now"
            place.found("kind", KeyOutcome.NONE, note=note)
    return found


def _containers(path: Path, workload: Mapping[str, Any], place: Place) -> Iterator[Service]:
    spec = as_table(workload.get("spec"))
    pod = spec if workload["kind"] == "Pod" else as_table(as_table(spec.get("template")).get("spec"))
    folders = {str(each.get("name")): as_table(each.get("hostPath")) for each in _tables(pod.get("volumes"))}
    containers = _tables(pod.get("containers"))
    for container in containers:
        name = _name(workload) + (f"-{container.get('name')}" if len(containers) > 1 else "")
        own = Place(place.draft, place.file, f"{workload['kind']}.{name}")
        environ = _environ(container, own)
        table = {key: value for key, value in container.items() if key not in _READ_HERE}
        table |= _resources(container, own) | {"environment": environ}
        for theirs, ours in (("command", "entrypoint"), ("args", "command")):
            words = container.get(theirs)
            table[ours] = [_expanded(str(each), environ) for each in words] if isinstance(words, list) else words
        table["ports"] = [
            f"{each.get('hostPort') or each.get('containerPort')}:{each.get('containerPort')}"
            for each in _tables(container.get("ports"))
            if each.get("protocol") in (None, "TCP")
        ]
        table["volumes"] = [
            f"{folders.get(volume, {}).get('path', volume)}/{mount.get('subPath') or ''}:{mount.get('mountPath')}"
            for mount in _tables(container.get("volumeMounts"))
            for volume in [str(mount.get("name"))]
        ]
        yield service_of(
            path, name, table | {"scale": spec.get("replicas")}, {}, section=workload["kind"], names=_NAMES
        )
    for key in (*pod, *(spec if pod is not spec else ())):
        if key == "initContainers":
            place.found(key, KeyOutcome.DECIDE, note="what they prepare is not known here")
        elif key not in ("containers", "volumes", "replicas", "selector", "template"):
            place.found(key, KeyOutcome.NONE, note="of the pod, not of a model")


def _environ(container: Mapping[str, Any], place: Place) -> dict[str, str]:
    """Variables with a value in the file; those of the cluster are findings, but for tokens."""
    environ: dict[str, str] = {}
    for each in _tables(container.get("env")):
        name, source = str(each.get("name")), as_table(each.get("valueFrom"))
        if not source or name in _TOKENS:  # of a token the name is all that is carried over
            environ[name] = _expanded(str(each.get("value") or ""), environ)
        else:
            note = f"left out: its value is in the cluster ({', '.join(source)}); give it in the configuration"
            place.found(f"env.{name}", KeyOutcome.DECIDE, note=note)
    for each in _tables(container.get("envFrom")):
        place.found("envFrom", KeyOutcome.DECIDE, note=f"{', '.join(each)}: name its variables in the manifest")
    return environ


def _resources(container: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """GPUs and CPUs with the keys of a compose file."""
    resources, table = as_table(container.get("resources")), dict[str, Any]()
    for key, value in {**as_table(resources.get("requests")), **as_table(resources.get("limits"))}.items():
        count = whole_number(str(value).removesuffix("m"))
        if key == _GPU and count:
            table["gpus"] = "all"
            if count > 1:
                note = 'the server used the first of several; replicas = "per-gpu" uses all'
                place.found(f"resources.{key}", KeyOutcome.DECIDE, note=note)
        elif key == "cpu":
            table["cpus"] = str((count or 0) / 1000) if str(value).endswith("m") else value
        else:
            place.found(f"resources.{key}", KeyOutcome.NONE, note="of the container, not of the model")
    return table


def _expanded(text: str, environ: Mapping[str, str]) -> str:
    """`$(NAME)` replaced as Kubernetes does: an unknown name stays."""
    return re.sub(r"(?<!\$)\$\(([^)]+)\)", lambda found: environ.get(found[1], found[0]), text)


def _name(each: Mapping[str, Any]) -> str:
    return str(as_table(each.get("metadata")).get("name") or "")


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
