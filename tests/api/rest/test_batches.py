"""Files and batches over HTTP: OpenAI's objects, pages and errors, and forms as clients send them."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from tests.support.credentials import AUTH, SECRETS
from tests.support.rest_listener import Front, listening

from teimgr.api.batches import Batches
from teimgr.api.gateway.gateway import Gateway
from teimgr.api.rest import files
from teimgr.config.auth import policy_of
from teimgr.config.sections import BatchSettings
from teimgr.config.settings import Settings
from teimgr.http.auth.policy import PolicyInForce
from teimgr.observability.metrics import DaemonMetrics
from teimgr.wire.routing.directory import Directory

MIB = 2**20


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[Front]:
    """A listener with API keys; nothing works batches off."""
    settings = replace(settings, auth=AUTH, batches=BatchSettings(max_file_mb=2, max_files=10))
    settings.prepare_folders()
    gateway, policy = Gateway(settings, Directory(), DaemonMetrics()), PolicyInForce(policy_of(AUTH))
    batches = Batches(settings, gateway, policy, DaemonMetrics())
    await batches.load()
    parts: dict[str, Any] = {"gateway": gateway, "batches": batches}
    headers = {"Authorization": f"Bearer {SECRETS['inference']}"}
    async with (
        listening(settings, parts=lambda fleet: parts) as front,
        aiohttp.ClientSession(front.url, headers=headers) as front.http,
    ):
        yield front
    batches.close()
    await gateway.close()


TEAM = {"headers": {"Authorization": f"Bearer {SECRETS['team']}"}}


def form(data: bytes = b"{}\n", **fields: str) -> aiohttp.FormData:
    built = aiohttp.FormData({"purpose": "batch"} | fields)
    built.add_field("file", io.BytesIO(data), filename="in.jsonl", content_type="application/jsonl")
    return built


async def upload(api: Front, **how: Any) -> Any:
    return await api.call("POST", "/v1/files", 200, data=form(**how))


def message(failure: Any, kind: str = "invalid_request_error", code: str | None = None) -> str:
    """The sentence of a failure in OpenAI's form."""
    assert failure["error"].keys() == {"message", "type", "param", "code"}
    assert (failure["error"]["type"], failure["error"]["code"]) == (kind, code)
    return str(failure["error"]["message"])


async def test_a_file_is_kept_shown_read_and_deleted(api: Front) -> None:
    data = random.Random(1).randbytes(MIB + 1)
    file = await upload(api, data=data)

    assert file["id"].startswith("file-")
    assert {key: file[key] for key in ("object", "bytes", "filename", "purpose", "status")} == {
        **{"object": "file", "bytes": len(data), "filename": "in.jsonl", "purpose": "batch", "status": "processed"}
    }
    assert file["expires_at"] - file["created_at"] == 30 * 86400
    assert await api.call("GET", f"/v1/files/{file['id']}", 200) == file
    async with api.http.get(f"/v1/files/{file['id']}/content") as reply:
        assert (reply.status, reply.content_type) == (200, "application/octet-stream")
        assert "attachment" in reply.headers["Content-Disposition"]
        assert await reply.read() == data
    deleted = await api.call("DELETE", f"/v1/files/{file['id']}", 200)
    assert deleted == {"id": file["id"], "object": "file", "deleted": True}
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        gone = await api.call(method, f"/v1/files/{file['id']}{path}", 404)
        assert message(gone) == f"No such File object: {file['id']}"


async def test_fields_may_come_behind_the_file_and_the_end_may_be_given(api: Front) -> None:
    built = aiohttp.FormData()
    built.add_field("file", b"{}", filename='a"b\\c.jsonl')
    built.add_field("expires_after[anchor]", "created_at")
    built.add_field("expires_after[seconds]", "3600")
    built.add_field("purpose", "batch")
    file = await api.call("POST", "/v1/files", 200, data=built)

    assert file["expires_at"] - file["created_at"] == 3600


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"purpose": "fine-tune"}, "purpose: must be 'batch' (got 'fine-tune')"),
        ({"expires_after[seconds]": "3600"}, "expires_after[anchor]: must be 'created_at'"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"},
            "expires_after[seconds]: must be a whole number from 3600 to 2592000 (got '60')",
        ),
        ({"x": "y" * 5000}, "x: longer than 4096 bytes"),
        ({f"f{number}": "" for number in range(40)}, "more than 32 fields"),
    ],
)
async def test_a_wrong_field_is_named_and_nothing_is_kept(api: Front, fields: dict[str, str], why: str) -> None:
    refused = await api.call("POST", "/v1/files", 400, data=form(**fields))
    assert why in message(refused)
    assert (await api.call("GET", "/v1/files", 200))["data"] == []


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"{}", "application/json", 415),
        (b"{}", "multipart/form-data", 415),
        (b"{}", "multipart/form-data; boundary=x", 400),
        (b"--x\r\nbroken", "multipart/form-data; boundary=x", 400),
        (b"{}", "multipart/form-data; boundary=" + "b" * 257, 400),
        (b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--', None, 400),
        (b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}', None, 400),
        (b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n' * 2 + b"--x--", None, 400),
    ],
)
async def test_a_broken_form_is_refused(api: Front, body: bytes, content_type: str | None, status: int) -> None:
    headers = {"Content-Type": content_type or "multipart/form-data; boundary=x"}
    message(await api.call("POST", "/v1/files", status, data=body, headers=headers))
    assert (await api.call("GET", "/v1/files", 200))["data"] == []


