"""Models from other hosts over mutual TLS: what is copied, and what a host that fails, lies or is full does to it."""

from __future__ import annotations

import asyncio
import random
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.support.cluster import HOST, FleetNodes, TcpProxy
from tests.support.fleet import local_launcher
from tests.support.hub_server import SHA, etag, files_of, lay_out
from tests.support.models import build
from tests.support.polling import eventually
from tests.support.worker_process import WorkerProcess, embed_request

from teimgr.cluster import agent as agent_module
from teimgr.cluster import host_models
from teimgr.cluster.agent import Agent
from teimgr.cluster.host_link import HostAddress, HostLink, connect
from teimgr.cluster.host_models import HostModels, Offer
from teimgr.cluster.host_service import HostListener, HostService
from teimgr.cluster.messages import FleetFacts, NodeFacts, Versions, read_message
from teimgr.errors import (
    Forbidden,
    InvalidInput,
    ModelDownloadFailed,
    ModelNotFound,
    StorageFull,
    TeimgrError,
    Unavailable,
)
from teimgr.models import hub, neighbours
from teimgr.models.hub import ModelSource
from teimgr.models.neighbours import FleetNeighbours
from teimgr.observability.log_source import LocalLogs
from teimgr.wire.fleet_tls import write_removed
from teimgr.wire.frames import Method
from teimgr.wire.json_messages import write_line

LIMIT_S = 60.0
MODEL = "somebody/tiny"
WEIGHTS = random.Random(1).randbytes(3_000_000)
FILES = {
    "config.json": b'{"model_type": "bert"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b'{"version": "1.0"}',
    "1_Pooling/config.json": b"{}",
    "pytorch_model.bin": b"the same weights again",
    "onnx/model.onnx": b"for another runtime",
}
NEEDED = {name: content for name, content in FILES.items() if name not in ("pytorch_model.bin", "onnx/model.onnx")}
BLOB = etag("model.safetensors", WEIGHTS)
FAST = 1 << 40


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "PAUSE_S", 0.01)


@dataclass
class Sender:
    """A host that has models in a cache of its own; `bytes_per_s` is its limit."""

    name: str
    cache: Path
    address: str = ""
    bytes_per_s: int = FAST


@dataclass
class Fleet:
    """The senders, and the host `two` with its agent, whose cache is empty."""

    nodes: FleetNodes
    folder: Path
    agent: Agent
    senders: dict[str, Sender] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        return self.folder / "two"

    @property
    def repository(self) -> Path:
        return self.cache / hub.folder_name(MODEL)

    @property
    def partial(self) -> Path:
        return self.repository / "blobs" / f"{BLOB}.incomplete"

    async def tell(self, *hosts: tuple[str, str], models_from: hub.ModelsFrom = "hub-first") -> None:
        """What the daemon would: the hosts, in the order in which they are asked."""
        reader, writer = await asyncio.open_unix_connection(str(self.agent.socket))
        fleet = FleetFacts(services=[*hosts, ("two", f"{HOST}:1")], models_from=models_from)
        write_line(writer, op="facts", fleet=fleet.to_dict())
        assert "facts" in (await read_message(reader) or {})
        writer.close()

    def neighbours(self) -> FleetNeighbours:
        return FleetNeighbours(self.agent.socket, self.nodes.identity("two"), self.cache)

    async def fetch(self, revision: str | None = None, by: FleetNeighbours | None = None) -> ModelSource:
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.to_thread((by or self.neighbours()).fetch, MODEL, revision)

    def has_no_snapshot(self) -> bool:
        return not (self.repository / "snapshots").exists() and not (self.repository / "refs").exists()


