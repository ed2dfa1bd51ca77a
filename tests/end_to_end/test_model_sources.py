"""Attempts of a key for some instances to reach other models and files, and unreadable models, on a real daemon."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from tests.models.test_source import PATHS_AS_REVISIONS
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess
from tests.support.hub_server import files_of, lay_out
from tests.support.models import build, edit, write, write_modules

CACHED = "somebody/tiny"
KEYS = {name: f"{name}-{'k' * 32}" for name in ("operator", "team", "other")}
RIGHTS = ["admin", "read", "inference"]
SECRET = "word-of-the-other-team"


@dataclass(frozen=True)
class Place:
    """A daemon, the folder that it allows models in, and a model outside of it."""

    daemon: DaemonProcess
    roots: Path
    private: Path
    hub: Path
    upload: Path

    async def ask(self, method: str, path: str, key: str = "team", **how: Any) -> tuple[int, str]:
        headers = {"authorization": f"Bearer {KEYS[key]}"}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as http,
            http.request(method, self.daemon.api + path, headers=headers, **how) as reply,
        ):
            return reply.status, await reply.text()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("sources")
    roots, private, hub = folder / "roots", folder / "private" / "model", folder / "hub"
    build("bert", roots / "ours")
    shutil.copytree(roots / "ours", private)
    edit(private / "config.json", architectures=[SECRET])
    lay_out(hub / "hub", CACHED, files_of(private))
    _write_traps(roots, private)
    names = {"operator": None, "team": ["mine", "team-*"], "other": ["other-*"]}
    keys = [
        {"name": name, "key": key, "rights": RIGHTS} | ({"instances": names[name]} if names[name] else {})
        for name, key in KEYS.items()
    ]
    auth = {"enabled": True, "providers": ["api_keys"], "api_keys": keys}
    daemon = WarmDaemonProcess(auth=auth, local_model_roots=[str(roots)], max_instances=20)
    daemon.start({"HF_HOME": str(hub)})
    try:
        with daemon.client(api_key=KEYS["team"]) as client:
            client.create("mine", str(roots / "ours"), dtype="float32")
            client.wait_until_running("mine", deadline_s=60)
        upload = daemon.folder / "batches" / "uploaded"
        upload.parent.mkdir(exist_ok=True)
        upload.write_text(os.path.relpath(private, hub / "hub" / "models--somebody--tiny" / "snapshots"))
        yield Place(daemon, roots, private, hub, upload)
    finally:
        daemon.close()


def _write_traps(roots: Path, private: Path) -> None:
    """Directories below the roots whose files lead out of them."""
    (roots / "link").symlink_to(private)
    (roots / "loop").symlink_to("loop")
    for name in ("tokenizer", "weights", "config", "pooling"):
        shutil.copytree(roots / "ours", roots / name)
    for name, file in (("tokenizer", "tokenizer.json"), ("weights", "model.safetensors"), ("config", "config.json")):
        (roots / name / file).unlink()
        (roots / name / file).symlink_to(private / file)
    shutil.rmtree(roots / "pooling" / "1_Pooling")
    (roots / "pooling" / "1_Pooling").symlink_to(private / "1_Pooling")
    for name, path in (("modules", "../../private/model"), ("absolute", str(private)), ("module-link", "0_Own")):
        write_modules(roots / name, "Transformer")
        rows = [{"idx": 0, "name": "0", "path": path, "type": "sentence_transformers.models.Transformer"}]
        write(roots / name / "modules.json", rows)
    (roots / "module-link" / "0_Own").symlink_to(private)
    shutil.copytree(roots / "ours", roots / "shards")
    (roots / "shards" / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"x": str(private / "model.safetensors")}}
    write(roots / "shards" / "model.safetensors.index.json", index)
    for name, key in (("explicit", "transformers_weights"),):
        shutil.copytree(roots / "ours", roots / name)
        edit(roots / name / "config.json", **{key: "../../private/model/model.safetensors"})
    (roots / "adapter").mkdir()
    write(roots / "adapter" / "adapter_config.json", {"base_model_name_or_path": str(private), "peft_type": "LORA"})
    write(roots / "adapter" / "config.json", {"model_type": "bert"})


SPELLINGS: dict[str, Callable[[Place], str]] = {
    "absolute": lambda at: str(at.private),
    "two slashes": lambda at: f"/{at.private}",
    "dots": lambda at: f"{at.roots}/ours/../../private/model",
    "dots at once": lambda at: f"{at.roots}/../private/model",
    "relative": lambda at: os.path.relpath(at.private),
    "relative by a folder": lambda at: f"src/../{os.path.relpath(at.private)}",
    "link": lambda at: f"{at.roots}/link",
    "link and a dot": lambda at: f"{at.roots}/link/.",
    "link in a circle": lambda at: f"{at.roots}/loop",
    "process": lambda at: f"/proc/self/root{at.private}",
    "working directory": lambda at: "/proc/self/cwd",
    "descriptor": lambda at: "/dev/fd/3",
    "root": lambda at: "/",
    "above": lambda at: "..",
    "here": lambda at: ".",
    "home": lambda at: "~root/model",
    "nobody's home": lambda at: "~nobody-such/model",
    "encoded": lambda at: quote(str(at.private), safe=""),
    "encoded twice": lambda at: quote(quote(str(at.private), safe=""), safe=""),
    "address": lambda at: f"file://{at.private}",
    "wide slashes": lambda at: str(at.private).replace("/", "\uff0f"),
    "wide dots": lambda at: f"{at.roots}/\uff0e\uff0e/private/model",
    "null": lambda at: f"{at.private}\0",
    "backslashes": lambda at: str(at.private).replace("/", "\\"),
    "snapshot": lambda at: str(next((at.hub / "hub" / "models--somebody--tiny" / "snapshots").iterdir())),
    "folder of the cache": lambda at: "models--somebody--tiny",
    "dashes": lambda at: "somebody--tiny",
    "id and dots": lambda at: "somebody/../../private/model",
    "upload": lambda at: str(at.upload),
    "linked tokenizer": lambda at: str(at.roots / "tokenizer"),
    "linked weights": lambda at: str(at.roots / "weights"),
    "linked config": lambda at: str(at.roots / "config"),
    "linked pooling": lambda at: str(at.roots / "pooling"),
    "module outside": lambda at: str(at.roots / "modules"),
    "absolute module": lambda at: str(at.roots / "absolute"),
    "linked module": lambda at: str(at.roots / "module-link"),
    "shard outside": lambda at: str(at.roots / "shards"),
    "weights outside": lambda at: str(at.roots / "explicit"),
    "adapter": lambda at: str(at.roots / "adapter"),
}
REFUSED = (400, 403, 404, 422)


async def check_refused(place: Place, body: dict[str, Any], *, update: bool = True) -> None:
    """That neither a creation nor an update takes it, and that no word of the other team's comes back."""
    attempts = [("POST", "/instances", {"name": "team-x", **body})]
    attempts += [("PATCH", "/instances/mine", body)] if update else []
    for method, path, sent in attempts:
        status, told = await place.ask(method, path, json=sent)
        assert status in REFUSED, (method, status, told)
        assert SECRET not in told
        assert "did you mean '/" not in told
    status, told = await place.ask("GET", "/instances", "operator")
    assert [(each["name"], each["model_id"]) for each in json.loads(told)] == [("mine", str(place.roots / "ours"))]


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_no_spelling_leads_to_a_directory_of_others(place: Place, spelling: str) -> None:
    await check_refused(place, {"model_id": SPELLINGS[spelling](place)})


