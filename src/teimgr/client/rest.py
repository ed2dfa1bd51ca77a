"""Calls of the REST API, typed: instances, by the keys of `spec.InstanceSpec`, the model registry, and the fleet."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, TypedDict, Unpack
from urllib.parse import quote

from teimgr.client.checks import check_text, checked_keys
from teimgr.client.http_replies import JsonObject, Query, RestChannel, ServerSentEvent, error_from_reply
from teimgr.client.rest_values import Health, Instance, InstanceEvent, Logs
from teimgr.errors import DeadlineExceeded, ModelLoadFailed, NotRunning, Unavailable, ValidationError
from teimgr.spec import KEYS, State, check_name, updatable

_POLL_FIRST_S = 0.02
_POLL_MAX_S = 0.5


class InstanceKeys(TypedDict, total=False):
    """The keys of `spec.InstanceSpec` that an update may change, without the model; None restores the default."""

    revision: str | None
    max_batch_tokens: int | Literal["auto"] | None
    max_concurrent_requests: int | None
    max_waiting: int | None
    max_queue_wait_secs: int | None
    max_queued_tokens: int | None
    cache_bytes: int | None
    pooling: str | None
    kind: str | None
    trust_remote_code: bool | None
    code_revision: str | None
    safetensors_only: bool | None
    token_inputs: str | None
    token_encoding: str | None
    dtype: str | None
    gpu_id: int | None
    threads: int | None
    startup_timeout_secs: int | None
    max_rss_mib: int | None
    replicas: int | Literal["per-gpu"] | None
    node: str | None
    labels: Mapping[str, str] | None
    placement: str | None
    load: str | None
    idle_timeout_secs: int | None
    pinned: bool | None
    max_replicas: int | None
    min_replicas: int | None
    scale_up_wait_ms: int | None
    scale_down_wait_ms: int | None
    scale_down_delay_secs: int | None
    tags: Mapping[str, str] | None
    extra_args: Sequence[str] | None


class NewInstanceKeys(InstanceKeys, total=False):
    """The optional keys of a new instance; the template and the daemon set absent ones."""

    template: str
    port: int | None
    prometheus_port: int | None


class RestCalls:
    """Base of the classes whose methods are REST calls. Every method raises the `TeimgrError` of the daemon's reply."""

    _http: RestChannel
    _timeout_s: float

    async def _call(
        self, method: str, path: str, *, body: dict[str, Any] | None = None, query: Query | None = None
    ) -> Any:
        return await self._http.call(method, path, body=body, query=query, timeout_s=self._timeout_s)