@asynccontextmanager
async def sending(
    fleet: Fleet, name: str, files: dict[str, bytes] | None = None, kind: type[HostModels] = HostModels
) -> AsyncIterator[Sender]:
    """A host with the model, or with nothing where `files` is empty; the agent is told of all hosts so far."""
    sender = Sender(name, fleet.folder / name)
    if files is None or files:
        lay_out(sender.cache, MODEL, FILES if files is None else files)
    service = HostService(LocalLogs(fleet.folder, name), kind(lambda: sender.bytes_per_s, sender.cache))
    listener = HostListener(service, fleet.nodes.identity(name), HOST)
    listener.start()
    try:
        sender.address = listener.address
        fleet.senders[name] = sender
        await fleet.tell(*((each.name, each.address) for each in fleet.senders.values()))
        yield sender
    finally:
        await listener.close()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    nodes = FleetNodes(tmp_path / "ca")
    facts = NodeFacts(
        name="two",
        versions=Versions(teimgr="0", ray="0", python="0", torch="0"),
        labels={},
        cores=1,
        memory_total_bytes=1,
        memory_free_bytes=1,
    )

    async def described() -> NodeFacts:
        return facts

    with tempfile.TemporaryDirectory(prefix="t") as short:  # a unix socket's path may have 107 bytes
        run_dir = Path(short, "run")
        run_dir.mkdir()
        agent = Agent(local_launcher(Path(short)), run_dir, described, HOST, nodes.identity("two").folder)
        await agent.start()
        try:
            yield Fleet(nodes, tmp_path, agent)
        finally:
            await agent.close()


async def test_a_model_is_laid_out_as_the_hub_does_without_what_is_not_needed(fleet: Fleet) -> None:
    async with sending(fleet, "one") as one:
        by = fleet.neighbours()
        found = await fleet.fetch(by=by)

        assert (found.sha, found.path) == (SHA, fleet.repository / "snapshots" / SHA)
        assert files_of(found.path) == NEEDED
        assert hub.find_cached(MODEL, None, fleet.cache) == found
        for name, content in NEEDED.items():
            assert (found.path / name).resolve() == fleet.repository / "blobs" / etag(name, content)
            theirs = one.cache / found.path.relative_to(fleet.cache) / name
            assert (found.path / name).readlink() == theirs.readlink()
        assert (fleet.repository / "refs" / "main").read_text() == SHA
        assert {each.name for each in fleet.repository.iterdir()} == {"blobs", "refs", "snapshots"}
        total = sum(map(len, NEEDED.values()))
        assert (by.progress.bytes_done, by.progress.bytes_total) == (total, total)


async def test_a_revision_and_a_commit_are_found_by_their_names(fleet: Fleet) -> None:
    async with sending(fleet, "one") as one:
        other = "f" * 40
        lay_out(one.cache, MODEL, {**FILES, "config.json": b"{}"}, commit=other, ref="refs/pr/1")

        assert (await fleet.fetch("refs/pr/1")).sha == other
        assert (fleet.repository / "refs" / "refs" / "pr" / "1").read_text() == other
        assert (await fleet.fetch(SHA)).sha == SHA
        assert not (fleet.repository / "refs" / SHA).exists()
        with pytest.raises(ModelNotFound, match=r"asked: one"):
            await fleet.fetch("other")


async def test_a_model_that_no_host_has_names_those_that_were_asked(fleet: Fleet) -> None:
    await fleet.tell()
    with pytest.raises(ModelNotFound, match="the fleet has no other host"):
        await fleet.fetch()
    async with sending(fleet, "one", files={}), sending(fleet, "three", files={}):
        with pytest.raises(ModelNotFound, match=r"no other host .* has model 'somebody/tiny' \(asked: one, three\)"):
            await fleet.fetch()
    assert not fleet.repository.exists()


async def test_a_host_that_vanishes_in_a_file_is_followed_by_another_which_continues(fleet: Fleet) -> None:
    async with AsyncExitStack() as stack:
        senders = [await stack.enter_async_context(sending(fleet, name)) for name in ("one", "three")]
        first, second = [await stack.enter_async_context(TcpProxy(each.address)) for each in senders]
        first.cut_after = 2_000_000
        await fleet.tell(("one", first.address), ("three", second.address))
        found = await fleet.fetch()

        assert files_of(found.path) == NEEDED
        assert second.answered_bytes < len(WEIGHTS) - 1_500_000


