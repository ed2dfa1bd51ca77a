"""A value that is watched: the last one is never missed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.support.fleet import children
from tests.support.hub_server import SHA, Hub, etag

from teimgr.config.settings import Settings
from teimgr.control.placement.hosts import GpuInventory, Inventory
from teimgr.control.registry.cache import HubCache
from teimgr.control.registry.records import DownloadProgress, ModelStatus
from teimgr.control.registry.registry import Registry
from teimgr.control.registry.tasks import Observable, Rate
from teimgr.errors import ModelBusy, ModelDownloadFailed, ModelGated, ModelNotFound, Unavailable, ValidationError
from teimgr.observability.metrics import DaemonMetrics


async def test_a_watcher_sees_the_value_now_and_the_last_one() -> None:
    live = Observable(0)

    async def watch() -> list[int]:
        return [value async for value in live.follow()]

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    for value in range(1, 100):
        live.set(value)
    live.close()
    seen = await watching
    assert (seen[0], seen[-1]) == (0, 99)


async def test_a_watcher_that_comes_late_sees_the_last_value_once() -> None:
    live = Observable(1)
    live.set(2)
    live.close()
    assert [value async for value in live.follow()] == [2]


async def test_a_watcher_that_is_slow_misses_no_end() -> None:
    live = Observable(0)
    following = live.follow()
    assert await anext(following) == 0
    live.set(1)
    live.close()
    assert [value async for value in following][-1] == 1


MODEL = "somebody/tiny"
MIB = 1 << 20
WEIGHTS = os.urandom(3 * MIB)
FILES = {
    "config.json": b'{"model_type": "bert", "hidden_size": 32}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"the same weights again",
    "onnx/model.onnx": b"for another runtime",
    "1_Pooling/config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
}
NEEDED = {"config.json", "model.safetensors", "1_Pooling/config.json", "tokenizer.json"}
LIMIT_S = 60.0

Make = Callable[..., Registry]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Registries over one cache; afterwards no process of theirs is left."""
    made: list[Registry] = []

    def registry(hub: Hub | None = None, **environ: str) -> Registry:
        own = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        where = {"HF_ENDPOINT": hub.url} if hub else {}
        settings = Settings(state_file=tmp_path / "state.toml", model_downloads=1)
        gpus = GpuInventory({}, lambda: Inventory(reason="none in this test"))
        made.append(
            Registry(
                settings,
                None,  # type: ignore[arg-type]  # nothing is launched here
                gpus,
                DaemonMetrics(),
                list,
                HubCache(tmp_path / "hub"),
                own | where | {"HF_HOME": str(tmp_path)} | environ,
            )
        )
        return made[-1]

    yield registry
    for each in made:
        await each.close()
    assert not children()


async def pull(registry: Registry, model_id: str = MODEL, **how: object) -> None:
    await (await registry.download(model_id, **how)).finished()  # type: ignore[arg-type]


async def held(hub: Hub) -> None:
    """Return when the hub holds a body back."""
    assert await asyncio.to_thread(hub.holding.wait, LIMIT_S)


async def test_what_the_engine_needs_comes_and_is_checked(make: Make, tmp_path: Path) -> None:
    with Hub(MODEL, FILES) as hub:
        registry = make(hub)
        await pull(registry)
    view = await registry.get(MODEL)

    assert set(hub.asked) == NEEDED
    assert (view.status, view.downloaded, view.snapshot and view.snapshot.commit) == ("downloaded", True, SHA)
    assert view.snapshot is not None
    assert {file.path for file in view.snapshot.files} == NEEDED
    assert (view.snapshot.path / "model.safetensors").read_bytes() == WEIGHTS
    blobs = tmp_path / "hub" / "models--somebody--tiny" / "blobs"
    assert {blob.name for blob in blobs.iterdir()} == {etag(name, FILES[name]) for name in NEEDED}
    assert view.snapshot.refs == ("main",)


@pytest.mark.clause("M2.8-download")
async def test_what_is_here_is_not_fetched_again_unless_that_is_asked(make: Make) -> None:
    with Hub(MODEL, FILES) as hub:
        registry = make(hub)
        await pull(registry)
        asked = len(hub.asked)
        await pull(registry)
        assert len(hub.asked) == asked
        hub.files["tokenizer.json"] = b'{"version": "2.0"}'  # the same commit; only a file that is not here is fetched
        (await registry.get(MODEL)).snapshot.path.joinpath("tokenizer.json").unlink()  # type: ignore[union-attr]
        await pull(registry, update=True)
    assert hub.asked[asked:] == ["tokenizer.json"]


async def test_a_download_that_was_broken_off_goes_on_where_it_was(make: Make) -> None:
    with Hub(MODEL, FILES, hold_after=2 * MIB) as hub:
        hub.open.clear()
        first = make(hub)
        await first.download(MODEL)
        work = first.task(MODEL)
        assert work is not None
        assert work.progress is not None
        async for progress in work.progress.follow():
            if progress.bytes_done >= 2 * MIB:
                break
        await first.close()
        hub.open.set()
        hub.ranges.clear()
        second = make(hub)
        await pull(second)

    assert dict(hub.ranges)["model.safetensors"] == 2 * MIB
    view = await second.get(MODEL)
    assert view.snapshot is not None
    assert (view.snapshot.path / "model.safetensors").read_bytes() == WEIGHTS


