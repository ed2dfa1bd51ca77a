"""Who may join the fleet: one-time join tokens, and the nodes that have joined, in one file beside the authority.

A token is `teimgr1.ID.SECRET.FINGERPRINT`: 256 random bits, of which the file has the SHA-256 alone, and the
fingerprint of the fleet's authority, by which the joining node recognises the daemon.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from teimgr.cluster.authority import CERTIFICATE_LIFE
from teimgr.errors import Forbidden, InvalidConfig, Unauthenticated, ValidationError
from teimgr.files import write_atomically
from teimgr.spec import known
from teimgr.wire.fleet_tls import check_node_name

log = logging.getLogger(__name__)

MAX_TOKENS = 256
MAX_NODES = 4096
RENEWALS_NOTED_S = 60.0
"""Minimum interval between writes of a node's renewal time; nodes may renew more often."""
MAX_TOKEN_LIFE_S = 7 * 86_400.0
DEFAULT_TOKEN_LIFE_S = 3600.0
_PREFIX = "teimgr1"
_SECRET_BYTES = 32
_MAX_TOKEN_CHARS = 256


class JoinToken(NamedTuple):
    """The parts of a token, as the joining node reads them."""

    id: str
    secret: str
    fingerprint: str

    def __str__(self) -> str:
        return ".".join((_PREFIX, *self))

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """The inverse of `str`.

        Raises:
            ValidationError: it is not a join token.
        """
        prefix, *parts = text.strip().split(".") if len(text) <= _MAX_TOKEN_CHARS else [""]
        if prefix != _PREFIX or len(parts) != 3 or not all(part.isascii() and part for part in parts):
            raise ValidationError(f"token: not a join token, which begins with {_PREFIX}.")
        return cls(*parts)


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token at rest. Times are seconds since the epoch; `node` is the only name that it admits, where it has one."""

    id: str
    secret_sha256: str
    expires_at: float
    node: str | None = None
    used_by: str | None = None


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node that has joined; its certificate is renewed while it is here. Times are seconds since the epoch."""

    name: str
    joined_at: float
    renewed_at: float