class InstanceCalls(RestCalls):
    """Create, change, watch and delete instances."""

    async def create(self, name: str, model_id: str | None = None, **keys: Unpack[NewInstanceKeys]) -> Instance:
        """Create an instance and start it. `model_id`, a hub id or a local directory, may come from a `template`.

        Raises:
            ValidationError: A key is unknown, or cannot have this value.
        """
        given = {"name": name, **_given(model_id), **keys}
        body = checked_keys(given, [*(key for key in KEYS if KEYS[key].in_rest), "template"])
        return Instance.from_json(await self._call("POST", "/instances", body=body))

    async def update(
        self,
        name: str,
        *,
        model_id: str | None = None,
        recreate: bool = False,
        wait: bool = False,
        **changes: Unpack[InstanceKeys],
    ) -> Instance:
        """Change an instance without downtime: new workers start beside the old ones and take over.

        With `recreate` the old workers end first. With `wait` this returns when the change is complete, within the
        client's timeout; without it the view's `details["update"]` shows the progress.

        Raises:
            ValidationError: A key is unknown, fixed, or cannot have this value.
            UpdateInProgress, UpdateFailed: Another change is under way; with `wait`, this one failed.
        """
        body = checked_keys({**_given(model_id), **changes}, [key for key in KEYS if updatable(key)])
        body |= {"strategy": "recreate" if recreate else "rolling"}
        return Instance.from_json(await self._call("PATCH", _path(name), body=body, query=given_flags(wait=wait)))

    async def events(
        self,
        instances: Sequence[str] = (),
        kinds: Sequence[str] = (),
        *,
        last: int = 0,
        follow: bool = True,
        after: int | None = None,
    ) -> AsyncIterator[InstanceEvent]:
        """Fleet events: the `last` latest, then with `follow` each as it happens; `after` is an id to resume after.

        `instances` and `kinds` select; empty means all. If the daemon dropped events before they were sent, an event of
        the kind "missed" has their number in its `details`.
        """
        query = [("instance", each) for each in instances] + [("event", each) for each in kinds]
        query.append(("last", str(last)))
        if not follow:
            for body in await self._call("GET", "/events", query=query):
                yield InstanceEvent.from_json(body["event"], body)
            return
        seen = None if after is None else str(after)
        async with aclosing(self._http.events("GET", "/events", query=query, last_event_id=seen)) as stream:
            async for each in stream:
                yield InstanceEvent.from_json(each.event, each.data)

    async def get(self, name: str) -> Instance:
        """One instance as it is now."""
        return Instance.from_json(await self._call("GET", _path(name)))

    async def start(self, name: str) -> Instance:
        """Start a stopped or failed instance."""
        return Instance.from_json(await self._call("POST", _path(name, "start")))

    async def stop(self, name: str) -> Instance:
        """Drain and stop an instance; it stays known."""
        return Instance.from_json(await self._call("POST", _path(name, "stop")))

    async def restart(self, name: str, *, rolling: bool = False, wait: bool = False) -> Instance:
        """Stop, then start; `rolling` restarts like an `update` without changes."""
        query = given_flags(rolling=rolling, wait=wait)
        return Instance.from_json(await self._call("POST", _path(name, "restart"), query=query))

    async def delete(self, name: str) -> Instance | None:
        """Stop and delete an instance; return its last view, or None if the server does not send it."""
        body = await self._call("DELETE", _path(name))
        return None if body is None else Instance.from_json(body)

    async def logs(
        self,
        name: str | None,
        start: int | None = None,
        end: int | None = None,
        *,
        level: str | None = None,
        since: str | None = None,
    ) -> Logs:
        """Lines `[start, end)` of the log of an instance, or of the daemon with None for a name, as a Python slice.

        A negative number counts from the end. `level` is the lowest to return, `since` a time in RFC 3339 or in seconds
        ago; a slice counts such lines only.
        """
        query = _present(start=start, end=end, level=level, since=since)
        body = await self._call("GET", _log_path(name), query=query)
        return Logs(tuple(body["lines"]), body["start"], body["end"], body["total_lines"])

    async def follow_logs(
        self, name: str | None, start: int = -10, *, level: str | None = None, since: str | None = None
    ) -> AsyncIterator[str]:
        """Yield the lines of a log from `start` on, as `logs` selects them, then each new line without an end."""
        query = _present(start=start, level=level, since=since) | given_flags(follow=True)
        async with aclosing(self._http.events("GET", _log_path(name), query=query)) as stream:
            async for each in stream:
                yield each.data["line"] if each.event == "line" else f"({each.data['reason']})"

    async def health(self) -> Health:
        """The daemon's liveness report."""
        body = await self._call("GET", "/health")
        return Health(body["status"], body)

    async def ready(self) -> bool:
        """True if every instance that should run serves."""
        return await self._http.succeeds("/ready", timeout_s=self._timeout_s)

    async def wait_until_running(self, name: str, *, deadline_s: float = 300.0) -> Instance:
        """Return the instance once it is running, or unloaded until a call comes; polls.

        50 times a second at first and 2 times at last, as tei-manager needs.

        Raises:
            ModelLoadFailed: It failed for good; the message has the reason.
            NotRunning: It is stopped.
            DeadlineExceeded: `deadline_s` passed.
        """
        end = time.monotonic() + deadline_s
        pause_s = _POLL_FIRST_S
        while (instance := await self.get(name)).status not in (State.RUNNING, State.UNLOADED):
            if instance.status is State.FAILED:
                raise ModelLoadFailed(f"Instance '{instance.name}' failed: {instance.reason or 'see its log'}")
            if instance.status is State.STOPPED:
                raise NotRunning(instance.name, instance.status.value)
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(f"Instance '{name}' is {instance.status.value} after {deadline_s:g} s")
            await self._http.pause(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, _POLL_MAX_S)
        return instance

    async def list(self) -> Sequence[Instance]:
        """Every instance, in the daemon's order."""
        return [Instance.from_json(body) for body in await self._call("GET", "/instances")]


def _given(model_id: str | None) -> dict[str, Any]:
    return {} if model_id is None else {"model_id": model_id}


def _present(**parameters: int | str | None) -> dict[str, int | str]:
    return {name: value for name, value in parameters.items() if value is not None}


def given_flags(**flags: bool) -> dict[str, int | str]:
    """Return the query parameters of the flags that are set."""
    return {name: "true" for name, given in flags.items() if given}


def _log_path(name: str | None) -> str:
    return "/logs" if name is None else _path(name, "logs")


