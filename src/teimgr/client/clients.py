"""The asynchronous client with its connection to REST, and the blocking client, which runs it in its own thread."""

from __future__ import annotations

import asyncio
import functools
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import aiohttp
from aiohttp.client_exceptions import UnixClientConnectorError
from yarl import URL

from teimgr.client.connection_causes import reason_of
from teimgr.client.grpc_channel import GrpcChannel
from teimgr.client.http_replies import CONNECT_S, ReplyHead, Request, RestChannel
from teimgr.client.inference_calls import ImageCalls, InferenceCalls
from teimgr.client.rest import FleetCalls, InstanceCalls, ModelCalls
from teimgr.client.rest_client import API
from teimgr.client.scoring_calls import ScoringCalls, TableCalls
from teimgr.client.server_address import ServerAddress, Tls
from teimgr.errors import DeadlineExceeded, Internal, Unreachable, ValidationError

GRPC = "http://127.0.0.1:9001"
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_NOT_OPEN = "the client is not open: use it in a `with` block"


class UnixTlsConnector(aiohttp.UnixConnector):
    """Connections to a Unix socket, over TLS if a context is given; aiohttp's own connector lacks TLS."""

    def __init__(self, path: str, context: ssl.SSLContext | None, server_name: str) -> None:
        super().__init__(path)
        self._tls: dict[str, Any] = {} if context is None else {"ssl": context, "server_hostname": server_name}

    async def _create_connection(self, req: Any, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:
        try:
            async with asyncio.timeout(timeout.sock_connect):
                loop = asyncio.get_running_loop()
                _, protocol = await loop.create_unix_connection(self._factory, self.path, **self._tls)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"no connection to {self.path}") from error
        except OSError as error:
            raise UnixClientConnectorError(self.path, req.connection_key, error) from error
        return protocol