async def test_the_only_host_is_asked_again_for_the_rest(fleet: Fleet) -> None:
    async with sending(fleet, "one") as one, TcpProxy(one.address) as network:
        one.bytes_per_s = 2_000_000
        await fleet.tell(("one", network.address))
        fetching = asyncio.create_task(fleet.fetch())
        await eventually(lambda: network.answered_bytes > 1_000_000)
        network.cut()
        assert not fetching.done()
        one.bytes_per_s = FAST

        assert files_of((await fetching).path) == NEEDED
        assert network.answered_bytes < 1.5 * len(WEIGHTS)


async def test_a_killed_fetch_leaves_no_snapshot_and_the_next_one_continues(fleet: Fleet) -> None:
    """As a worker that is killed does, which leaves part of a blob."""
    async with sending(fleet, "one") as one, TcpProxy(one.address) as network:
        await fleet.tell(("one", network.address))
        fleet.partial.parent.mkdir(parents=True)
        fleet.partial.write_bytes(WEIGHTS[:2_500_000])

        assert files_of((await fleet.fetch()).path) == NEEDED
        assert network.answered_bytes < 1_000_000


async def test_a_wrong_beginning_is_fetched_anew(fleet: Fleet) -> None:
    async with sending(fleet, "one"):
        fleet.partial.parent.mkdir(parents=True)
        fleet.partial.write_bytes(bytes(1000))

        assert files_of((await fleet.fetch()).path) == NEEDED


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
async def test_a_file_with_other_content_is_thrown_away_and_taken_from_another_host(fleet: Fleet, name: str) -> None:
    blob = Path(hub.folder_name(MODEL), "blobs", etag(name, FILES[name]))
    async with sending(fleet, "one") as one:
        (one.cache / blob).write_bytes(bytes(len(FILES[name])))
        with pytest.raises(
            ModelDownloadFailed, match=rf"{name} of host 'one' is not what it announced: .*[0-9a-f]{{40}}"
        ):
            await fleet.fetch()
        assert fleet.has_no_snapshot()
        assert not (fleet.cache / blob).exists()
        assert not list((fleet.repository / "blobs").glob("*.incomplete"))

        async with sending(fleet, "three"):
            assert files_of((await fleet.fetch()).path) == NEEDED


async def test_a_host_with_other_files_of_the_commit_is_not_mixed_with_the_first(fleet: Fleet) -> None:
    others = {**FILES, "model.safetensors": bytes(3_000_000)}
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(sending(fleet, "one"))
        three = await stack.enter_async_context(sending(fleet, "three", others))
        network = await stack.enter_async_context(TcpProxy(one.address))
        network.cut_after = 1_000_000
        await fleet.tell(("one", network.address), ("three", three.address))
        with pytest.raises(Unavailable, match=r"three has another model\.safetensors"):
            await fleet.fetch()
    assert fleet.has_no_snapshot()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


async def test_a_model_that_does_not_fit_is_not_begun(fleet: Fleet, small_disk: Path) -> None:
    fleet.cache.symlink_to(small_disk)
    (small_disk / "other").write_bytes(bytes(2_000_000))
    async with sending(fleet, "one"):
        with pytest.raises(StorageFull, match=r"blobs: model 'somebody/tiny' needs 3,000,0\d\d more bytes, and 2,"):
            await fleet.fetch()
        assert list((fleet.repository / "blobs").iterdir()) == []

        (small_disk / "other").unlink()
        assert files_of((await fleet.fetch()).path) == NEEDED