def _path(name: str, verb: str = "") -> str:
    """Return the route of an instance; names are checked, since `..` would lead to another route."""
    check_text("name", name)
    return f"/instances/{check_name(name)}" + (f"/{verb}" if verb else "")


class LoadOptions(TypedDict, total=False):
    """The optional fields of `POST /models/{id}/load`."""

    gpu_id: int
    device: str
    dtype: str
    revision: str
    trust_remote_code: bool
    code_revision: str


class ModelCalls(RestCalls):
    """Calls to the daemon's model registry; a model is the JSON object `ModelInfo` of the REST API."""

    async def models(self) -> Sequence[Mapping[str, Any]]:
        """All models of the daemon, sorted by id."""
        models: Sequence[Mapping[str, Any]] = await self._call("GET", "/models")
        return models

    async def add_model(self, model_id: str, *, revision: str | None = None) -> Mapping[str, Any]:
        """Register a hub id or a local directory; nothing is downloaded."""
        body = {"model_id": model_id} | ({} if revision is None else {"revision": revision})
        model: Mapping[str, Any] = await self._call("POST", "/models", body=body)
        return model

    async def download_model(
        self, model_id: str, *, revision: str | None = None, update: bool = False, code_revision: str | None = None
    ) -> AsyncIterator[ServerSentEvent]:
        """Download a model from the hub: events `progress` (a `DownloadProgress`), then one `done` (the model).

        With `update`, a newer commit of a present model is downloaded. `code_revision` is of the code in other
        repositories that the model names, which a daemon with `allow_remote_code` fetches with it. The download goes on
        when the iterator is closed.

        Raises:
            TeimgrError: the download failed.
            Unavailable: the daemon ended the stream before the download was done.
        """
        given = {"revision": revision, "update": update, "code_revision": code_revision}
        body = {key: value for key, value in given.items() if value}
        async with aclosing(self._http.events("POST", _model_path(model_id, "/download"), body=body)) as events:
            async for event in events:
                if event.event == "failed":
                    raise error_from_reply(500, json.dumps(event.data).encode(), {})
                yield event
                if event.event == "done":
                    return
        raise Unavailable("the daemon ended the stream before the download was done")

    async def try_model(self, model_id: str, **options: Unpack[LoadOptions]) -> Mapping[str, Any]:
        """Load a model in a throw-away worker and measure it; no timeout. `status` is `verified` where it passed."""
        path = _model_path(model_id, "/load")
        model: Mapping[str, Any] = await self._http.call("POST", path, body=dict(options), timeout_s=None)
        return model

    async def delete_model(self, model_id: str) -> Mapping[str, Any]:
        """Delete a model from the hub's cache; the model as it was."""
        model: Mapping[str, Any] = await self._call("DELETE", _model_path(model_id))
        return model


def _model_path(model_id: str, verb: str = "") -> str:
    check_text("model_id", model_id)
    return f"/models/{quote(model_id, safe='')}{verb}"


Action = Literal["start", "stop", "restart", "delete"]


