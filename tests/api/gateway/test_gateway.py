"""Requests that the gateway refuses before a worker gets them, and the model that a body names."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack
from io import BytesIO
from typing import Any

import aiohttp
import pytest
from tests.mux.conftest import start_worker
from tests.support.frame_worker import FrameWorker, Request, hold, pack_reply
from tests.support.mux_process import running
from tests.support.polling import eventually
from tests.support.rest_listener import Fleet

from teimgr.api.gateway import bodies, model_cards
from teimgr.api.gateway.bodies import PARSED_BYTES, Bodies, ModelNames, ModelScans, ReadBody
from teimgr.api.gateway.gateway import Gateway, go_duration
from teimgr.api.gateway.model_cards import CardRows, ModelCards
from teimgr.api.gateway.routes import kinds_of
from teimgr.api.rest.app import create_app
from teimgr.config.settings import Settings
from teimgr.errors import AmbiguousInstance, ModelNotFound, Overloaded, TeimgrError, Unavailable
from teimgr.http.auth.policy import ANONYMOUS, Caller, Right
from teimgr.http.server import bind, serving
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import InstanceSpec, InstanceView, LoadedModel, RouteEntry, RoutingSnapshot, State, WorkerEndpoint
from teimgr.wire.frames import MAX_HEAD_BYTES, HttpReply
from teimgr.wire.routing.directory import Directory
from teimgr.wire.routing.router import Router, router_view

__all__ = ["start_worker"]


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[aiohttp.ClientSession]:
    inference = Gateway(settings, Directory(), DaemonMetrics())
    app, sock = create_app(Fleet(settings), settings, DaemonMetrics(), gateway=inference), bind("127.0.0.1", 0)
    async with (
        serving(app, sock, direct=app.state.direct),
        aiohttp.ClientSession(f"http://127.0.0.1:{sock.getsockname()[1]}") as session,
    ):
        yield session
    await inference.close()


@pytest.fixture(scope="module")
def scans() -> Iterator[ModelScans]:
    made = ModelScans()
    yield made
    made.close()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/rerank", "/instances/a/embed"])
async def test_too_long_a_header_is_refused_and_no_defect(client: aiohttp.ClientSession, path: str) -> None:
    async with client.post(path, json={"model": "a"}, headers={"Accept": "x" * MAX_HEAD_BYTES}) as reply:
        assert (reply.status, "too long" in await reply.text()) == (431, True)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"m\\u006fdel": "a\\"b"}', 'a"b'),
        (b'{"input": {"model": "no"}, "model" :\n"yes"}', "yes"),
        (b'{"input": "model", "x": ["model", "a"]}', None),
        (b'[{"model": "no"}]', None),
        (b'{"a": 1} {"model": "no"}', None),
        (b"", None),
        (b'"model": "no"', None),
        (b'{"model": "half', None),
        (b'{"model": "first", "model": "last"}', "last"),
        (b'{"m\\u006fdel": "first", "model": "last"}', "last"),
        (b'{"model": "first", "input": ["a", {"model": "no"}], "mod\\u0065l": "last"}', "last"),
        (b'{"model": "first", "x": {"model": "no"}, "input": "\\u006d"}', "first"),
        (b'{"model": "first", "model": 5}', None),
        (b'{"model": "whole", "input": broken', "whole"),
        (b'{"input": "a \\"model\\": \\"no\\"", "model": "yes"}', "yes"),
        (b'{"model": 5}', None),
    ],
)
async def test_only_a_key_of_the_outer_object_counts(body: bytes, expected: str | None, scans: ModelScans) -> None:
    assert await scans.model_of(body) == expected
    assert await scans.model_of(body + b" " * PARSED_BYTES) == expected  # scanned
    assert await scans.model_of(b"{ }" + body, 3) == expected


@pytest.mark.parametrize("size", [64 * 1024, 2 * 1024 * 1024])
async def test_a_body_without_a_model_costs_no_more_than_its_size(client: aiohttp.ClientSession, size: int) -> None:
    began = time.monotonic()
    async with client.post("/v1/embeddings", data=BytesIO(b'{"input": "' + b'\\"' * (size // 2))) as reply:
        assert reply.status == 400  # no instance runs
    assert time.monotonic() - began < 5  # once 25 s for 64 KiB, the loop stalled throughout


@pytest.fixture
async def fleet(settings: Settings, start_worker: Any) -> AsyncIterator[tuple[str, Gateway, FrameWorker]]:
    """Address of a gateway over the instances `hung`, which never answers, and `well`; the gateway; the hung worker."""

    def answer(request: Request) -> None:
        request.reply(pack_reply(HttpReply(200, {}, b"well")))

    hung, well = await start_worker(hold), await start_worker(answer)
    directory = Directory()
    directory.publish(running("hung", hung, model_id="a"))
    directory.publish(running("well", well, model_id="b"))
    inference = Gateway(settings, directory, DaemonMetrics())
    sock = bind("127.0.0.1", 0)
    app = create_app(Fleet(settings), settings, DaemonMetrics(), gateway=inference)
    async with serving(app, sock, direct=app.state.direct):
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", inference, hung
    await inference.close()


def sent(client: aiohttp.ClientSession, instance: str, size: int) -> Any:
    """A chunked request for `instance` of about `size` bytes."""

    async def parts() -> AsyncIterator[bytes]:
        yield json.dumps({"inputs": "x" * size}).encode()

    headers = {"content-type": "application/json"}
    return client.post(f"/instances/{instance}/embed", data=parts(), headers=headers)


async def test_calls_to_a_hung_instance_leave_room_for_others(
    fleet: tuple[str, Gateway, FrameWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies without a length count what came, and one instance holds a part of the budget at most."""
    url, inference, hung = fleet
    monkeypatch.setattr(bodies, "_INSTANCE_SHARE", inference._bodies.large.limit_bytes // 250_000)
    async with aiohttp.ClientSession(url) as client, asyncio.timeout(20):
        waiting = [asyncio.ensure_future(sent(client, "hung", 80_000)) for _ in range(3)]
        for _ in waiting:
            await hung.requests.get()
        assert 240_000 < inference._bodies.large.taken_bytes < 250_000

        async with sent(client, "hung", 80_000) as refused:
            assert (refused.status, "hung" in await refused.text()) == (429, True)
        async with sent(client, "well", 80_000) as served:
            assert (served.status, await served.text()) == (200, "well")
        for each in waiting:
            each.cancel()
        await eventually(lambda: inference._bodies.large.taken_bytes == 0)
        assert not inference._bodies._held


async def test_one_connection_leaves_room_for_others(fleet: tuple[str, Gateway, FrameWorker]) -> None:
    """Without keys a connection may hold half of the budget, whatever its bodies are."""
    _, inference, _ = fleet
    bodies = inference._bodies
    first, second = bodies._large_shares.charge("one"), bodies._large_shares.charge("one")
    other = bodies._large_shares.charge("another")
    assert first.try_take(bodies.large.limit_bytes // 2)
    assert not second.try_take(1)
    assert other.try_take(bodies.large.limit_bytes // 2)
    for each in (first, second, other, other):
        each.release()
    assert bodies.large.taken_bytes == 0
    assert not bodies._large_shares._parts


def naming(*instances: str, caller: str = "*", **aliases: str) -> ModelNames:
    """Instances given as `name=model`, each with a worker, unless it is `name=model=lost`."""
    entries = []
    for each in instances:
        name, model_id, *lost = each.split("=")
        endpoints = () if lost else (WorkerEndpoint(f"/nowhere/{name}", name),)
        entries.append(RouteEntry(name, model_id, State.RUNNING, None, 4, endpoints))
    router = Router()
    router.update(RoutingSnapshot(tuple(entries)))
    return ModelNames(router, lambda: aliases).restricted(
        router_view(Caller("k", frozenset(Right), (caller,)), router), shows_paths=True
    )


def test_an_instance_goes_before_an_alias_and_that_before_a_model() -> None:
    names = naming("a=m", "b=n", "m=o", a="b", n="a")
    assert names.lease("a").instance == "a"  # the instance, not the alias
    assert names.lease("n").instance == "a"  # the alias, not the model
    assert names.lease("m").instance == "m"
    assert names.lease("o").instance == "m"


@pytest.mark.parametrize("caller", ["*", "a"])
def test_a_model_whose_workers_are_lost_is_unavailable_and_not_unknown(caller: str) -> None:
    with pytest.raises(Unavailable, match=r"Instance 'a' is not running \(status: restarting\)"):
        naming("a=m=lost", caller=caller).lease("m")


def test_what_a_caller_may_not_use_is_not_told() -> None:
    names = naming("mine=m", "theirs=x", caller="mine", secret="theirs")
    assert names.names() == ["m", "mine"]
    for hidden in ("theirs", "x", "secret"):
        with pytest.raises(ModelNotFound, match=r"does not exist; there are 'm', 'mine'$"):
            names.lease(hidden)


def serving_kinds(*instances: str, caller: str = "*", **defaults: str) -> ModelNames:
    """Instances given as `name=state=word,word` of what they serve."""
    directory, router = Directory(), Router()
    directory.set_defaults(defaults)
    for each in instances:
        name, state, words = each.split("=")
        endpoints = (WorkerEndpoint(f"/nowhere/{name}", name),) if state == "running" else ()
        serves = tuple(filter(None, words.split(",")))
        directory.publish(RouteEntry(name, "m", State(state), None, 4, endpoints, serves))
    router.update(directory.snapshot())
    return ModelNames(router, dict).restricted(
        router_view(Caller("k", frozenset(Right), (caller,)), router), shows_paths=True
    )


RERANKING, CLASSIFYING = kinds_of("/rerank"), kinds_of("/classify")
FLEET = ("dense=running=embedding,dense", "ranker=running=reranker,scores", "labels=running=classifier,scores")


def test_without_a_model_the_only_instance_of_a_fitting_kind_answers() -> None:
    names = serving_kinds(*FLEET)
    for path, instance in (
        ("/rerank", "ranker"),
        ("/v1/embeddings", "dense"),
        ("/embeddings", "dense"),
        ("/classify", "labels"),
        ("/v1/score", "ranker"),
    ):
        assert names.lease(None, kinds_of(path)).instance == instance, path
    assert serving_kinds(*FLEET[:2]).lease("", CLASSIFYING).instance == "ranker"
    with pytest.raises(AmbiguousInstance, match=r"the running ones are 'dense', 'ranker', 'labels'$"):
        names.lease(None, kinds_of("/tokenize"))


@pytest.mark.parametrize("state", ["running", "starting", "stopping", "failed", "stopped"])
def test_without_a_model_only_fitting_ones_are_named_and_waited_for(state: str) -> None:
    second = f"second={state}=reranker,scores"
    if state == "running":
        with pytest.raises(AmbiguousInstance, match=r"Say which model: the running ones are 'ranker', 'second'$"):
            serving_kinds(*FLEET, second).lease(None, RERANKING)
    else:
        assert serving_kinds(*FLEET, second).lease(None, RERANKING).instance == "ranker"
        with pytest.raises(Unavailable, match=f"'second' is not running .status: {state}"):
            serving_kinds(FLEET[0], second).lease(None, RERANKING)
    unknown = serving_kinds(*FLEET[:2], f"new={state}=")
    if state != "stopped":  # it may be a classifier, but there is a reranker, which classifies
        assert unknown.lease(None, CLASSIFYING).instance == "ranker"
    with pytest.raises(AmbiguousInstance, match=r"no instance is of kind reranker$"):
        serving_kinds(FLEET[0], "other=running=embedding,dense").lease(None, RERANKING)


def test_a_default_for_a_kind_gets_requests_without_a_model_whether_or_not_it_runs() -> None:
    two = (*FLEET, "second=running=reranker,scores")
    assert serving_kinds(*two, reranker="second").lease(None, RERANKING).instance == "second"
    assert (
        serving_kinds(*two, reranker="nobody", embedding="dense").lease(None, kinds_of("/v2/embed")).instance == "dense"
    )
    with pytest.raises(Unavailable, match="'second' is not running"):
        serving_kinds(*FLEET, "second=starting=", reranker="second").lease(None, RERANKING)
    own = serving_kinds(*two, caller="ranker", reranker="second")
    assert own.lease(None, RERANKING).instance == "ranker"  # the default is not this caller's


def test_a_new_default_counts_at_once() -> None:
    directory, router = Directory(), Router()
    directory.subscribe(router.apply)
    for name in ("a", "b"):
        endpoint = WorkerEndpoint(f"/nowhere/{name}", name)
        directory.publish(RouteEntry(name, "m", State.RUNNING, None, 4, (endpoint,), ("reranker",)))
    for name in ("a", "b"):
        directory.set_defaults({"reranker": name})
        assert router.unnamed(RERANKING).instance_name == name
    directory.set_defaults({})
    with pytest.raises(AmbiguousInstance):
        router.unnamed(RERANKING)
    assert RoutingSnapshot.from_values(json.loads(directory.snapshot().to_json())) == directory.snapshot()


INFERENCE_KEY, READER = Caller("k", frozenset({Right.INFERENCE})), Caller("r", frozenset({Right.READ}))


def fleet_of_paths() -> Router:
    router = Router()
    router.update(
        RoutingSnapshot(
            (
                RouteEntry(
                    "mini", "/srv/secret/all-mini", State.RUNNING, None, 4, (WorkerEndpoint("/nowhere/m", "m"),)
                ),
                RouteEntry("lost", "/srv/secret/lost-mini", State.RUNNING, None, 4),
                RouteEntry("bad", "/srv/secret/bad", State.FAILED, "no file /srv/secret/bad/config.json", 4),
                RouteEntry("hub", "BAAI/bge-small", State.STOPPED, None, 4),
            )
        )
    )
    return router


@pytest.mark.parametrize("caller", [INFERENCE_KEY, Caller("k", frozenset({Right.INFERENCE}), ("*",))])
def test_a_client_of_inference_is_told_no_paths(caller: Caller) -> None:
    router = fleet_of_paths()
    aliases = {"other": "/srv/secret/lost-mini"}
    names = ModelNames(router, lambda: aliases).restricted(router_view(caller, router), caller.is_operator)

    assert names.names() == ["BAAI/bge-small", "bad", "hub", "lost", "mini", "other"]
    assert names.lease("/srv/secret/all-mini").instance == "mini"  # whoever knows the path may use it
    for model in ("min", "secret", "all-min", "/srv", "bad", "other", "lost", "nothing", "hub", "BAAI/bge"):
        with pytest.raises(TeimgrError) as caught:
            names.lease(model)
        assert "/srv/secret" not in caught.value.message, model
    assert caught.value.message.endswith("did you mean 'BAAI/bge-small'?")


def test_an_operator_is_told_paths_and_reasons() -> None:
    router = fleet_of_paths()
    for caller in (READER, ANONYMOUS):
        names = ModelNames(router, dict).restricted(router_view(caller, router), caller.is_operator)
        assert "/srv/secret/all-mini" in names.names()
        with pytest.raises(Unavailable, match="no file /srv/secret"):
            names.lease("bad")


def _view(kind: str | None, **model: Any) -> InstanceView:
    loaded = LoadedModel(
        model_id="/srv/secret/mini",
        model_sha=None,
        dtype="float32",
        device="cpu",
        kind=kind or "embedding",
        pooling="mean",
        dimension=384,
        max_input_length=256,
        max_batch_tokens=16384,
        batching="packed",
    )
    spec = InstanceSpec(name="mini", model_id="/srv/secret/mini", kind=kind)
    state, reason = (State.RUNNING, None) if model.get("runs") else (State.FAILED, "no file /srv/secret/mini/x")
    return InstanceView(spec=spec, state=state, reason=reason, model=loaded if model.get("runs") else None)


@pytest.mark.parametrize(
    ("kind", "known_as"),
    [
        ("embedding", "embedding"),
        ("sparse", "embedding"),
        ("multi-vector", "embedding"),
        ("reranker", "rerank"),
        ("classifier", "classifier"),
        (None, None),
    ],
)
def test_a_card_has_what_xinferences_client_reads_and_no_path(kind: str | None, known_as: str | None) -> None:
    def card(runs: bool, is_operator: bool) -> dict[str, Any]:
        views = [_view(kind, runs=runs)]
        return ModelCards(views, lambda name: "/srv/secret/mini", 0, "teimgr", is_operator).card("mini")

    for is_operator, root in ((True, "/srv/secret/mini"), (False, "mini")):
        loaded = card(True, is_operator)
        assert (loaded["model_type"], loaded["model_name"], loaded["root"]) == (known_as or "embedding", root, root)
        assert (loaded["max_tokens"], loaded["dimensions"]) == (256, 384)
        failed = card(False, is_operator)
        assert failed["model_type"] == known_as
        assert ("/srv/secret" in failed["last_error"]["message"]) is is_operator
        assert is_operator or "/srv/secret" not in str(loaded) + str(failed)


def test_a_name_of_megabytes_costs_nothing_and_is_not_said_again() -> None:
    began = time.process_time()
    with pytest.raises(ModelNotFound) as caught:
        naming("a=m").lease("x" * 10_000_000)
    assert len(caught.value.message) < 400
    assert time.process_time() - began < 0.5


def test_a_key_holds_half_of_what_may_wait_for_an_instance() -> None:
    budgets = Bodies(2**20)
    body = ReadBody(bytearray(), 0, 100, budgets.small)
    with ExitStack() as held:

        def hold(instance: str, key: str | None, count: int = 1) -> None:
            for _ in range(count):
                held.enter_context(budgets.held_for(instance, body, key))

        with pytest.raises(Overloaded, match="with the key 'team' wait for instance 'a'"):
            hold("a", "team", 20_000)
        hold("a", "other")
        hold("b", "team")
        with pytest.raises(Overloaded, match="Too many requests wait for instance 'a'"):
            hold("a", None, 20_000)
    assert not budgets._held


@pytest.mark.parametrize("form", ["team-{}-mini", "/srv/models/team-{}/sentence-transformers/all-MiniLM-L6-v2-{}"])
def test_an_unknown_name_in_a_large_fleet_is_answered_soon(form: str) -> None:
    router = fleet_of_paths()
    names = {f"a{number}": form.replace("{}", str(number)) for number in range(1000)}
    entries = (RouteEntry(name, id, State.STOPPED, None, 4) for name, id in names.items())
    router.update(RoutingSnapshot(tuple(entries)))
    unknown, took = form.replace("{}", "7") + "7x", []
    for _ in range(3):
        began = time.process_time()
        with pytest.raises(ModelNotFound, match="did you mean"):
            ModelNames(router, dict).lease(unknown)
        took.append(time.process_time() - began)
    assert min(took) < 0.05  # 0.1 and 0.5 s where each name is compared


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (41.724, "41.724s"), (360, "6m0s"), (7261, "2h1m1s")]
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text


async def test_the_list_of_models_makes_a_card_again_only_where_its_instance_has_changed() -> None:
    models = {"a": "org/other", "b": "org/model", "c": "org/other"}
    specs = {name: InstanceSpec(name=name, model_id=model, load="on_demand") for name, model in models.items()}
    states = dict.fromkeys(specs, State.UNLOADED)
    names, made = [*specs, "alias", "org/model"], []

    class Cards(ModelCards):
        def card(self, name: str) -> dict[str, Any]:
            made.append(name)
            return super().card(name)

    def cards(owner: str, caller: Caller) -> ModelCards:
        views = [InstanceView(spec=spec, state=states[name]) for name, spec in specs.items()]
        return Cards(views, {"alias": "org/model", "org/model": "org/model"}.get, 0, owner, caller.is_operator)

    rows = CardRows(cards)
    for name, spec in specs.items():
        rows.routed(name, RouteEntry(name=name, model_id=spec.model_id, state=State.UNLOADED))
    first = await rows.rows(names, "teimgr", ANONYMOUS, ["alias"])
    assert made == names
    made.clear()
    assert await rows.rows(names, "teimgr", ANONYMOUS, ["alias"]) == first
    assert made == ["alias"]
    made.clear()
    states["b"] = State.RUNNING
    rows.changed("b")
    found = [json.loads(row) for row in await rows.rows(names, "teimgr", ANONYMOUS, ["alias"])]
    assert made == ["b", "alias", "org/model"]
    assert [card["state"] for card in found] == ["available", "loaded", "available", "loaded", "loaded"]

    aliases = ["alias"]
    listed = await rows.listed(names, "teimgr", ANONYMOUS, aliases)
    assert json.loads(listed) == {"object": "list", "data": found, "models": found}
    assert await rows.listed(names, "teimgr", ANONYMOUS, aliases) is listed  # the same, while nothing changes
    states["b"] = State.UNLOADED
    rows.changed("b")
    assert json.loads(await rows.listed(names, "teimgr", ANONYMOUS, aliases))["data"][1]["state"] == "available"
    for some in ([], ["a"]):
        cards_of = json.loads(await rows.listed(some, "teimgr", ANONYMOUS))
        assert [len(cards_of["data"]), len(cards_of["models"])] == [len(some)] * 2


async def test_the_card_of_an_instance_says_that_calls_by_its_model_id_go_to_another_space() -> None:
    """Neither the list nor the log said why such an instance got no call."""
    specs = [
        InstanceSpec(name=name, model_id="m", pooling=pooling)
        for name, pooling in (("a", None), ("b", "cls"), ("c", None))
    ]
    states = dict.fromkeys("abc", State.RUNNING)

    def cards(owner: str, caller: Caller) -> ModelCards:
        views = [InstanceView(spec=spec, state=states[spec.name]) for spec in specs]
        return ModelCards(views, {"m": "m"}.get, 0, owner, caller.is_operator)

    rows = CardRows(cards)
    for spec in specs:
        rows.routed(spec.name, RouteEntry(name=spec.name, model_id="m", state=State.RUNNING))

    async def by_name_only() -> dict[str, str]:
        made = [json.loads(row) for row in await rows.rows(["a", "b", "c", "m"], "teimgr", ANONYMOUS)]
        return {card["id"]: card["by_name_only"] for card in made if "by_name_only" in card}

    assert await by_name_only() == {"b": "calls by model id use the embedding space of instance 'a'"}
    states["a"] = State.STOPPED
    rows.routed("a", RouteEntry(name="a", model_id="m", state=State.STOPPED))
    assert {name: text[-3:] for name, text in (await by_name_only()).items()} == {"a": "'b'", "c": "'b'"}
    rows.routed("b", None)
    specs.pop(1)
    assert await by_name_only() == {}
    for name in ("a", "c"):
        rows.routed(name, None)
    assert not rows._siblings, "a daemon whose calls declare models would keep one for each"


def test_the_cards_of_many_stopped_instances_of_a_model_look_at_each_of_them_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 cards of 2,000 held the event loop for 0.1 s: each card looked for a serving one among all."""
    seen: list[InstanceView] = []

    def counted(view: InstanceView, of_model: Iterable[InstanceView]) -> str | None:
        seen.extend(of_model)
        return None

    monkeypatch.setattr(model_cards, "other_space", counted)
    views = [InstanceView(spec=InstanceSpec(name=f"a{each}", model_id="m"), state=State.STOPPED) for each in range(50)]
    cards = ModelCards(views, dict.fromkeys((view.spec.name for view in views), "m").get, 0, "teimgr", True)
    assert [cards.card(view.spec.name)["state"] for view in views] == ["available"] * 50
    assert len(seen) <= 50