async def test_no_revision_is_a_path(place: Place) -> None:
    own = [str(place.upload), os.path.relpath(place.upload, place.hub / "hub" / "models--somebody--tiny" / "refs")]
    for revision in (*own, *PATHS_AS_REVISIONS):
        if revision not in ("", "\0", "main\n"):  # of another shape, refused before
            await check_refused(place, {"model_id": CACHED, "extra_args": [f"--revision={revision}"]}, update=False)
        await check_refused(place, {"model_id": CACHED, "revision": revision}, update=False)
    await check_refused(place, {"model_id": CACHED, "revision": own[0]})


async def test_no_flag_names_a_place(place: Place) -> None:
    for flag in (
        "--code-revision",
        "--dense-path",
        "--model-id",
        "--huggingface-hub-cache",
        "--lora",
        "--tokenizer-name",
    ):
        await check_refused(place, {"model_id": CACHED, "extra_args": [flag, str(place.private)]})
    for key in ("subfolder", "code_revision", "cache_dir", "local_path", "confined", "model_roots"):
        await check_refused(place, {"model_id": CACHED, key: str(place.private)})


async def test_a_link_that_is_moved_later_is_not_followed(place: Place) -> None:
    link = place.roots / "current"
    link.symlink_to(place.roots / "ours")
    body = {"name": "team-later", "model_id": str(link), "dtype": "float32"}
    status, told = await place.ask("POST", "/instances?wait=true", json=body)
    assert (status, json.loads(told)["status"]) == (201, "running"), told
    link.unlink()
    link.symlink_to(place.private)
    await place.ask("POST", "/instances/team-later/stop")
    status, told = await place.ask("POST", "/instances/team-later/start?wait=true")
    assert (json.loads(told)["status"], SECRET in told) == ("failed", False), told
    assert "outside of local_model_roots" in told
    assert (await place.ask("DELETE", "/instances/team-later"))[0] == 200
    link.unlink()


