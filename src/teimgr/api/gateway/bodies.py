"""`Bodies`: budgets for the bytes of requests and replies that port 9000 holds in memory, shared by callers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from teimgr.errors import Overloaded, TooLarge
from teimgr.http.bodies import charge_body, read_body
from teimgr.http.byte_budget import ByteBudget, Charge, Shares
from teimgr.http.direct import DirectRequest

# Bodies up to this size have a separate budget, so that interactive requests never wait for bulk ones.
SMALL_BYTES = 64 * 1024
_SMALL_BODIES_BYTES = 64 * 2**20
_LARGE_BODIES_BYTES = 256 * 2**20
# The largest part of a budget that calls to one instance may hold: while it hangs, other instances are served.
_INSTANCE_SHARE = 4
# The largest part of a budget for the bodies of one caller; without keys, of one connection.
_SHARE = 2
_SMALL_DIGITS = 9  # a longer Content-Length is not a small body
# Replies are charged to the budget of large bodies even if they exceed it; above this multiple of that budget new
# calls are refused.
_REPLIES = 2

# The least charge of a call, which takes memory besides its body, so that many small calls are bounded too.
MIN_HELD_BYTES = 1024

HeldKey = tuple[str, str | None, ByteBudget]
"""Instance, the caller whose share is counted (None: all callers), and the budget."""


class ReadBody(NamedTuple):
    """A buffer with a request's head, and its body from `start` on; the bytes charged for it, and their budget."""

    payload: bytearray
    start: int
    charged: int
    budget: ByteBudget


class Bodies:
    """Budgets of the bytes of requests and replies in memory, one for small and one for large bodies.

    The calls to one instance, and the bodies of one caller or connection, hold at most a part of them.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.small_bytes = min(SMALL_BYTES, limit_bytes)
        self.small = ByteBudget(_SMALL_BODIES_BYTES)
        self.large = ByteBudget(max(_LARGE_BODIES_BYTES, limit_bytes))
        self._small_shares, self._large_shares = Shares(self.small, _SHARE), Shares(self.large, _SHARE)
        self._held: Counter[HeldKey] = Counter()

    async def read(self, request: DirectRequest, head: bytes, sharer: Hashable) -> tuple[ReadBody, Charge]:
        """Read `head` and the body into one buffer; the caller releases the returned charge.

        Each byte is charged as it arrives, also against the part of the budget for the bodies of `sharer`.

        Raises:
            TooLarge: the body is over the limit; the rest of it is discarded.
            Overloaded: too many replies wait for their clients, or the budget stayed exhausted for too long.
            SlowClient: the client stopped sending.
        """
        self._check_replies()
        length = request.headers.get(b"content-length", b"")
        is_small = length.isdigit() and len(length) <= _SMALL_DIGITS and int(length) <= SMALL_BYTES
        budget, shares = (self.small, self._small_shares) if is_small else (self.large, self._large_shares)
        charge = shares.charge(sharer)
        try:
            buffer = await read_body(request, self.limit_bytes, charge, head)
            if buffer is None:
                raise TooLarge(f"The request body is larger than the limit of {self.limit_bytes} bytes")
        except Overloaded:
            charge.release()
            raise Overloaded("Too many large requests are being read; try again later") from None
        except BaseException:
            charge.release()
            raise
        return ReadBody(buffer, len(head), charge.bytes, budget), charge

    def take_small(self, request: DirectRequest, head: bytes) -> tuple[ReadBody, Charge] | None:
        """Return the result of `read` for a small body that has arrived and fits its budget now; else None."""
        size = request.body.whole_bytes
        if size is None or size > self.small_bytes:
            return None
        self._check_replies()
        charge = Charge(self.small)
        if not charge.try_take(size):
            return None
        return ReadBody(bytearray(head + request.body.take()), len(head), size, self.small), charge

    async def hold(
        self, head: bytes, body: bytes | bytearray, budget: ByteBudget | None = None
    ) -> tuple[ReadBody, Charge]:
        """Like `read`, for a body that is in memory, as a small one unless a budget is given; the caller releases the
        charge.

        Raises:
            Overloaded: too many replies wait for their clients, or the budget stayed exhausted for too long.
        """
        self._check_replies()
        charge = Charge(budget or self.small)
        await charge_body(charge, len(body))
        return ReadBody(bytearray(head + body), len(head), charge.bytes, budget or self.small), charge

    def _check_replies(self) -> None:
        if self.large.taken_bytes > self.large.limit_bytes * _REPLIES:
            raise Overloaded("Too many replies wait for clients that do not read them; try again later")

    def held_for(self, instance: str, body: ReadBody, holder: str | None = None) -> Holding:
        """Count `body` as held by `instance` and the caller `holder` within the block, at least `MIN_HELD_BYTES`.

        Raises:
            Overloaded: the calls to the instance, or those of `holder` to it, already hold their share.
        """
        count = max(body.charged, MIN_HELD_BYTES)
        most = body.budget.limit_bytes // _INSTANCE_SHARE
        of_all: HeldKey = (instance, None, body.budget)
        if (held := self._held.get(of_all, 0)) and held + count > most:
            raise Overloaded(f"Too many requests wait for instance '{instance}'; try again later")
        if holder is None:
            return Holding(self._held, (of_all,), count)
        of_holder: HeldKey = (instance, holder, body.budget)
        if (held := self._held.get(of_holder, 0)) and held + count > most // _SHARE:
            raise Overloaded(
                f"Too many requests with the key '{holder}' wait for instance '{instance}'; try again later"
            )
        return Holding(self._held, (of_all, of_holder), count)


class Holding:
    """A context manager that counts `count` more as held under each of `keys`."""

    __slots__ = ("_count", "_held", "_keys")

    def __init__(self, held: Counter[HeldKey], keys: Sequence[HeldKey], count: int) -> None:
        self._held = held
        self._keys = keys
        self._count = count

    def __enter__(self) -> None:
        for key in self._keys:
            self._held[key] += self._count

    def __exit__(self, *failure: object) -> None:
        for key in self._keys:
            self._held[key] -= self._count
            if not self._held[key]:
                del self._held[key]