class Enrolment:
    """Tokens and nodes of the fleet. One process writes the file, which is replaced before an answer is given.

    A change that the disk refuses is not made, and may be tried again: the methods that make one raise OSError then.
    They block; one thread at a time calls them, while others may read.

    `reserved` is the name of the daemon's own node, which no other may have.

    Raises:
        InvalidConfig: the file cannot be read.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, reserved: str = "") -> None:
        self._path = path
        self._reserved = reserved
        self._clock = clock
        self._tokens: dict[str, TokenRecord] = {}
        self._nodes: dict[str, NodeRecord] = {}
        self._removed: dict[str, float] = {}
        try:
            values = json.loads(path.read_bytes()) if path.exists() else {"tokens": [], "nodes": []}
            self._tokens = {each["id"]: TokenRecord(**known(TokenRecord, each)) for each in values["tokens"]}
            self._nodes = {each["name"]: NodeRecord(**known(NodeRecord, each)) for each in values["nodes"]}
            self._removed = {name: float(at) for name, at in values.get("removed", {}).items()}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidConfig(f"the nodes of the fleet cannot be read from {path}: {error!r}") from error

    @property
    def nodes(self) -> list[NodeRecord]:
        """The nodes that have joined and were not removed, by name."""
        return [self._nodes[name] for name in sorted(self._nodes)]

    def has(self, node: str) -> bool:
        return node in self._nodes

    @property
    def removed(self) -> dict[str, float]:
        """Revocations: by node, the time in epoch seconds before which its certificates were revoked."""
        return dict(self._removed)

    def create_token(
        self, fingerprint: str, node: str | None = None, life_s: float = DEFAULT_TOKEN_LIFE_S
    ) -> JoinToken:
        """Create a token for one node, to be used within `life_s` seconds; one for a `node` may also replace that node.

        Raises:
            ValidationError: the name, the life, or the number of unused tokens exceeds its limit.
        """
        if node is not None:
            check_node_name(node)
        if not 0 < life_s <= MAX_TOKEN_LIFE_S:
            raise ValidationError(f"life: {life_s:g} s, must be above 0 and at most {MAX_TOKEN_LIFE_S:g}")
        now = self._clock()
        if sum(each.used_by is None and now < each.expires_at for each in self._tokens.values()) >= MAX_TOKENS:
            raise ValidationError(f"tokens: {MAX_TOKENS} unused tokens exist, which is the limit")
        token = JoinToken(secrets.token_hex(8), secrets.token_urlsafe(_SECRET_BYTES), fingerprint)
        record = TokenRecord(token.id, _sha256(token.secret), now + life_s, node)
        self._commit(tokens={**self._tokens, token.id: record})
        return token

    def check(self, token: JoinToken, node: str) -> TokenRecord:
        """Return the record of a token that `redeem` would use up for the node.

        Raises:
            Unauthenticated: the token is unknown, expired, or was used.
            Forbidden: it is for another node, or a node of this name is in the fleet and the token is not for it, or
                it is the daemon's own.
            ValidationError: `node` is not a name of a node, or the fleet has the maximum number of nodes.
        """
        check_node_name(node)
        record = self._tokens.get(token.id)
        if record is None or not hmac.compare_digest(record.secret_sha256, _sha256(token.secret)):
            raise Unauthenticated("the join token is unknown")
        if self._clock() >= record.expires_at:
            raise Unauthenticated("the join token has expired")
        if record.used_by is not None:
            raise Unauthenticated(f"the join token was used by node '{record.used_by}'")
        if record.node not in (None, node):
            raise Forbidden(f"The join token is not for node '{node}'")
        if node == self._reserved:
            raise Forbidden(f"Node '{node}' is the daemon's own host: choose another name")
        if record.node is None and node in self._nodes:
            raise Forbidden(f"A node '{node}' is in the fleet: remove it, or join with a token made for this name")
        if node not in self._nodes and len(self._nodes) >= MAX_NODES:
            raise ValidationError(f"nodes: the fleet has {MAX_NODES}, which is the limit")
        return record

    def redeem(self, token: JoinToken, node: str) -> None:
        """Use up the token and enter the node, durably, before a certificate is given out. Raises as `check`."""
        record, now, removed = self.check(token, node), self._clock(), self._removed
        if node in self._nodes or node in removed:
            removed = {**removed, node: math.floor(now)}  # certificates have times in whole seconds
        self._commit(
            tokens={**self._tokens, token.id: replace(record, used_by=node)},
            nodes={**self._nodes, node: NodeRecord(node, now, now)},
            removed=removed,
        )

    def renew(self, node: str, issued_at: float) -> None:
        """Note a renewal by the right of a certificate that was issued at a time, in seconds since the epoch.

        Raises:
            Forbidden: the node was removed, or another host has joined under its name since.
        """
        record = self._nodes.get(node)
        if record is None:
            raise Forbidden(f"Node '{node}' is not in the fleet")
        if issued_at < self._removed.get(node, 0.0):
            raise Forbidden(f"Another host is node '{node}' of the fleet now")
        if (now := self._clock()) - record.renewed_at >= RENEWALS_NOTED_S:
            self._commit(nodes={**self._nodes, node: replace(record, renewed_at=now)})

    def remove(self, node: str) -> bool:
        """Remove the node from the fleet and revoke its certificates. Return False if it was not in the fleet."""
        if node not in self._nodes:
            return False
        self._commit(
            nodes={name: each for name, each in self._nodes.items() if name != node},
            removed={**self._removed, node: math.floor(self._clock()) + 1},
        )
        return True

    def _commit(
        self,
        tokens: dict[str, TokenRecord] | None = None,
        nodes: dict[str, NodeRecord] | None = None,
        removed: dict[str, float] | None = None,
    ) -> None:
        """Write new values, None for those that stay, and have them in memory then; without what has expired."""
        tokens, nodes = tokens or self._tokens, self._nodes if nodes is None else nodes
        now, removed = self._clock(), removed or self._removed
        tokens = {id: each for id, each in tokens.items() if now < each.expires_at}
        used = [id for id, each in tokens.items() if each.used_by is not None]
        for id in used[:-MAX_TOKENS]:  # the newest are kept, for the message if one is used again
            del tokens[id]
        longest_ago = now - CERTIFICATE_LIFE.total_seconds()  # certificates issued earlier have expired
        removed = {name: at for name, at in removed.items() if at > longest_ago}
        values = {
            "tokens": [asdict(each) for each in tokens.values()],
            "nodes": [asdict(each) for each in nodes.values()],
            "removed": removed,
        }
        write_atomically(self._path, json.dumps(values).encode(), mode=0o600, durable=True)
        self._tokens, self._nodes, self._removed = tokens, nodes, removed


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
