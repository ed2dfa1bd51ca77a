"""The lifecycle of instances over REST, typed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import aiohttp
import orjson

from teimgr.client.checks import check_text
from teimgr.client.endpoints import Endpoint, Tls
from teimgr.client.failures import from_http
from teimgr.client.values import Health, Instance, Logs
from teimgr.errors import DeadlineExceeded, Internal, ModelLoadFailed, NotRunning, Unavailable, ValidationError
from teimgr.spec import State, check_name


class Rest:
    """Opened and closed by its owner, inside a running event loop."""

    def __init__(self, endpoint: Endpoint, tls: Tls, api_key: str | None = None) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            InvalidConfig: a certificate file cannot be used.
        """
        context = self._tls.ssl_context() if self._endpoint.secure else True
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context), headers=self._headers)

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, int] | None = None,
        timeout_s: float,
    ) -> Any:
        """The parsed JSON of the reply, None for an empty one. `path` needs no quoting.

        Raises:
            ValidationError: `body` has something in it that JSON has not.
            TeimgrError: what the daemon answered.
            Unavailable: nobody answers there, or TLS failed.
            DeadlineExceeded: no whole reply within `timeout_s`.
        """
        status, reply = await self._exchange(method, path, _json(body), query, timeout_s)
        if status >= 400:
            raise from_http(status, reply)
        return _parse(reply, path) if reply else None

    async def succeeds(self, path: str, *, timeout_s: float) -> bool:
        """Whether GET answers 200 rather than 503.

        Raises:
            TeimgrError: any other answer.
        """
        status, reply = await self._exchange("GET", path, None, None, timeout_s)
        if status not in (200, 503):
            raise from_http(status, reply)
        return status == 200

    async def _exchange(
        self,
        method: str,
        path: str,
        body: aiohttp.Payload | None,
        query: Mapping[str, int] | None,
        timeout_s: float,
    ) -> tuple[int, bytes]:
        if self._session is None:
            raise Internal("the client is not open: use it in a `with` block")
        url = self._endpoint.url + path
        try:
            async with asyncio.timeout(timeout_s):
                request = self._session.request(
                    method, url, data=body, params=query, server_hostname=self._tls.server_name
                )
                async with request as reply:
                    return reply.status, await reply.read()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{method} {path}: no reply within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise Unavailable(f"{self._endpoint.url}: {error}") from error


def _json(body: Mapping[str, Any] | None) -> aiohttp.Payload | None:
    try:
        return None if body is None else aiohttp.JsonPayload(body)
    except (TypeError, ValueError) as error:
        raise ValidationError(str(error)) from error


def _parse(reply: bytes, path: str) -> Any:
    try:
        return orjson.loads(reply)
    except orjson.JSONDecodeError as error:
        raise Internal(f"{path}: the reply is no JSON: {error}") from error


_POLL_FIRST_S = 0.02
_POLL_MOST_S = 0.5


class Wishes(TypedDict, total=False):
    """The optional fields of `POST /instances`; what is not given is left to the daemon."""

    port: int
    max_batch_tokens: int
    max_concurrent_requests: int
    pooling: str
    gpu_id: int
    prometheus_port: int
    startup_timeout_secs: int
    extra_args: Sequence[str]
    dtype: str
    revision: str
    threads: int


class Lifecycle:
    """Create, watch and end instances. Every method raises the `TeimgrError` that the daemon meant."""

    _rest: Rest
    _timeout_s: float

    async def create(self, name: str, model_id: str, **wishes: Unpack[Wishes]) -> Instance:
        """A new instance, starting. `model_id` is a hub id or a local directory."""
        body: dict[str, Any] = {"name": name, "model_id": model_id, **wishes}
        return Instance.from_json(await self._call("POST", "/instances", body=body))

    async def get(self, name: str) -> Instance:
        """One instance as it is now."""
        return Instance.from_json(await self._call("GET", _path(name)))

    async def start(self, name: str) -> Instance:
        """Start a stopped or failed instance."""
        return Instance.from_json(await self._call("POST", _path(name, "start")))

    async def stop(self, name: str) -> Instance:
        """Drain and stop an instance; it stays known."""
        return Instance.from_json(await self._call("POST", _path(name, "stop")))

    async def restart(self, name: str) -> Instance:
        """Stop, then start."""
        return Instance.from_json(await self._call("POST", _path(name, "restart")))

    async def delete(self, name: str) -> Instance | None:
        """Stop and forget an instance; its last view, None from a server that sends none."""
        body = await self._call("DELETE", _path(name))
        return None if body is None else Instance.from_json(body)

    async def logs(self, name: str, start: int | None = None, end: int | None = None) -> Logs:
        """Lines `[start, end)` of the instance's log, as a Python slice: negative counts from the end."""
        query = {key: value for key, value in (("start", start), ("end", end)) if value is not None}
        body = await self._call("GET", _path(name, "logs"), query=query)
        return Logs(tuple(body["lines"]), body["start"], body["end"], body["total_lines"])

    async def health(self) -> Health:
        """What the daemon says of itself while it is alive."""
        body = await self._call("GET", "/health")
        return Health(body["status"], body)

    async def ready(self) -> bool:
        """Whether every instance that is wanted running serves."""
        return await self._rest.succeeds("/ready", timeout_s=self._timeout_s)

    async def wait_until_running(self, name: str, *, deadline_s: float = 300.0) -> Instance:
        """The instance once it is running. REST has no events, so this asks, at first 50 and at last 2 times a second.

        Raises:
            ModelLoadFailed: it failed for good; the message has the reason.
            NotRunning: it is stopped, and nobody will start it.
            DeadlineExceeded: `deadline_s` passed.
        """
        end = time.monotonic() + deadline_s
        pause_s = _POLL_FIRST_S
        while (instance := await self.get(name)).status is not State.RUNNING:
            _refuse_ended(instance)
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(f"Instance '{name}' is {instance.status.value} after {deadline_s:g} s")
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, _POLL_MOST_S)
        return instance

    async def list(self) -> Sequence[Instance]:
        """Every instance, in the daemon's order."""
        return [Instance.from_json(body) for body in await self._call("GET", "/instances")]

    async def _call(
        self, method: str, path: str, *, body: dict[str, Any] | None = None, query: dict[str, int] | None = None
    ) -> Any:
        return await self._rest.call(method, path, body=body, query=query, timeout_s=self._timeout_s)


def _path(name: str, verb: str = "") -> str:
    """The route to an instance, for a name that is one: `..` would lead elsewhere."""
    check_text("name", name)
    return f"/instances/{check_name(name)}" + (f"/{verb}" if verb else "")


def _refuse_ended(instance: Instance) -> None:
    if instance.status is State.FAILED:
        raise ModelLoadFailed(f"Instance '{instance.name}' failed: {instance.reason or 'see its log'}")
    if instance.status is State.STOPPED:
        raise NotRunning(instance.name, instance.status.value)