async def test_a_disk_that_becomes_full_meanwhile_gets_the_room_back(fleet: Fleet, small_disk: Path) -> None:
    fleet.cache.symlink_to(small_disk)
    async with sending(fleet, "one") as one:
        one.bytes_per_s = 1_000_000
        by = fleet.neighbours()
        fetching = asyncio.create_task(fleet.fetch(by=by))
        await eventually(lambda: by.progress.bytes_done > 500_000)
        with suppress(OSError), (small_disk / "other").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        one.bytes_per_s = FAST
        with pytest.raises(StorageFull, match=rf"{BLOB}\.incomplete: No space left .* bytes of model\.safetensors are"):
            await fetching
        assert not fleet.partial.exists()
        assert fleet.has_no_snapshot()

        (small_disk / "other").unlink()
        assert files_of((await fleet.fetch()).path) == NEEDED


async def test_two_workers_of_a_host_fetch_the_files_once(fleet: Fleet) -> None:
    async with sending(fleet, "one") as one, TcpProxy(one.address) as network:
        await fleet.tell(("one", network.address))
        first, second = await asyncio.gather(fleet.fetch(), fleet.fetch())

        assert first == second
        assert network.answered_bytes < 1.5 * len(WEIGHTS)


async def test_a_host_that_sends_to_enough_others_is_waited_for(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_models, "MAX_STREAMS", 1)
    async with sending(fleet, "one") as one, TcpProxy(one.address) as network:
        await fleet.tell(("one", network.address))
        taker = await asking(fleet, network.address)
        assert "commit" in await taker.receive()

        fetching = asyncio.create_task(fleet.fetch())
        handshake_and_list = network.answered_bytes
        await eventually(lambda: network.answered_bytes > 4 * handshake_and_list)  # it has asked again and again
        assert network.answered_bytes < len(WEIGHTS)
        assert not fetching.done()
        await taker.send(end=True)

        assert files_of((await fetching).path) == NEEDED
        await taker.close()


async def test_hosts_that_stay_busy_are_given_up(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_models, "MAX_STREAMS", 0)
    monkeypatch.setattr(neighbours, "BUSY_LIMIT_S", 0.2)
    async with sending(fleet, "one"):
        with pytest.raises(Unavailable, match="one sends models to others"):
            await fleet.fetch()


async def test_a_host_that_falls_silent_is_given_up(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "SILENCE_LIMIT_S", 0.5)
    monkeypatch.setattr(neighbours, "ANSWER_LIMIT_S", 0.5)
    monkeypatch.setattr(neighbours, "HANDSHAKE_LIMIT_S", 0.5)
    async with sending(fleet, "one") as one, TcpProxy(one.address) as network:
        one.bytes_per_s = 2_000_000
        await fleet.tell(("one", network.address))
        fetching = asyncio.create_task(fleet.fetch())
        await eventually(lambda: network.answered_bytes > 500_000)
        network.freeze()
        with pytest.raises(Unavailable, match=r"cannot be fetched from other hosts: one: "):
            await fetching
    assert fleet.has_no_snapshot()
    assert fleet.partial.stat().st_size > 0  # for the next one


async def test_the_files_of_all_senders_together_keep_the_rate(fleet: Fleet) -> None:
    """By the clock of what was promised, not by that of the machine: a slower one is no failure."""
    async with sending(fleet, "one") as one:
        one.bytes_per_s = 2_000_000
        began = time.monotonic()
        await fleet.fetch()
        assert time.monotonic() - began > (len(WEIGHTS) - host_models.PIECE_BYTES) / one.bytes_per_s * 0.9


# Who may ask, and for what.


async def asking(fleet: Fleet, address: str, by: str = "two", **request: object) -> HostLink:
    link = await connect(HostAddress("one", address), fleet.nodes.identity(by))
    await link.send(**{"op": "model", "model_id": MODEL, "revision": None, **request})
    return link


@pytest.mark.parametrize(
    ("request_", "refusal"),
    [
        ({"revision": "../../../../two"}, ModelNotFound),
        ({"revision": "/etc/hostname"}, ModelNotFound),
        ({"revision": 1}, InvalidInput),
        ({"model_id": "../somebody/tiny"}, ModelNotFound),
        ({"model_id": "/etc"}, ModelNotFound),
        ({"model_id": None}, InvalidInput),
    ],
)
async def test_names_are_no_paths(fleet: Fleet, request_: dict[str, object], refusal: type[TeimgrError]) -> None:
    async with sending(fleet, "one") as one:
        link = await asking(fleet, one.address, **request_)
        with pytest.raises(refusal):
            await link.receive()
        await link.close()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../../refs/main", "/etc/hostname", "", 1, ["config.json"]])
