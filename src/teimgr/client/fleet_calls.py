"""Calls of the REST API about the fleet as a whole: configuration, GPUs, templates, metrics, bulk actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

from teimgr.client.http_replies import JsonObject, Query
from teimgr.client.rest import RestCalls, given_flags
from teimgr.errors import ValidationError

Action = Literal["start", "stop", "restart", "delete"]


class FleetCalls(RestCalls):
    """Configuration, GPUs, templates and metrics of a daemon; results are the JSON of the REST API."""

    async def config(self) -> Sequence[Mapping[str, Any]]:
        """Every setting in effect: objects of `key`, `value` and `source`."""
        settings: Sequence[Mapping[str, Any]] = await self._call("GET", "/config")
        return settings

    async def reload(self, *, dry_run: bool = False, prune: bool | None = None) -> Mapping[str, Any]:
        """Have the daemon read its configuration again and apply it; `dry_run` only returns the `plan`.

        `prune` deletes instances that are seeds no more; None leaves that to the key `prune_seeds`.

        Raises:
            InvalidConfig: the configuration has faults, and nothing was changed.
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
        """Have the next daemon take over; `pid` and `version` of it, which `daemon` shows as soon as it serves.

        Raises:
            UpdateFailed: it does not start; the present one serves on.
        """
        found: Mapping[str, Any] = await self._call("POST", "/daemon/restart")
        return found

    async def gpus(self) -> Mapping[str, Any]:
        """`gpus` with memory, load and workers of each; without any, `reason` has why."""
        gpus: Mapping[str, Any] = await self._call("GET", "/gpus")
        return gpus

    async def hosts(self) -> Mapping[str, Any]:
        """`hosts` of the cluster with cores, memory, workers and versions; none in a fleet of one host."""
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
        """Send the PATCH of a recommendation; what it brings is judged after `window_secs`.

        Raises:
            ObjectNotFound: it is not recommended, or not any more.
            ValidationError: it has no PATCH.
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
        """Revoke the certificates of a host of the cluster, as of one that is lost or was stolen.

        Raises:
            ObjectNotFound: it is not in the fleet.
            Unsupported: the daemon has no cluster.
        """
        await self._call("DELETE", f"/hosts/{name}")

    async def templates(self) -> Sequence[Mapping[str, Any]]:
        """The templates that `create` may name."""
        templates: Sequence[Mapping[str, Any]] = await self._call("GET", "/templates")
        return templates

    async def metrics(self) -> str:
        """The page of metrics, in Prometheus' text format."""
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
