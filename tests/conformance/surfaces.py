"""How a case reaches an instance: over its own port, over the daemon, over the mux."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2
from tests.conformance.case import BY_METADATA, DAEMON, MUX, PORT, AskGrpc, AskHttp, Http, Replies, Reply, Rpc
from tests.conformance.fleet import MODELS
from tests.support.daemon_process import DaemonProcess
from tests.support.polling import until

LIMIT_S = 60.0
TEI = {method.name: method for service in tei_pb2.DESCRIPTOR.services_by_name.values() for method in service.methods}
OWN = mux_pb2.DESCRIPTOR.services_by_name["TeiMultiplexer"].methods_by_name
CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))


class Surfaces:
    """Every way into the instances of a daemon. Connections are kept."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        with daemon.client() as client:
            self.ports = {name: client.get(name).port for name in MODELS}
        self._connections: dict[int, http.client.HTTPConnection] = {}
        self._channels: dict[int, grpc.Channel] = {}

    def close(self) -> None:
        for kept in (*self._connections.values(), *self._channels.values()):
            kept.close()

    # HTTP.

    def http(self, surface: str, case: Http) -> Reply:
        """The answer to the case's request; bodies but bytes are sent as JSON."""
        body = case.body if case.body is None or isinstance(case.body, bytes) else json.dumps(case.body).encode()
        said = {} if body is None else {"content-type": "application/json"}
        port, prefix = self._http_address(surface, case.instance)
        return self.request(port, case.verb, prefix + case.path, body, said | dict(case.headers))

    def asking(self, surface: str, instance: str) -> AskHttp:
        """Further requests to the same instance; they succeed."""

        def ask(path: str, body: Any) -> Reply:
            reply = self.http(surface, Http("", instance, path, body))
            assert reply.status == 200, reply
            return reply

        return ask

    def request(
        self, port: int, verb: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """One request over a kept connection; one that the other end has closed meanwhile is opened again."""
        connection = self._connections.setdefault(port, http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S))
        try:
            connection.request(verb, path, body, dict(headers or {}))
            answer = connection.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            connection.close()
            connection.request(verb, path, body, dict(headers or {}))
            answer = connection.getresponse()
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())

    def _http_address(self, surface: str, instance: str) -> tuple[int, str]:
        if surface == DAEMON:
            return self.daemon.api_port, f"/instances/{instance}"
        return self.ports[instance], ""

    # gRPC.

    def grpc(self, surface: str, case: Rpc) -> Replies:
        """The answers to the case's messages."""
        metadata = tuple(case.metadata.items())
        return self.call(surface, case.instance, case.method, case.messages, metadata)

    def calling(self, surface: str, instance: str) -> AskGrpc:
        """Further calls to the same instance."""
        return lambda method, *messages: self.call(surface, instance, method, messages)

    def call(
        self,
        surface: str,
        instance: str,
        method: str,
        messages: Sequence[Message],
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Replies:
        """One call of any shape."""
        descriptor = OWN[method] if surface == MUX else TEI[method]
        if surface == MUX:
            messages = [wrapped(method, instance, message) for message in messages]
        if surface == BY_METADATA:
            metadata = (*metadata, ("x-teimgr-instance", instance))
        port = self.ports[instance] if surface == PORT else self.daemon.grpc_port
        return collect(self.stub(port, descriptor), descriptor, messages, metadata)

    def channel(self, port: int) -> grpc.Channel:
        if port not in self._channels:
            self._channels[port] = grpc.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL)
        return self._channels[port]

    def stub(self, port: int, method: Any) -> Any:
        """The callable of a method, by its descriptor."""
        shape = f"{_streams(method.client_streaming)}_{_streams(method.server_streaming)}"
        return getattr(self.channel(port), shape)(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )

    # Life.

    def until(self, true: Callable[[], Any], what: str) -> None:
        """Repeat the request."""
        until(true, what)


def wrapped(method: str, instance: str, message: Message) -> Message:
    """A message of the mux's own method, for the instance; what is one already stays as it is."""
    kind = GetMessageClass(OWN[method].input_type)
    if isinstance(message, kind):
        return message
    target = mux_pb2.Target(instance_name=instance)
    return kind(target=target, request=message) if "request" in kind.DESCRIPTOR.fields_by_name else kind(target=target)


def collect(stub: Any, method: Any, messages: Sequence[Message], metadata: Sequence[tuple[str, str]] = ()) -> Replies:
    """Call, and keep everything until the end."""
    argument = iter(messages) if method.client_streaming else messages[0]
    found: list[Any] = []
    if method.server_streaming:
        call = stub(argument, metadata=metadata, timeout=LIMIT_S)
        with contextlib.suppress(grpc.RpcError):
            found.extend(call)
    else:
        call = stub.future(argument, metadata=metadata, timeout=LIMIT_S)
        if call.exception() is None:
            found.append(call.result())
    told = dict(call.initial_metadata() or ())
    return Replies(found, call.code().name, call.details() or "", told)


def _streams(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"