async def test_a_connection_that_breaks_is_taken_up(make: Make) -> None:
    with Hub(MODEL, FILES) as hub:
        hub.cuts["model.safetensors"] = MIB + 17
        registry = make(hub)
        await pull(registry)
    starts = [start for name, start in hub.ranges if name == "model.safetensors"]
    assert starts[0] == 0
    assert starts[1] > 0
    assert (await registry.get(MODEL)).downloaded


async def test_bytes_that_are_not_the_promised_ones_are_fetched_once_more(make: Make) -> None:
    with Hub(MODEL, FILES) as hub:
        hub.forged["model.safetensors"] = 1
        registry = make(hub)
        await pull(registry)
    assert hub.asked.count("model.safetensors") == 2
    assert (await registry.get(MODEL)).downloaded


async def test_bytes_that_stay_wrong_are_a_failure_and_are_not_kept(make: Make, tmp_path: Path) -> None:
    with Hub(MODEL, FILES) as hub:
        hub.forged["model.safetensors"] = 99
        registry = make(hub)
        with pytest.raises(
            ModelDownloadFailed, match=r"model\.safetensors differs from the hub's announcement: its SHA-256"
        ):
            await pull(registry)
    view = await registry.get(MODEL)
    assert (view.status, view.downloaded) == ("available", False)
    assert "SHA-256" in str(view.download_error)
    wanted = hashlib.sha256(WEIGHTS).hexdigest()
    assert not [path for path in tmp_path.rglob(f"{wanted}*") if path.suffix != ".lock"]


async def test_progress_is_live_and_complete(make: Make) -> None:
    with Hub(MODEL, FILES, hold_after=2 * MIB) as hub:
        hub.open.clear()
        registry = make(hub)
        work = await registry.download(MODEL)
        assert work.progress is not None
        seen: list[DownloadProgress] = []
        async for progress in work.progress.follow():
            seen.append(progress)
            if progress.bytes_done >= 2 * MIB and not hub.open.is_set():
                view = await registry.get(MODEL)
                assert (view.status, view.progress) == (ModelStatus.DOWNLOADING, work.progress.value)
                hub.open.set()
        await work.finished()

    total = sum(len(FILES[name]) for name in NEEDED)
    last = seen[-1]
    assert (last.phase, last.bytes_done, last.bytes_total, last.files_done, last.files_total) == (
        "done",
        total,
        total,
        4,
        4,
    )
    assert [progress.bytes_done for progress in seen] == sorted(progress.bytes_done for progress in seen)
    assert any(progress.rate_bytes_per_s for progress in seen)
    under_way = [progress for progress in seen if progress.rate_bytes_per_s and progress.bytes_done < total]
    assert all(progress.eta_s is not None for progress in under_way)  # how many were seen depends on the machine


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate()
    assert rate.at(0, 0) is None
    assert rate.at(1, 100) == 100
    assert rate.at(100, 100) == 0
    assert rate.at(101, 600) == 500


@pytest.mark.clause("M2.8-busy")
async def test_one_download_at_a_time_per_model(make: Make) -> None:
    with Hub(MODEL, FILES) as hub:
        hub.open.clear()
        registry = make(hub)
        work = await registry.download(MODEL)
        with pytest.raises(ModelBusy, match=f"Model '{MODEL}' is already downloading"):
            await registry.download(MODEL)
        with pytest.raises(ModelBusy):
            await registry.delete(MODEL)
        hub.open.set()
        await work.finished()


async def test_more_downloads_than_the_settings_allow_wait(make: Make) -> None:
    with Hub(MODEL, FILES) as hub:
        hub.open.clear()
        registry = make(hub)
        first = await registry.download(MODEL)
        await held(hub)
        second = await registry.download("somebody/else")
        assert second.progress is not None
        assert second.progress.value.phase == "waiting"
        hub.open.set()
        await first.finished()
        with pytest.raises(ModelNotFound):
            await second.finished()


async def test_gated_and_missing_are_told_apart(make: Make) -> None:
    with Hub(MODEL, FILES, gated=True) as hub:
        registry = make(hub, HF_TOKEN="hf_secret")
        with pytest.raises(ModelGated, match="accept its licence"):
            await pull(registry)
        with pytest.raises(ModelNotFound, match="is not on the hub"):
            await pull(registry, "somebody/else")
        with pytest.raises(ModelNotFound, match="has no revision 'v9'"):
            await pull(registry, revision="v9")
    assert "Bearer hf_secret" in hub.tokens


async def test_a_revision_is_fetched_and_remembered(make: Make) -> None:
    with Hub(MODEL, FILES) as hub:
        hub.revisions.add("v1")
        registry = make(hub)
        await pull(registry, revision="v1")
    view = await registry.get(MODEL)
    assert view.snapshot is not None
    assert (view.record.revision, view.snapshot.refs, view.downloaded) == ("v1", ("v1",), True)


