"""Fetching what a worker loads: the model's directory, and the code of other repositories that an instance trusts."""

from __future__ import annotations

from pathlib import Path

from teimgr.models import hub
from teimgr.models.own_code import code_repositories_of
from teimgr.spec import WorkerSpec

_MAX_CODE_FILES = 32  # that are named


def fetched(spec: WorkerSpec, neighbours: hub.Neighbours | None) -> tuple[hub.ModelSource, list[str]]:
    """The model's directory, and the code that the instance trusts: that of other repositories, which is fetched too,
    and the model's own, each as `LoadedModel.code` has it.
    """
    source = hub.resolve(spec.model_id, spec.revision, neighbours, spec.model_roots)
    if not spec.trust_remote_code:
        return source, []
    code = [code_of(source.path, spec.model_id, source.sha)]
    for repository in code_repositories_of(source.path):
        found = hub.resolve_code(repository, spec.code_revision)
        code.append(code_of(found.path, repository, found.sha))
    return source, [each for each in code if each]


def code_of(folder: Path, name: str, commit: str | None) -> str:
    """A repository with its commit and its files of code; "" where it has none."""
    files = sorted(path.relative_to(folder).as_posix() for path in (*folder.glob("*.py"), *folder.glob("*/*.py")))
    shown = files[:_MAX_CODE_FILES] + (["…"] if len(files) > _MAX_CODE_FILES else [])
    at = "" if commit is None else f"@{commit}"
    return f"{name}{at}: {', '.join(shown)}" if files else ""
