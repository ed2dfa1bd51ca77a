"""Containers of Kubernetes manifests as services of a compose file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from teimgr.cli.migration.compose_file import PlainValues, Service, service_of, whole_number
from teimgr.cli.migration.containers import as_table
from teimgr.cli.migration.draft import Draft, KeyOutcome, Place

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


def services(path: Path, documents: Sequence[Any], draft: Draft) -> list[Service]:
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
