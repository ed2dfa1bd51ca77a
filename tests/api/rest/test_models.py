"""The routes of the models, by the contract and the additions to it, over a real registry and a hub on loopback."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.api.page_parts import parts
from tests.support.hub_server import SHA, Hub
from tests.support.rest_listener import Fleet, Front, listening

from teimgr.api.rest.models import ModelInfo
from teimgr.config.settings import Settings
from teimgr.control.placement.hosts import GpuInventory, Inventory
from teimgr.control.registry.cache import HubCache
from teimgr.control.registry.registry import Registry
from teimgr.observability.exposition import text
from teimgr.observability.metrics import DaemonMetrics

MODEL = "somebody/tiny"
QUOTED = "somebody%2Ftiny"
FILES = {
    "config.json": json.dumps({"model_type": "bert", "hidden_size": 32, "vocab_size": 100}).encode(),
    "model.safetensors": os.urandom(100_000),
    "tokenizer.json": b"{}",
}
ALWAYS = {"model_id", "status", "downloaded", "added_at", "used_by"}


@pytest.fixture
def hub() -> Any:
    with Hub(MODEL, FILES) as hub:
        yield hub


@pytest.fixture
async def front(settings: Settings, tmp_path: Path, hub: Hub) -> AsyncIterator[Front]:
    made: list[Registry] = []

    def registry(fleet: Fleet, metrics: DaemonMetrics) -> Registry:
        own = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environ = own | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        gpus = GpuInventory({}, lambda: Inventory(reason="none in this test"))
        cache = HubCache(tmp_path / "hub")
        made.append(Registry(settings, None, gpus, metrics, fleet.list, cache, environ))  # type: ignore[arg-type]
        return made[-1]

    settings = replace(settings, models=("configured/model",))
    async with (
        listening(settings, registry, parts=parts(settings)) as front,
        aiohttp.ClientSession(front.url) as front.http,
    ):
        yield front
        await made[0].close()


async def add(front: Front, model_id: str, status: int = 201, **more: Any) -> Any:
    return await front.call("POST", "/models", status, json={"model_id": model_id} | more)


async def events(reply: aiohttp.ClientResponse) -> list[tuple[str, Any]]:
    """All of a stream, which must end."""
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    found = []
    for block in (await reply.text()).split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@pytest.mark.clause("M2.1-models", "M2.8-discovery")
async def test_the_list_is_sorted_and_starts_with_the_configured_ones(front: Front) -> None:
    await add(front, "z/last")
    await add(front, "a/first")
    assert [model["model_id"] for model in await front.call("GET", "/models", 200)] == [
        "a/first",
        "configured/model",
        "z/last",
    ]


async def test_a_model_of_an_instance_is_listed_with_its_users(front: Front) -> None:
    await front.create("one", model_id="used/model")
    (_, used) = await front.call("GET", "/models", 200)
    assert (used["model_id"], used["used_by"], used["status"]) == ("used/model", ["one"], "available")
    async with front.http.get("/ui/models") as reply:  # there may be no such model
        (line,) = re.findall(r'data-model="used/model".*?</tr>', await reply.text(), re.DOTALL)
    assert ">not downloaded<" in line


@pytest.mark.clause("M2.1-models", "M2.8-info")
async def test_adding_is_201_and_then_200(front: Front) -> None:
    new = await add(front, MODEL)
    assert set(new) == ALWAYS
    assert (new["model_id"], new["status"], new["downloaded"]) == (MODEL, "available", False)
    assert await add(front, MODEL, 200) == new


@pytest.mark.parametrize(("body", "status"), [({}, 422), ({"model_id": 3}, 422), ({"model_id": ""}, 422)])
async def test_a_wrong_body_is_refused(front: Front, body: Any, status: int) -> None:
    await front.call("POST", "/models", status, json=body)


async def test_more_wrong_bodies(front: Front) -> None:
    failure = await add(front, MODEL, 422, revison="v1")
    assert "did you mean 'revision'" in failure["error"]
    assert (await add(front, "a/b/c", 400))["code"] == "VALIDATION_ERROR"
    await front.call("POST", "/models", 415, data=b"x")


@pytest.mark.clause("M2.1-model", "M2.8-encoding")
@pytest.mark.parametrize("path", [QUOTED, MODEL, "somebody%252Ftiny"])
async def test_an_id_may_be_quoted_once_twice_or_not_at_all(front: Front, path: str) -> None:
    await add(front, MODEL)
    async with front.http.get(f"{front.url}/models/{path}", allow_redirects=False) as reply:
        assert (await reply.json())["model_id"] == MODEL


@pytest.mark.clause("M2.1-model", "M2.8-encoding")
async def test_unknown_and_undecodable_ids(front: Front) -> None:
    failure = await front.call("GET", "/models/no%2Fsuch", 404)
    assert (failure["code"], failure["error"]) == ("MODEL_NOT_FOUND", "Model 'no/such' not found")
    failure = await front.call("GET", "/models/%25ff", 400)
    assert failure["error"] == "Validation error: Invalid model_id encoding"
    for method, path in (("DELETE", "no%2Fsuch"), ("POST", "no%2Fsuch/load"), ("GET", "no%2Fsuch/download/events")):
        assert (await front.call(method, f"/models/{path}", 404))["code"] == "MODEL_NOT_FOUND"


async def test_a_directory_that_nobody_named_is_not_shown(front: Front, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    quoted = str(folder).replace("/", "%2F")
    await front.call("GET", f"/models/{quoted}", 404)
    await add(front, str(folder))
    assert (await front.call("GET", f"/models/{quoted}", 200))["files"] == [{"path": "config.json", "size_bytes": 2}]
    assert (await front.call("DELETE", f"/models/{quoted}", 400))["code"] == "VALIDATION_ERROR"
    assert (folder / "config.json").exists()


async def test_what_a_broken_download_left_is_shown_and_can_be_deleted(front: Front, tmp_path: Path) -> None:
    (tmp_path / "hub" / "models--half--there" / "blobs").mkdir(parents=True)
    assert "half/there" in [model["model_id"] for model in await front.call("GET", "/models", 200)]
    assert (await front.call("GET", "/models/half%2Fthere", 200))["status"] == "available"
    await front.call("DELETE", "/models/half%2Fthere", 200)
    await front.call("GET", "/models/half%2Fthere", 404)


@pytest.mark.clause("M2.8-download")
async def test_a_download_answers_when_it_is_done(front: Front, tmp_path: Path) -> None:
    model = await front.call("POST", f"/models/{QUOTED}/download", 200)
    ModelInfo.model_validate(model)
    assert (model["status"], model["downloaded"], model["commit"]) == ("downloaded", True, SHA)
    assert Path(model["cache_path"]) == tmp_path / "hub" / "models--somebody--tiny" / "snapshots" / SHA
    assert model["cache_size_bytes"] == sum(map(len, FILES.values()))
    assert model["metadata"] == {"model_type": "bert", "hidden_size": 32, "vocab_size": 100}
    assert {file["path"] for file in model["files"]} == set(FILES)
    assert model == await front.call("POST", f"/models/{QUOTED}/download", 200)
    assert model == await front.call("GET", f"/models/{MODEL}", 200)
    page = text(await front.metrics.page())
    assert 'teimgr_model_downloads_total{outcome="done"} 1.0' in page
    assert f"teimgr_model_download_bytes_total {float(model['cache_size_bytes'])}" in page


async def test_a_body_that_is_no_json_is_ignored_and_json_is_judged(front: Front) -> None:
    path = f"/models/{QUOTED}/download"
    await front.call("POST", path, 200, data=b"whatever", headers={"Content-Type": "text/plain"})
    await front.call("POST", path, 200, data=b"", headers={"Content-Type": "application/json"})
    await front.call("POST", path, 400, data=b"{", headers={"Content-Type": "application/json"})
    await front.call("POST", path, 422, json={"revision": 3})
    assert (await front.call("POST", path, 404, json={"revision": "v9"}))["code"] == "MODEL_NOT_FOUND"


@pytest.mark.clause("M2.8-busy")
async def test_without_waiting_it_is_202_and_busy(front: Front, hub: Hub) -> None:
    hub.open.clear()
    model = await front.call("POST", f"/models/{QUOTED}/download?wait=false", 202)
    assert model["status"] == "downloading"
    assert model["progress"]["bytes_done"] == 0
    failure = await front.call("POST", f"/models/{QUOTED}/download", 409)
    assert (failure["code"], failure["error"]) == ("MODEL_BUSY", f"Model '{MODEL}' is already downloading")
    assert (await front.call("POST", f"/models/{QUOTED}/load", 409))["code"] == "MODEL_BUSY"
    assert (await front.call("DELETE", f"/models/{QUOTED}", 409))["code"] == "MODEL_BUSY"
    hub.open.set()
    async with front.http.get(f"/models/{MODEL}/download/events") as reply:
        assert (await events(reply))[-1][0] == "done"
    assert (await front.call("GET", f"/models/{MODEL}", 200))["downloaded"] is True


async def test_a_download_as_a_stream_of_events(front: Front) -> None:
    async with front.http.post(f"/models/{MODEL}/download", headers={"Accept": "text/event-stream"}) as reply:
        assert reply.status == 200
        *progress, (last, model) = await events(reply)
    assert {name for name, _ in progress} == {"progress"}
    assert progress[-1][1]["phase"] == "done"
    assert progress[-1][1]["bytes_done"] == progress[-1][1]["bytes_total"] == sum(map(len, FILES.values()))
    assert (last, model["status"]) == ("done", "downloaded")
    async with front.http.get(f"/models/{MODEL}/download/events") as reply:
        assert [name for name, _ in await events(reply)] == ["model"]


async def test_a_stream_says_why_it_failed(front: Front, hub: Hub) -> None:
    hub.gated = True
    async with front.http.post(f"/models/{MODEL}/download", headers={"Accept": "text/event-stream"}) as reply:
        name, failure = (await events(reply))[-1]
    assert (name, failure["code"], set(failure)) == ("failed", "MODEL_GATED", {"error", "code", "timestamp"})


@pytest.mark.clause("M2.8-download")
async def test_gated_missing_and_broken_have_codes_of_their_own(front: Front, hub: Hub) -> None:
    failure = await front.call("POST", "/models/no%2Fsuch/download", 404)
    assert failure["code"] == "MODEL_NOT_FOUND"
    await front.call("GET", "/models/no%2Fsuch", 404)
    hub.forged["model.safetensors"] = 9
    failure = await front.call("POST", f"/models/{MODEL}/download", 500)
    assert failure["code"] == "MODEL_DOWNLOAD_FAILED"
    assert failure["error"].startswith(f"Failed to download model '{MODEL}': model.safetensors")
    model = await front.call("GET", f"/models/{MODEL}", 200)
    assert (model["status"], model["download_error"]) == ("available", failure["error"])
    hub.gated = True
    assert (await front.call("POST", f"/models/{MODEL}/download", 403))["code"] == "MODEL_GATED"


async def test_a_caller_that_goes_away_does_not_end_the_download(front: Front, hub: Hub) -> None:
    hub.open.clear()
    limit = aiohttp.ClientTimeout(total=0.5)
    with pytest.raises(TimeoutError):
        await front.http.post(f"/models/{MODEL}/download", timeout=limit)
    assert (await front.call("GET", f"/models/{MODEL}", 200))["status"] == "downloading"
    hub.open.set()
    async with front.http.get(f"/models/{MODEL}/download/events") as reply:
        assert (await events(reply))[-1][0] == "done"


async def test_a_model_is_deleted_unless_it_is_used(front: Front, tmp_path: Path) -> None:
    model = await front.call("POST", f"/models/{MODEL}/download", 200)
    await front.create("one", model_id=MODEL)
    failure = await front.call("DELETE", f"/models/{QUOTED}", 409)
    assert failure["code"] == "MODEL_IN_USE"
    assert "used by one" in failure["error"]
    await front.call("DELETE", "/instances/one", 200)
    assert await front.call("DELETE", f"/models/{QUOTED}", 200) == model
    await front.call("GET", f"/models/{QUOTED}", 404)
    assert not list((tmp_path / "hub").glob("models--*"))


async def test_a_trial_that_cannot_be_is_refused(front: Front) -> None:
    await add(front, MODEL)
    failure = await front.call("POST", f"/models/{QUOTED}/load", 500)
    assert failure["code"] == "MODEL_LOAD_FAILED"
    assert "Use POST /models/{model_id}/download first." in failure["error"]
    assert (await front.call("POST", f"/models/{QUOTED}/load", 400, json={"gpu_id": 3}))["code"] == "INVALID_GPU_ID"
    await front.call("POST", f"/models/{QUOTED}/load", 422, json={"gpu_id": 3, "device": "cpu"})
    await front.call("POST", f"/models/{QUOTED}/load", 422, json={"gpu": 3})


async def test_the_document_has_every_route_of_the_models(front: Front) -> None:
    paths = front.app.openapi()["paths"]
    assert {path: set(verbs) for path, verbs in paths.items() if path.startswith("/models")} == {
        "/models": {"get", "post"},
        "/models/{model_id}": {"get", "delete"},
        "/models/{model_id}/download": {"post"},
        "/models/{model_id}/download/events": {"get"},
        "/models/{model_id}/load": {"post"},
    }