def _spoil(config: Path, how: str) -> None:
    config.unlink()
    match how:
        case "deep":
            config.write_bytes(b'{"model_type":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
        case "huge":
            with config.open("wb") as file:
                file.truncate(1 << 40)
        case "not UTF-8":
            config.write_bytes(b'{"model_type": "\xff\xfe"}')
        case "two values":
            config.write_bytes(b'{"model_type": "bert", "model_type": "gpt2"}')
        case "no object":
            config.write_bytes(b"3")
        case "empty":
            config.write_bytes(b"")
        case "FIFO":
            os.mkfifo(config)
        case "device":
            config.symlink_to("/dev/zero")
        case "directory":
            config.mkdir()
        case "circle":
            config.symlink_to(config.name)


HOW = ("deep", "huge", "not UTF-8", "two values", "no object", "empty", "FIFO", "device", "directory", "circle")


@pytest.mark.parametrize("file", ["config.json", "modules.json", "model.safetensors.index.json"])
async def test_unreadable_models_are_listed_as_failed_and_can_be_deleted(
    place: Place, tmp_path: Path, file: str
) -> None:
    """As directories that were added, and as models in the hub's cache."""
    spoilt = {}
    for number, how in enumerate(HOW):
        root = place.roots / f"bad-{number}-{file}"
        shutil.copytree(place.roots / "ours", root)
        if "index" in file:
            (root / "model.safetensors").unlink()
            (root / file).touch()
        _spoil(root / file, how)
        cached = place.hub / "hub" / f"models--bad--{number}-{file}"
        shutil.copytree(root, cached / "snapshots" / ("a" * 40), symlinks=True, copy_function=_copied)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("a" * 40)
        spoilt |= {str(root): how, f"bad/{number}-{file}": how}
    for model_id in spoilt:
        status, told = await place.ask("POST", "/models", "operator", json={"model_id": model_id})
        assert status in (200, 201), told

    status, told = await place.ask("GET", "/models", "operator")
    assert status == 200
    listed = {each["model_id"]: each for each in json.loads(told)}
    for model_id, how in spoilt.items():
        assert (listed[model_id]["status"], how) == ("failed", how), listed[model_id]
        assert file in listed[model_id]["verification_error"]
        status, told = await place.ask("POST", "/instances", json={"name": "team-b", "model_id": model_id})
        assert (status in REFUSED, how) == (True, how), told
        status, told = await place.ask("DELETE", f"/models/{quote(model_id, safe='')}", "operator")
        assert status == 200, told
    status, told = await place.ask("GET", "/models", "operator")
    assert not spoilt.keys() & {each["model_id"] for each in json.loads(told)}
    for number in range(len(HOW)):
        root = place.roots / f"bad-{number}-{file}"
        assert root.is_dir()  # deleted from the list alone
        shutil.rmtree(root)


def _copied(source: str, target: str) -> None:
    """`shutil.copy2`, of FIFOs and sparse files too."""
    if Path(source).is_fifo():
        os.mkfifo(target)
    elif (size := Path(source).stat().st_size) > 1 << 30:
        os.truncate(os.open(target, os.O_CREAT | os.O_WRONLY), size)
    else:
        shutil.copy2(source, target)
