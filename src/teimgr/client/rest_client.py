"""The REST client without an event loop, numpy or gRPC: imported in milliseconds, for the command line and scripts."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from teimgr.client.blocking_http import BlockingHttpChannel
from teimgr.client.rest import FleetCalls, InstanceCalls, ModelCalls
from teimgr.client.server_address import ServerAddress, Tls

API = "http://127.0.0.1:9000"

P = ParamSpec("P")
T = TypeVar("T")


class _Calls(InstanceCalls, ModelCalls, FleetCalls):
    """The calls as coroutines over a channel that blocks."""

    def __init__(self, channel: BlockingHttpChannel, timeout_s: float) -> None:
        self._http = channel
        self._timeout_s = timeout_s


def _finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that blocks and never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    coroutine.close()
    raise RuntimeError("the call waits for an event loop")


def _blocking(
    method: Callable[Concatenate[_Calls, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[RestClient, P], T]:
    @functools.wraps(method)
    def call(self: RestClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _finished(method(self._calls, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[_Calls, P], AsyncIterator[T]],
) -> Callable[Concatenate[RestClient, P], Iterator[T]]:
    @functools.wraps(method)
    def call(self: RestClient, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        stream: Any = method(self._calls, *args, **kwargs)
        try:
            while True:
                try:
                    yield _finished(stream.__anext__())
                except StopAsyncIteration:
                    return
        finally:
            _finished(stream.aclose())

    return call


class RestClient:
    """The methods of `Client` that are REST calls: instances, models and the fleet, and any route by `request`.

    `timeout_s` bounds every call. Usable without `with`: no connection outlives its call.
    """

    def __init__(
        self,
        api: str = API,
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        expect_fingerprint: str | None = None,
    ) -> None:
        channel = BlockingHttpChannel(ServerAddress.parse(api), tls or Tls(), api_key, expect_fingerprint)
        self._calls = _Calls(channel, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: each call closes its own connection."""

    create = _blocking(_Calls.create)
    update = _blocking(_Calls.update)
    events = _iterating(_Calls.events)
    get = _blocking(_Calls.get)
    start = _blocking(_Calls.start)
    stop = _blocking(_Calls.stop)
    restart = _blocking(_Calls.restart)
    delete = _blocking(_Calls.delete)
    logs = _blocking(_Calls.logs)
    follow_logs = _iterating(_Calls.follow_logs)
    health = _blocking(_Calls.health)
    ready = _blocking(_Calls.ready)
    wait_until_running = _blocking(_Calls.wait_until_running)
    list = _blocking(_Calls.list)

    models = _blocking(_Calls.models)
    add_model = _blocking(_Calls.add_model)
    download_model = _iterating(_Calls.download_model)
    try_model = _blocking(_Calls.try_model)
    delete_model = _blocking(_Calls.delete_model)

    config = _blocking(_Calls.config)
    reload = _blocking(_Calls.reload)
    daemon = _blocking(_Calls.daemon)
    restart_daemon = _blocking(_Calls.restart_daemon)
    gpus = _blocking(_Calls.gpus)
    usage = _blocking(_Calls.usage)
    recommendations = _blocking(_Calls.recommendations)
    apply_recommendation = _blocking(_Calls.apply_recommendation)
    plan = _blocking(_Calls.plan)
    rebalance = _blocking(_Calls.rebalance)
    hosts = _blocking(_Calls.hosts)
    create_join_token = _blocking(_Calls.create_join_token)
    remove_host = _blocking(_Calls.remove_host)
    templates = _blocking(_Calls.templates)
    metrics = _blocking(_Calls.metrics)
    act = _blocking(_Calls.act)
    request = _blocking(_Calls.request)