async def test_only_files_of_the_list_are_sent(fleet: Fleet, name: object) -> None:
    async with sending(fleet, "one") as one:
        link = await asking(fleet, one.address)
        assert {each["name"] for each in (await link.receive())["files"]} == set(NEEDED)
        await link.send(file=name, start=0)
        with pytest.raises(InvalidInput):
            await link.receive()
        await link.close()


@pytest.mark.parametrize("start", [-1, len(WEIGHTS) + 1])
async def test_a_file_begins_within_itself(fleet: Fleet, start: int) -> None:
    async with sending(fleet, "one") as one:
        link = await asking(fleet, one.address)
        await link.receive()
        await link.send(file="model.safetensors", start=start)
        with pytest.raises(InvalidInput, match="start: must be 0 to 3000000"):
            await link.receive()
        await link.close()


async def test_a_snapshot_with_a_link_out_of_the_cache_is_not_sent(fleet: Fleet) -> None:
    (fleet.folder / "secret").write_text("{}")
    async with sending(fleet, "one") as one:
        snapshot = one.cache / hub.folder_name(MODEL) / "snapshots" / SHA
        (snapshot / "vocab.json").symlink_to(fleet.folder / "secret")
        link = await asking(fleet, one.address)
        with pytest.raises(Forbidden, match=r"vocab\.json leads out"):
            await link.receive()
        await link.close()


async def test_a_ref_that_leads_out_of_the_cache_is_not_followed(fleet: Fleet) -> None:
    async with sending(fleet, "one") as one:
        outside = fleet.folder / "outside"
        lay_out(outside, MODEL, FILES)
        snapshot = outside / hub.folder_name(MODEL) / "snapshots" / SHA
        (one.cache / hub.folder_name(MODEL) / "refs" / "main").write_text(str(snapshot))
        link = await asking(fleet, one.address)
        with pytest.raises(ModelNotFound, match="leads out of its snapshots"):
            await link.receive()
        await link.close()


async def test_strangers_and_removed_hosts_get_nothing(fleet: Fleet) -> None:
    async with sending(fleet, "one") as one:
        stranger = FleetNeighbours(fleet.agent.socket, FleetNodes(fleet.folder / "other").identity("two"), fleet.cache)
        with pytest.raises(Unavailable, match="one: "):
            await fleet.fetch(by=stranger)
        write_removed(fleet.nodes.folder("one"), {"two": time.time() + 10})
        with pytest.raises(Unavailable, match="one: the connection was lost"):
            await fleet.fetch()
        write_removed(fleet.nodes.folder("one"), {})
        write_removed(fleet.nodes.folder("two"), {"one": time.time() + 10})
        with pytest.raises(Unavailable, match="node 'one' was removed"):
            await fleet.fetch()
        write_removed(fleet.nodes.folder("two"), {})
        await fleet.tell(("four", one.address))
        with pytest.raises(Unavailable, match=r"certificate there is that of spiffe://teimgr/node/one"):
            await fleet.fetch()
    assert fleet.has_no_snapshot()


class Liar(HostModels):
    """A host that is taken over, and answers what `change` makes of the truth."""

    change: Callable[[Offer], Offer]

    def find(self, model_id: str, revision: str | None) -> Offer | None:
        offer = super().find(model_id, revision)
        assert offer is not None
        return type(self).change(offer)


def renamed(name: str) -> Callable[[Offer], Offer]:
    def change(offer: Offer) -> Offer:
        file, path = offer.files["tokenizer.json"]
        return Offer(offer.commit, {**offer.files, name: (replace(file, name=name), path)})

    return change