async def test_offline_and_an_absent_hub_say_so(make: Make) -> None:
    with pytest.raises(ModelDownloadFailed, match=f"Failed to download model '{MODEL}': .*HF_HUB_OFFLINE is set"):
        await pull(make(HF_HUB_OFFLINE="1"))
    with Hub(MODEL, FILES) as gone:
        pass
    with pytest.raises(ModelDownloadFailed, match="cannot be fetched from the hub"):
        await pull(make(gone))


async def test_the_daemons_end_ends_a_download_and_tells_who_waits(make: Make) -> None:
    with Hub(MODEL, FILES) as hub:
        hub.open.clear()
        registry = make(hub)
        waiting = asyncio.create_task((await registry.download(MODEL)).finished())
        await held(hub)
        await registry.close()
        with pytest.raises(Unavailable, match="stopping"):
            await waiting
        assert not children()
        with pytest.raises(Unavailable):
            await registry.download(MODEL)


async def test_a_directory_is_never_downloaded_nor_deleted(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    registry = make()
    with pytest.raises(ModelNotFound, match="holds no model"):
        await pull(registry, str(folder))
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    await pull(registry, str(folder))
    assert (await registry.get(str(folder))).status is ModelStatus.DOWNLOADED
    with pytest.raises(ValidationError, match="is a directory"):
        await registry.delete(str(folder))
    assert (folder / "config.json").exists()


async def test_what_was_done_is_known_to_the_next_daemon(make: Make) -> None:
    with Hub(MODEL, FILES) as hub:
        registry = make(hub)
        await registry.add("somebody/later", "v2")
        await pull(registry)
        await registry.close()
    again = make()
    await again.start()
    assert [view.model_id for view in await again.list()] == ["somebody/later", MODEL]
    assert (await again.get("somebody/later")).record.revision == "v2"
    assert (await again.delete(MODEL)).downloaded
    with pytest.raises(ModelNotFound, match=f"Model '{MODEL}' not found"):
        await again.get(MODEL)


class HostileHub(Hub):
    """Lists its files with other facts than they have."""

    facts: dict[str, object]
    commit = SHA

    def _tree(self) -> list[dict[str, object]]:
        return [row | self.facts if row["path"] == "config.json" else row for row in super()._tree()]

    def _info(self) -> dict[str, object]:
        return super()._info() | {"sha": self.commit}


@pytest.mark.parametrize(
    ("facts", "commit", "message"),
    [
        ({"path": "../../../../mine/config.json"}, SHA, "names the file"),
        ({"oid": "../../../mine/config.json"}, SHA, "names a blob"),
        ({}, "../../../mine", "names a commit"),
        ({"size": -(2**60)}, SHA, "has no size"),
        ({"size": 5}, SHA, "has more than the 5 bytes that the hub announced"),
    ],
)
async def test_a_hub_reaches_no_file_outside_of_the_cache_and_sends_no_more_than_announced(
    make: Make, tmp_path: Path, facts: dict[str, object], commit: str, message: str
) -> None:
    mine = tmp_path / "mine" / "config.json"
    mine.parent.mkdir()
    mine.write_text("kept")
    with HostileHub(MODEL, FILES) as hub:
        hub.facts, hub.commit = facts, commit
        hub.revisions.add(commit)
        with pytest.raises(ModelDownloadFailed, match=message):
            await pull(make(hub))
    assert mine.read_text() == "kept"


@pytest.mark.parametrize(("revision", "missing"), [(None, ""), ("v9", "has no revision 'v9'")])
def test_the_code_of_other_repositories_comes_with_a_model_at_its_revision(
    tmp_path: Path, revision: str | None, missing: str
) -> None:
    config = {"model_type": "own", "auto_map": {"AutoModel": f"{MODEL}--modeling.OwnModel"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fetch = f"fetch_code(pathlib.Path(sys.argv[1]), {revision!r})"
    code = f"from teimgr.control.registry.fetcher import fetch_code; {fetch}"
    script = f"import sys, pathlib; {code}"
    own = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    with Hub(MODEL, {"modeling.py": b"code = 1", "model.safetensors": b"w"}) as hub:
        environ = own | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", script, str(tmp_path)]
        done = subprocess.run(command, env=environ, timeout=LIMIT_S, capture_output=True, text=True)

    assert missing in done.stderr
    assert hub.asked == ([] if missing else ["modeling.py"])


@pytest.mark.parametrize(
    ("model_id", "revision", "message"),
    [
        (MODEL, "a..b", "code_revision: "),
        (MODEL, "v1", "code_revision: code of models is disabled; the setting allow_remote_code = true"),
    ],
)
async def test_code_at_a_revision_is_not_fetched_where_code_is_off(
    make: Make, model_id: str, revision: str, message: str
) -> None:
    with Hub(MODEL, FILES) as hub, pytest.raises(ValidationError, match=message):
        await make(hub).download(model_id, code_revision=revision)
