"""Health and reflection on the mux's port: `MuxHealth` by instance name, `StandardServices`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest, HealthListResponse

from teimgr.errors import InvalidInput, TeimgrError, Unauthenticated
from teimgr.http.auth.policy import CertificateNames, PolicyInForce, Right, authenticate_call
from teimgr.http.http2.stream import Stream, StreamLost
from teimgr.spec import RouteEntry, State
from teimgr.wire.grpc_core import health_reflection
from teimgr.wire.grpc_core.health_reflection import NOT_SERVING, SERVING, HealthService, Reflection, StandardCalls
from teimgr.wire.grpc_core.rpc import FILES, RpcStatusError, RpcStream
from teimgr.wire.status import INTERNAL, NOT_FOUND, UNIMPLEMENTED, GrpcStatus

log = logging.getLogger(__name__)
_NO_INSTANCE = "\0"


class MuxHealth(HealthService):
    """Health by instance name, updated from the directory: SERVING while the instance runs or a call would load it.

    `services` and "" are SERVING until `stop`.
    """

    def __init__(self, *services: str) -> None:
        super().__init__()
        self._services = dict.fromkeys(("", *services), SERVING)
        self._statuses: dict[str, int] = dict(self._services)

    def apply(self, name: str, entry: RouteEntry | None) -> None:
        """Record the state of an instance, None for a deleted one; call `notify` afterwards."""
        if self.is_stopped or name in self._services:
            return
        if entry is None:
            self._statuses.pop(name, None)
        else:
            self._statuses[name] = SERVING if entry.state is State.RUNNING or entry.is_loadable else NOT_SERVING

    def stop(self) -> None:
        """Set everything to NOT_SERVING and end the watches."""
        self._statuses = dict.fromkeys(self._statuses, NOT_SERVING)
        super().stop()

    def status_of(self, service: str) -> int | None:
        return self._statuses.get(service)

    def is_public(self, service: str) -> bool:
        """True if it is "" or one of `services`, and not an instance."""
        return service in self._services

    def statuses(self, covers: Callable[[str], bool]) -> dict[str, int]:
        """The status of every service, and of the instances for which `covers` is true."""
        return {name: each for name, each in self._statuses.items() if name in self._services or covers(name)}


class StandardServices:
    """grpc.health.v1 and grpc.reflection; every other path is unimplemented.

    Check and Watch of "" and of the services need no key, as /health does. Instances that the caller's key does not
    cover are unknown services, so that names cannot be guessed. List requires the right to read by `policy`.
    """

    def __init__(self, policy: PolicyInForce, health: MuxHealth) -> None:
        self._policy = policy
        self._health = health
        self._reflection = Reflection((*FILES, health_reflection.HEALTH_FILE))
        self._handlers: dict[str, Callable[[RpcStream, CertificateNames], Awaitable[None]]] = {
            f"/{health_reflection.HEALTH_SERVICE}/Check": self._check,
            f"/{health_reflection.HEALTH_SERVICE}/List": self._list,
            f"/{health_reflection.HEALTH_SERVICE}/Watch": self._watch,
        }
        for name in health_reflection.REFLECTION_SERVICES:
            self._handlers[f"/{name}/{health_reflection.REFLECTION_METHOD}"] = self._reflect
        self._calls = StandardCalls()

    async def serve(self, stream: Stream, max_reply_bytes: int, certificate: CertificateNames) -> None:
        """Answer one RPC."""
        call = self._calls.call(stream, max_reply_bytes)
        if call.http_refusal:
            await call.refuse(call.http_refusal)
            return
        try:
            handler = self._handlers.get(call.path)
            if handler is None:
                raise RpcStatusError(UNIMPLEMENTED, "Method not found!")
            async with self._calls.bounded(call):
                await handler(call, certificate)
            status = GrpcStatus()
        except TeimgrError as error:
            status = GrpcStatus.of(error)
        except RpcStatusError as error:
            status = error.status
        except StreamLost:
            raise  # the client left
        except Exception:
            status = GrpcStatus(INTERNAL, "Internal error")
            log.exception("call failed", extra={"method": call.path})
        finally:
            call.charge.release()
        await call.finish(status)

    async def _check(self, call: RpcStream, certificate: CertificateNames) -> None:
        request = await self._message(call, HealthCheckRequest)
        status: Any = None
        if self._may_ask(request.service, call, certificate):
            status = self._health.status_of(request.service)
        if status is None:
            raise RpcStatusError(NOT_FOUND, f"Unknown service '{request.service[:200]}'")
        await call.send(HealthCheckResponse(status=status).SerializeToString())

    async def _list(self, call: RpcStream, certificate: CertificateNames) -> None:
        caller = authenticate_call(self._policy.now, certificate, call.metadata)
        caller.require(frozenset({Right.READ}))
        await self._message(call, HealthListRequest)
        statuses: dict[str, Any] = self._health.statuses(caller.covers)
        shown = {name: HealthCheckResponse(status=each) for name, each in statuses.items()}
        await call.send(HealthListResponse(statuses=shown).SerializeToString())

    async def _watch(self, call: RpcStream, certificate: CertificateNames) -> None:
        async def send(response: Any) -> None:
            await call.send(response.SerializeToString())

        request = await self._message(call, HealthCheckRequest)
        may_ask = self._may_ask(request.service, call, certificate)
        await self._health.watch(request.service if may_ask else _NO_INSTANCE, send)

    def _may_ask(self, service: str, call: RpcStream, certificate: CertificateNames) -> bool:
        if self._health.is_public(service):
            return True
        try:
            return authenticate_call(self._policy.now, certificate, call.metadata).covers(service)
        except Unauthenticated:
            return False

    async def _reflect(self, call: RpcStream, certificate: CertificateNames) -> None:
        await self._calls.reflect(call, self._reflection)

    async def _message(self, call: RpcStream, kind: Any) -> Any:
        raw = await call.receive(health_reflection.MESSAGE_S)
        if raw is None:
            raise InvalidInput("Missing message")
        return call.parse(kind, raw)