async def test_a_form_that_stops_coming_is_given_up(api: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PART_S", 0.05)

    async def some() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}'
        await asyncio.Event().wait()

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert "in time" in message(await api.call("POST", "/v1/files", 408, data=some(), headers=headers))
    assert (await api.call("GET", "/v1/files", 200))["data"] == []


async def test_a_file_that_is_too_large_is_refused_with_its_limit(api: Front) -> None:
    refused = await api.call("POST", "/v1/files", 413, data=form(bytes(20 * MIB)))
    assert message(refused) == "The file is larger than 2 MiB (batches.max_file_mb)"


async def test_quotas_have_a_code_of_their_own(api: Front) -> None:
    for _ in range(10):
        await upload(api)
    refused = await api.call("POST", "/v1/files", 403, data=form())
    assert "batches.max_files" in message(refused, code="storage_quota_exceeded")


async def test_a_failure_links_to_causes_and_remedies(api: Front) -> None:
    async with api.http.get("/v1/files/file-nope") as reply:
        assert reply.headers["Link"] == '</docs/errors#object_not_found>; rel="help"'


async def test_files_come_in_pages(api: Front) -> None:
    ids = [(await upload(api))["id"] for _ in range(5)]
    first = await api.call("GET", "/v1/files?limit=2", 200)
    assert [each["id"] for each in first["data"]] == ids[:2:-1]
    assert (first["has_more"], first["first_id"], first["last_id"]) == (True, ids[4], ids[3])
    rest = await api.call("GET", f"/v1/files?limit=3&after={ids[3]}", 200)
    assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (ids[2::-1], False)
    rising = await api.call("GET", "/v1/files?order=asc&purpose=batch", 200)
    assert [each["id"] for each in rising["data"]] == ids
    assert (await api.call("GET", "/v1/files?purpose=batch_output", 200))["data"] == []
    assert "'nope'" in message(await api.call("GET", "/v1/files?after=nope", 400))
    assert "limit" in message(await api.call("GET", "/v1/files?limit=0", 400))
    assert "unknown query parameter" in message(await api.call("GET", "/v1/files?lmit=5", 400))


async def begin(api: Front, status: int = 200, **changed: Any) -> Any:
    file = await upload(api)
    body = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"} | changed
    return await api.call("POST", "/v1/batches", status, json=body)


async def test_a_batch_is_made_shown_listed_and_cancelled(api: Front) -> None:
    expiry = {"anchor": "created_at", "seconds": 3600}
    made = [await begin(api, metadata={"k": "v"}, output_expires_after=expiry) for _ in range(3)]

    batch = made[0]
    assert batch["id"].startswith("batch_")
    assert (batch["object"], batch["status"], batch["metadata"]) == ("batch", "validating", {"k": "v"})
    assert batch["expires_at"] - batch["created_at"] == 86400
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert await api.call("GET", f"/v1/batches/{batch['id']}", 200) == batch
    page = await api.call("GET", "/v1/batches?limit=2", 200)
    assert ([each["id"] for each in page["data"]], page["has_more"]) == ([made[2]["id"], made[1]["id"]], True)
    page = await api.call("GET", f"/v1/batches?after={made[1]['id']}", 200)
    assert ([each["id"] for each in page["data"]], page["has_more"]) == ([batch["id"]], False)
    cancelled = await api.call("POST", f"/v1/batches/{batch['id']}/cancel", 200)
    assert (cancelled["status"], cancelled["cancelling_at"] is not None) == ("cancelling", True)
    used = await api.call("DELETE", f"/v1/files/{batch['input_file_id']}", 409)
    assert batch["id"] in message(used, code="conflict")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"endpoint": "/v1/chat/completions"}, "endpoint: must be one of /v1/embeddings"),
        ({"completion_window": "soon"}, "completion_window: must be a time such as 24h"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"input_file_id": None}, "input_file_id"),
        ({"endpont": "x"}, "unknown field 'endpont'; did you mean 'endpoint'?"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
    ],
)
async def test_a_wrong_batch_is_refused_by_name(api: Front, changed: dict[str, Any], why: str) -> None:
    assert why in message(await begin(api, 400, **changed))
    assert (await api.call("GET", "/v1/batches", 200))["data"] == []


async def test_another_key_sees_nothing(api: Front) -> None:
    batch = await begin(api)
    for method, path in (
        ("GET", f"/v1/files/{batch['input_file_id']}"),
        ("GET", f"/v1/files/{batch['input_file_id']}/content"),
        ("DELETE", f"/v1/files/{batch['input_file_id']}"),
        ("GET", f"/v1/batches/{batch['id']}"),
        ("POST", f"/v1/batches/{batch['id']}/cancel"),
    ):
        assert "No such" in message(await api.call(method, path, 404, **TEAM))
    for path in ("/v1/files", "/v1/batches"):
        assert (await api.call("GET", path, 200, **TEAM))["data"] == []


async def test_the_document_has_the_routes(api: Front) -> None:
    document = await api.call("GET", "/openapi.json", 200)
    assert document["paths"]["/v1/files"].keys() == {"get", "post"}
    assert document["paths"]["/v1/batches/{id}/cancel"].keys() == {"post"}
    properties = json.dumps(document["paths"]["/v1/files"]["post"]["requestBody"])
    assert "expires_after[seconds]" in properties
