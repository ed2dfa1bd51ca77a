"""Build of a kustomization without kustomize, for the fields that those of deploy/kubernetes use.

What it does not know is an error, as is a file that is missing or a patch whose object does not exist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FIELDS = {"apiVersion", "kind", "resources", "components", "labels", "images", "patches", "configMapGenerator"}
Documents = list[dict[str, Any]]


def build(folder: Path) -> Documents:
    """The objects of a kustomization."""
    return _apply(folder, [])


def _apply(folder: Path, documents: Documents) -> Documents:
    """`documents` and those of the kustomization, changed as it says."""
    [said] = yaml.safe_load_all((folder / "kustomization.yaml").read_text())
    assert set(said) <= FIELDS, set(said) - FIELDS
    documents = [*documents]
    for name in said.get("resources", ()):
        path = folder / name
        documents += build(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for name in said.get("components", ()):
        documents = _apply(folder / name, documents)
    for each in said.get("configMapGenerator", ()):
        _generate(documents, _config_map(folder, each), is_merged=each.get("behavior") == "merge")
    for labels in said.get("labels", ()):
        for document in documents:
            document["metadata"].setdefault("labels", {}).update(labels["pairs"])
    for patch in said.get("patches", ()):
        _patch(documents, patch)
    for image in said.get("images", ()):
        _tag(documents, image["name"], image["newTag"])
    names = [(each["kind"], each["metadata"]["name"]) for each in documents]
    assert len(set(names)) == len(names), names
    return documents


def _config_map(folder: Path, said: dict[str, Any]) -> dict[str, Any]:
    assert said["options"] == {"disableNameSuffixHash": True}
    data = {name: (folder / name).read_text() for name in said["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": said["name"]}, "data": data}


def _generate(documents: Documents, made: dict[str, Any], *, is_merged: bool) -> None:
    if not is_merged:
        documents.append(made)
        return
    name = made["metadata"]["name"]
    [before] = [each for each in documents if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", name)]
    before["data"].update(made["data"])


def _patch(documents: Documents, said: dict[str, Any]) -> None:
    target = said["target"]["kind"], said["target"]["name"]
    [document] = [each for each in documents if (each["kind"], each["metadata"]["name"]) == target]
    for step in yaml.safe_load(said["patch"]):
        *path, last = (part.replace("~1", "/") for part in step["path"].split("/")[1:])
        holder: Any = document
        for part in path:
            holder = holder[int(part) if isinstance(holder, list) else part]
        assert (last in holder) == (step["op"] != "add"), step
        if last == "-":
            holder.append(step["value"])
        elif step["op"] == "remove":
            del holder[last]
        else:
            holder[last] = step["value"]


def _tag(documents: Documents, name: str, tag: str) -> None:
    containers = [
        container
        for document in documents
        if document["kind"] == "Deployment"
        for container in document["spec"]["template"]["spec"]["containers"]
        if container["image"] == name
    ]
    assert containers, name
    for container in containers:
        container["image"] = f"{name}:{tag}"