@pytest.mark.parametrize(
    "change",
    [
        renamed("../../../../evil.json"),
        renamed("/tmp/evil.json"),
        renamed("a/../../evil.json"),
        renamed("a\\..\\evil.json"),
        lambda offer: replace(offer, commit="../../evil"),
        lambda offer: replace(offer, files={}),
        lambda offer: replace(
            offer, files={name: (replace(file, blob="../evil"), path) for name, (file, path) in offer.files.items()}
        ),
        lambda offer: replace(
            offer, files={name: (replace(file, size_bytes=-1), path) for name, (file, path) in offer.files.items()}
        ),
    ],
)
async def test_a_list_that_leads_out_of_the_cache_is_refused(fleet: Fleet, change: Callable[[Offer], Offer]) -> None:
    kind = type("Changed", (Liar,), {"change": staticmethod(change)})
    async with sending(fleet, "one", kind=kind):
        with pytest.raises(Unavailable, match="its list of files is malformed"):
            await fleet.fetch()
    assert not list(fleet.folder.rglob("evil*"))
    assert not fleet.repository.exists()


# The agent.


async def test_an_agent_that_knows_no_hosts_yet_is_waited_for(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    by = fleet.neighbours()
    asked = asyncio.create_task(asyncio.to_thread(by.order))
    await eventually(lambda: fleet.agent._connections)
    await fleet.tell(models_from="neighbours-first")
    assert await asked == "neighbours-first"


async def test_a_daemon_that_never_tells_leaves_the_hub(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "_FLEET_LIMIT_S", 0.05)
    assert await asyncio.to_thread(fleet.neighbours().order) == "hub-first"
    with pytest.raises(Unavailable, match="the daemon has not sent the list of hosts yet"):
        await fleet.fetch()


async def test_a_daemon_that_has_just_begun_does_not_make_hosts_forgotten(fleet: Fleet) -> None:
    async with sending(fleet, "one"):
        reader, writer = await asyncio.open_unix_connection(str(fleet.agent.socket))
        write_line(writer, op="facts", fleet=FleetFacts(models_from="hub-only").to_dict())
        assert "facts" in (await read_message(reader) or {})
        writer.close()
        assert fleet.agent.fleet.models_from == "hub-only"
        assert files_of((await fleet.fetch()).path) == NEEDED


# A worker.


@pytest.mark.timeout(240)  # a new interpreter imports torch
async def test_a_worker_without_the_model_and_the_hub_loads_it_from_another_host(fleet: Fleet, tmp_path: Path) -> None:
    model = build("bert", tmp_path / "model")
    files = files_of(model)
    worker = {"host": "two", "identity_dir": str(fleet.nodes.identity("two").folder)}
    environ = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(fleet.cache)}
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(sending(fleet, "one", files))
        one.bytes_per_s = sum(map(len, files.values())) // 8  # so that the first report of the download comes before
        far = stack.enter_context(WorkerProcess(MODEL, environ=environ, agent_socket=str(fleet.agent.socket), **worker))
        async with asyncio.timeout(3 * LIMIT_S):
            link = await far.link()
            watch = link.post(Method.WATCH)
            facts = await link.state(watch, "downloading", "ready", "failed")
            one.bytes_per_s = FAST
            assert facts["state"] == "downloading"
            assert "from host 'one': " in facts["reason"]
            facts = await link.state(watch, "ready", "failed")
        assert facts["state"] == "ready", far.log
        assert facts["model"]["commit"] == SHA

        answer = await (await far.link()).ask(Method.EMBED, embed_request("fog"))
        assert len(answer.vector) == facts["model"]["dimension"]


async def test_an_agent_learns_that_its_host_serves(fleet: Fleet) -> None:
    listed = asyncio.create_task(fleet.agent.listed("three"))
    await fleet.tell(("one", HOST))
    assert not listed.done()
    await fleet.tell(("three", HOST))
    async with asyncio.timeout(60):
        await listed