class FleetCalls(RestCalls):
    """Configuration, GPUs, templates and metrics of a daemon; results are the JSON of the REST API."""

    async def config(self) -> Sequence[Mapping[str, Any]]:
        """Every setting in effect: objects of `key`, `value` and `source`."""
        settings: Sequence[Mapping[str, Any]] = await self._call("GET", "/config")
        return settings

    async def reload(self, *, dry_run: bool = False, prune: bool | None = None) -> Mapping[str, Any]:
        """Have the daemon read its configuration again and apply it; `dry_run` only returns the `plan`.

        `prune` deletes instances that are no longer seeds; None leaves that to the key `prune_seeds`.

        Raises:
            InvalidConfig: the configuration is invalid; nothing was changed.
        """
        query = given_flags(dry_run=dry_run)
        if prune is not None:
            query["prune"] = "true" if prune else "false"
        result: Mapping[str, Any] = await self._call("POST", "/config/reload", query=query)
        return result

    async def daemon(self) -> Mapping[str, Any]:
        """`pid`, `version` and `uptime_secs` of the daemon that answers, and whether it `is_starting`."""
        found: Mapping[str, Any] = await self._call("GET", "/daemon")
        return found

    async def restart_daemon(self) -> Mapping[str, Any]:
        """Restart the daemon without downtime; return `pid` and `version` of the next one.

        Raises:
            UpdateFailed: the next daemon does not start; the old one keeps serving.
        """
        found: Mapping[str, Any] = await self._call("POST", "/daemon/restart")
        return found

    async def gpus(self) -> Mapping[str, Any]:
        """`gpus` with memory, load and workers of each; without any, `reason` has why."""
        gpus: Mapping[str, Any] = await self._call("GET", "/gpus")
        return gpus

    async def hosts(self) -> Mapping[str, Any]:
        """`hosts` of the cluster with cores, memory, workers and versions; empty for a single host."""
        hosts: Mapping[str, Any] = await self._call("GET", "/hosts")
        return hosts

    async def usage(self, by: Sequence[str] = ("key", "model")) -> Mapping[str, Any]:
        """`usage`, the tokens, texts, calls and refusals by some of key, instance and model; `enabled` is whether keys
        are required, without which nothing is counted."""
        found: Mapping[str, Any] = await self._call("GET", "/usage", query={"by": ",".join(by)})
        return found

    async def plan(
        self, instances: Sequence[Mapping[str, Any]] | None = None, *, apply: bool = False
    ) -> Mapping[str, Any]:
        """`workers`, `evictions` and `devices` if these instances were created or started; None: the daemon's own.

        With `apply` that is done, and the result is what happened.
        """
        body = {"apply": apply} | ({} if instances is None else {"instances": list(instances)})
        found: Mapping[str, Any] = await self._call("POST", "/plan", body=body)
        return found

    async def rebalance(self, *, dry_run: bool = False) -> Mapping[str, Any]:
        """`moves` of workers to better places, without a gap, and what `stays`, with reasons; `dry_run` only plans."""
        found: Mapping[str, Any] = await self._call("POST", "/rebalance", query=given_flags(dry_run=dry_run))
        return found

    async def recommendations(self, *, window_secs: int = 600) -> Mapping[str, Any]:
        """`recommendations` by the figures of the last `window_secs`, each with its evidence and PATCH; `applied` has
        those of the past."""
        found: Mapping[str, Any] = await self._call("GET", "/recommendations", query={"window_secs": str(window_secs)})
        return found

    async def apply_recommendation(self, id: str, *, window_secs: int = 600) -> Mapping[str, Any]:
        """Send the PATCH of a recommendation; its effect is measured after `window_secs`.

        Raises:
            ObjectNotFound: there is no such recommendation, or it is out of date.
            ValidationError: the recommendation has no PATCH.
        """
        made: Mapping[str, Any] = await self._call(
            "POST", f"/recommendations/{quote(id, safe='')}/apply", query={"window_secs": str(window_secs)}
        )
        return made

    async def create_join_token(self, *, node: str | None = None, life_secs: float = 3600.0) -> Mapping[str, Any]:
        """`token`, by which one host may join the cluster within `life_secs`; as `node` alone, if that is given.

        Raises:
            Unsupported: the daemon has no cluster.
        """
        body = {"node": node, "life_secs": life_secs}
        made: Mapping[str, Any] = await self._call("POST", "/hosts/tokens", body=body)
        return made

    async def remove_host(self, name: str) -> None:
        """Revoke the certificates of a host of the cluster, such as a lost or stolen one.

        Raises:
            ObjectNotFound: the host is not in the fleet.
            Unsupported: the daemon has no cluster.
        """
        await self._call("DELETE", f"/hosts/{name}")

    async def templates(self) -> Sequence[Mapping[str, Any]]:
        """The templates that `create` may name."""
        templates: Sequence[Mapping[str, Any]] = await self._call("GET", "/templates")
        return templates

    async def metrics(self) -> str:
        """The metrics in Prometheus' text format."""
        return await self._http.text("/metrics", timeout_s=self._timeout_s)

    async def act(
        self, action: Action, *, names: Sequence[str] | None = None, tags: Mapping[str, str] | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """Apply an action to many instances at once, by name or by tags: one result each, with `ok` and `error`.

        Raises:
            ValidationError: not exactly one of `names` and `tags` is given.
        """
        if (names is None) == (tags is None):
            raise ValidationError("give exactly one of `names` and `tags`")
        chosen = {"names": list(names)} if names is not None else {"tags": dict(tags or {})}
        reply = await self._call("POST", "/instances/actions", body={"action": action, **chosen})
        results: Sequence[Mapping[str, Any]] = reply["results"]
        return results

    async def request(
        self, method: str, path: str, *, body: JsonObject | None = None, query: Query | None = None
    ) -> Any:
        """The JSON of any route of the REST port, inference over HTTP included; `path` is percent-encoded."""
        return await self._call(method, path, body=dict(body) if body is not None else None, query=query)
