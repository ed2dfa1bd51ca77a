"""Models in a cache laid out as huggingface-hub does it: blobs, a snapshot of links to them, a ref that names it."""

from __future__ import annotations

from pathlib import Path

from tests.support.hub_server import SHA, etag

from teimgr.models import hub


def lay_out(cache: Path, model_id: str, files: dict[str, bytes], commit: str = SHA, ref: str = "main") -> Path:
    """Add a commit of a model to the cache; the result is its snapshot."""
    folder = cache / hub.folder_name(model_id)
    snapshot = folder / "snapshots" / commit
    for name, content in files.items():
        blob, shown = folder / "blobs" / etag(name, content), snapshot / name
        for parent in (blob.parent, shown.parent):
            parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        shown.symlink_to(Path(*[".."] * (2 + name.count("/")), "blobs", blob.name))
    (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    return snapshot


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a model directory by name, of its subfolders too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