class HttpChannel(RestChannel):
    """HTTP channel of an event loop. Its owner opens and closes it there."""

    _session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Create the session; nothing is sent yet.

        Raises:
            InvalidConfig: a certificate file cannot be used.
        """
        context = self._tls.ssl_context() if self._address.secure else None
        connector: aiohttp.BaseConnector
        if self._address.path:
            server_name = self._tls.server_name or self._address.host
            connector = UnixTlsConnector(self._address.path, context, server_name)
        else:
            connector = aiohttp.TCPConnector(ssl=context or True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @asynccontextmanager
    async def _reply(self, request: Request) -> AsyncIterator[ReplyHead]:
        method, path, body, query, headers, timeout_s = request
        if self._session is None or self._session.closed:
            raise Internal(_NOT_OPEN)
        try:
            payload = None if body is None else aiohttp.JsonPayload(body)
        except (TypeError, ValueError) as error:
            raise ValidationError(str(error)) from error
        url = URL(self._address.http_base + path, encoded=True)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, url, data=payload, params=query, headers=headers, server_hostname=self._tls.server_name
                ) as reply,
            ):
                yield ReplyHead(reply.status, reply.headers, reply.content.iter_any())
        except aiohttp.ClientError as error:
            of_tls = getattr(error, "certificate_error", None)  # aiohttp's own sentence repeats the address
            raise Unreachable(self._address.url, reason_of(of_tls or error)) from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"{method} {path}: no reply within {timeout_s:g} s") from error


class AsyncClient(InstanceCalls, ModelCalls, FleetCalls, InferenceCalls, ImageCalls, ScoringCalls, TableCalls):
    """Client of one daemon: `api` is its REST address, `grpc` its mux; `https://` selects TLS with the files of `tls`,
    `unix:/path` and `https+unix:/path` are Unix sockets; `api_key` is sent with every call.

    Used as `async with`; nothing is sent before the first call. `timeout_s` bounds every call, stop and restart
    with their grace period included. `max_message_bytes` bounds one gRPC message in either direction. With
    `expect_fingerprint`, a space or `<space>/<precision>`, calls whose vectors would be others raise SpaceDiffers.
    """

    _http: HttpChannel

    def __init__(
        self,
        api: str = API,
        grpc: str = GRPC,
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        expect_fingerprint: str | None = None,
    ) -> None:
        tls = tls or Tls()
        self._http = HttpChannel(ServerAddress.parse(api), tls, api_key, expect_fingerprint)
        self._grpc = GrpcChannel(ServerAddress.parse(grpc), tls, max_message_bytes, api_key, expect_fingerprint)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        await self._http.open()
        try:
            await self._grpc.open()
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self, timeout_s: float = CONNECT_S) -> None:
        """Connect to the mux now instead of at the first call.

        Raises:
            Unreachable: could not connect within `timeout_s`; the message has the reason, and a proxy's address.
        """
        await self._grpc.connect(timeout_s)

    async def close(self) -> None:
        """Cancel running calls and close both connections."""
        try:
            await self._grpc.close()
        finally:
            await self._http.close()


P = ParamSpec("P")
T = TypeVar("T")

_END = object()
_CANCEL_LIMIT_S = 5.0


class LoopThread:
    """An event loop on its own thread, from construction to `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="teimgr-client", daemon=True)
        self._submitting = threading.Lock()  # a coroutine submitted to a stopped loop would never end
        self._is_closed = False
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. KeyboardInterrupt cancels it and waits for its end.

        Without the wait, the coroutine would still run while the caller cleans up, and an asynchronous generator cannot
        be closed while it runs.

        Raises:
            Internal: the loop is closed, or was closed before the coroutine had ended.
        """
        task: asyncio.Task[T] | None = None
        is_interrupted = False
        ended = threading.Event()

        async def watched() -> T:
            nonlocal task
            task = asyncio.current_task()
            try:
                if is_interrupted:
                    coroutine.close()
                    raise asyncio.CancelledError
                return await coroutine
            finally:
                ended.set()

        def cancel() -> None:
            nonlocal is_interrupted
            is_interrupted = True
            if task is not None:
                task.cancel()

        def submit() -> Future[T] | None:
            with self._submitting:
                return None if self._is_closed else asyncio.run_coroutine_threadsafe(watched(), self._loop)

        try:
            if (future := submit()) is not None:
                return future.result()
        except CancelledError as error:
            if not self._is_closed:
                raise
            raise Internal("the client was closed before the call had ended") from error
        except BaseException:  # an interrupt may come before there is a future to cancel
            if not ended.is_set():
                self._loop.call_soon_threadsafe(cancel)
                ended.wait(_CANCEL_LIMIT_S)
            raise
        coroutine.close()
        raise Internal(_NOT_OPEN)

    def close(self) -> None:
        """Cancel running coroutines, and end the thread. Called once."""
        with self._submitting:
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_LIMIT_S)
        await self._loop.shutdown_asyncgens()


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncIterator[T]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        stream: Any = method(self._client, *args, **kwargs)

        async def advance() -> Any:  # `anext` returns an awaitable, but a loop needs a coroutine
            return await anext(stream, _END)

        try:
            while (item := self._run(advance())) is not _END:
                yield item
        finally:
            if self._loop is not None:  # an open stream ends with the client
                self._run(stream.aclose())

    return call


class Client:
    """The methods of `AsyncClient`, blocking; streams are iterators. Used as `with`; thread-safe."""

    def __init__(
        self,
        api: str = API,
        grpc: str = GRPC,
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        expect_fingerprint: str | None = None,
    ) -> None:
        self._client = AsyncClient(
            api,
            grpc,
            tls=tls,
            api_key=api_key,
            timeout_s=timeout_s,
            max_message_bytes=max_message_bytes,
            expect_fingerprint=expect_fingerprint,
        )
        self._loop: LoopThread | None = None

    def __enter__(self) -> Self:
        self._loop = LoopThread()
        try:
            self._loop.run(self._client.__aenter__())
        except BaseException:
            self._loop.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel running calls, close both connections and end the thread."""
        loop, self._loop = self._loop, None
        if loop is not None:
            try:
                loop.run(self._client.close())
            finally:
                loop.close()

    connect = _blocking(AsyncClient.connect)
    create = _blocking(AsyncClient.create)
    update = _blocking(AsyncClient.update)
    events = _iterating(AsyncClient.events)
    get = _blocking(AsyncClient.get)
    start = _blocking(AsyncClient.start)
    stop = _blocking(AsyncClient.stop)
    restart = _blocking(AsyncClient.restart)
    delete = _blocking(AsyncClient.delete)
    logs = _blocking(AsyncClient.logs)
    follow_logs = _iterating(AsyncClient.follow_logs)
    health = _blocking(AsyncClient.health)
    ready = _blocking(AsyncClient.ready)
    wait_until_running = _blocking(AsyncClient.wait_until_running)
    list = _blocking(AsyncClient.list)

    models = _blocking(AsyncClient.models)
    add_model = _blocking(AsyncClient.add_model)
    download_model = _iterating(AsyncClient.download_model)
    try_model = _blocking(AsyncClient.try_model)
    delete_model = _blocking(AsyncClient.delete_model)

    config = _blocking(AsyncClient.config)
    reload = _blocking(AsyncClient.reload)
    daemon = _blocking(AsyncClient.daemon)
    restart_daemon = _blocking(AsyncClient.restart_daemon)
    gpus = _blocking(AsyncClient.gpus)
    usage = _blocking(AsyncClient.usage)
    recommendations = _blocking(AsyncClient.recommendations)
    apply_recommendation = _blocking(AsyncClient.apply_recommendation)
    plan = _blocking(AsyncClient.plan)
    rebalance = _blocking(AsyncClient.rebalance)
    hosts = _blocking(AsyncClient.hosts)
    create_join_token = _blocking(AsyncClient.create_join_token)
    remove_host = _blocking(AsyncClient.remove_host)
    templates = _blocking(AsyncClient.templates)
    metrics = _blocking(AsyncClient.metrics)
    act = _blocking(AsyncClient.act)
    request = _blocking(AsyncClient.request)

    embed = _blocking(AsyncClient.embed)
    embed_stream = _iterating(AsyncClient.embed_stream)
    embed_sparse = _blocking(AsyncClient.embed_sparse)
    embed_all = _blocking(AsyncClient.embed_all)
    embed_images = _blocking(AsyncClient.embed_images)
    embed_arrow = _blocking(AsyncClient.embed_arrow)
    embed_arrow_stream = _iterating(AsyncClient.embed_arrow_stream)
    info = _blocking(AsyncClient.info)
    tokenize = _blocking(AsyncClient.tokenize)
    decode = _blocking(AsyncClient.decode)
    predict = _blocking(AsyncClient.predict)
    predict_pair = _blocking(AsyncClient.predict_pair)
    rerank = _blocking(AsyncClient.rerank)
    rerank_stream = _blocking(AsyncClient.rerank_stream)
    infer = _blocking(AsyncClient.infer)
    infer_stream = _iterating(AsyncClient.infer_stream)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if (loop := self._loop) is None:
            coroutine.close()
            raise Internal(_NOT_OPEN)
        return loop.run(coroutine)
