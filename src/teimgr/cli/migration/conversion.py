"""Conversion of files to a configuration of teimgr.

YAML is a compose file or Kubernetes manifests, a text with a `docker run` a script, an object of JSON and the table of
`ollama list` are Ollama's, all else is tei-manager's TOML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from teimgr.cli.migration import (
    compose_file,
    containers,
    infinity_service,
    ollama_list,
    tei_manager_file,
    tei_service,
)
from teimgr.cli.migration.compose_file import ComposeFile, Service, read_compose, read_documents
from teimgr.cli.migration.containers import NOT_FOLLOWED, place_of
from teimgr.cli.migration.draft import Draft, InstanceDraft, KeyOutcome, toml
from teimgr.config.settings import Settings
from teimgr.errors import InvalidConfig

MAX_FILES = 32
_YAML = (".yml", ".yaml")
_PORTS = ("api_port", "grpc_port")
_OVERRIDES = {
    f"{stem}{suffix}": tuple(f"{stem}.override{each}" for each in _YAML)
    for stem in ("compose", "docker-compose")
    for suffix in _YAML
}
# How a service of a server is recognised, and what converts it.
_SERVERS: tuple[tuple[Callable[[Service], bool], Callable[[Service, Draft], None]], ...] = (
    (tei_service.is_tei, tei_service.convert),
    (infinity_service.is_infinity, infinity_service.convert),
)


def convert(files: Sequence[Path], environ: Mapping[str, str], env_file: Path | None = None) -> Draft:
    """The draft of compose files, manifests, scripts, Ollama's lists and tei-manager's files; `-` is standard input.

    `environ`, then `env_file` or the `.env` beside a compose file, have the values of its variables.

    Raises:
        InvalidConfig: A file cannot be read or understood, is beyond a limit, or none of them has a model.
    """
    if len(files) > MAX_FILES:
        raise InvalidConfig(f"more than {MAX_FILES} files")
    draft = Draft()
    images: set[str] = set()
    for file in files:
        services: Sequence[Service] = ()
        if file.suffix.lower() in _YAML and containers.is_manifest(documents := read_documents(file)):
            services = containers.manifest_services(file, documents, draft)
        elif file.suffix.lower() in _YAML:
            compose = read_compose(file, environ, env_file)
            services = compose.services
            _note_around(compose, draft)
        elif (script := compose_file.script_of(file)) is not None:
            services = compose_file.docker_run_services(file, script, environ, draft)
        elif ollama_list.is_list(file):
            ollama_list.convert(file, draft)
        else:
            tei_manager_file.convert(file, tei_manager_file.read_toml(file), draft)
        images |= {service.image or service.name for service in services}
        _convert_services(services, draft)
    if not draft.instances:
        seen = f"; its services are {', '.join(sorted(images))}" if images else ""
        why = [f"{each.path}: {each.note}" for each in draft.findings if each.outcome is KeyOutcome.DECIDE]
        names = ", ".join(map(str, files))
        raise InvalidConfig("\n".join([f"{names}: no model of TEI, Infinity, Ollama or tei-manager in it{seen}", *why]))
    defaults = Settings()
    draft.finish({name: getattr(defaults, name) for name in _PORTS})
    return draft


def _note_around(compose: ComposeFile, draft: Draft) -> None:
    """Findings for what a compose file has beside its services."""
    place = draft.place(str(compose.path))
    for name in compose.unset:
        place.found(
            f"${{{name}}}",
            KeyOutcome.DECIDE,
            note="the variable is not set here and taken as empty, as docker does",
        )
    for key in compose.others:
        outcome = KeyOutcome.DECIDE if key == "include" else KeyOutcome.NONE
        place.found(key, outcome, note=NOT_FOLLOWED if key == "include" else "of docker, not of a model")
    for name in _OVERRIDES.get(compose.path.name, ()):
        if (compose.path.parent / name).exists():
            place.found(name, KeyOutcome.DECIDE, note=f"docker merges this file as well: {NOT_FOLLOWED}")


def _convert_services(services: Iterable[Service], draft: Draft) -> None:
    moved, others = [], []
    for service in services:
        convert_service = next((convert for runs, convert in _SERVERS if runs(service)), None)
        if convert_service is None:
            others.append(service)
        else:
            moved.append(service.name)
            convert_service(service, draft)
    for service in others:
        _other(draft, service, moved)


def _other(draft: Draft, service: Service, moved: Iterable[str]) -> None:
    """Findings for a service that stays where it is: what of it names a service that moves."""
    place = place_of(service, draft)
    if "tei-manager" in service.image:
        note = "import tei-manager's own TOML and its state file: the volumes show where they are"
        place.found("image", KeyOutcome.DECIDE, note=note)
    elif "MODEL_ID" in service.environ or any(word.startswith("--model-id") for word in service.words):
        note = "no known image of TEI or Infinity: if it is one, name theirs in a copy of the file"
        place.found("image", KeyOutcome.DECIDE, note=note)
    elif not service.image and "build" not in service.table:
        place.found(
            "image", KeyOutcome.DECIDE, note=f"no image: where it is part of another file's service, {NOT_FOLLOWED}"
        )
    else:
        place.found("image", KeyOutcome.NONE, note="no image of TEI or Infinity: it stays where it is")
    texts = {f"environment.{name}": value for name, value in service.environ.items()}
    texts["command"] = " ".join(service.words)
    for name in moved:
        for key, text in texts.items():
            if re.search(rf"//(?:[^/@\s]*@)?{re.escape(name)}(?=[:/\s\"',]|$)", text):
                note = (
                    f"names {name}, which is not in docker's network any more: host.docker.internal and its published"
                    " port instead, with `extra_hosts: [host.docker.internal:host-gateway]`"
                )
                place.found(key, KeyOutcome.DECIDE, note=note)


def toml_of(draft: Draft) -> str:
    """The configuration, with a comment for each decision that an instance needs. It may have API keys in it."""
    import tomli_w

    files = ", ".join(dict.fromkeys(each.file for each in draft.findings if each.file))
    parts = [f"# Made by `teimgr import` from {_comment(files)}; `teimgr config check` checks it.\n"]
    scalars = {name: value for name, value in draft.settings.items() if not isinstance(value, dict)}
    parts += [tomli_w.dumps(scalars)] if scalars else []
    parts += [_instance(draft, instance) for instance in draft.instances]
    tables = {name: value for name, value in draft.settings.items() if isinstance(value, dict)}
    parts += [tomli_w.dumps(tables)] if tables else []
    return "\n".join(parts)


def _instance(draft: Draft, instance: InstanceDraft) -> str:
    """Its table, written so that it can follow any other."""
    place = instance.place
    lines = [f"# {_comment(place.path)} of {_comment(place.file)}"]
    first = next(each for each in draft.instances if each.place is place)
    lines += [
        f"# Decide: {_comment(finding.key)}: {_comment(finding.note)}"
        for finding in (draft.findings if instance is first else ())
        if (finding.file, finding.place, finding.outcome) == (place.file, place.path, KeyOutcome.DECIDE)
    ]
    keys = [f"{name} = {toml(value)}" for name, value in instance.table().items()]
    return "\n".join([*lines, "[[instances]]", *keys, ""])


def _comment(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)
