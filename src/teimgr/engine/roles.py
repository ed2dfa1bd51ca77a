"""Late interaction: what makes a query or a document of a text's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.batch import Encoded
from teimgr.layout import LateInteraction

QUERY, DOCUMENT = "query", "document"


@dataclass(frozen=True, slots=True)
class Role:
    """One of the two: `limit` is tokens, all included; `prefix` ids (int32) go behind the leading special tokens.

    Where `filling` is set, an input is filled with that id up to the limit, and unless `attend` no token sees the
    filling, which still has vectors of its own.
    """

    query: bool
    limit: int
    prefix: NDArray[np.int32]
    filling: int | None = None
    attend: bool = False

    def dress(self, ids: NDArray[np.int32], leading: int, typed: bool) -> Encoded:
        """The input of a text's `ids`, of which the first `leading` are special; `typed` gives it token types."""
        return self.fill(np.concatenate([ids[:leading], self.prefix, ids[leading:]]), typed)

    def fill(self, ids: NDArray[np.int32], typed: bool) -> Encoded:
        """The input of `ids` that have their prefix already."""
        real = len(ids)
        if self.filling is not None and real < self.limit:
            ids = np.concatenate([ids, np.full(self.limit - real, self.filling, dtype=np.int32)])
        type_ids = np.zeros(len(ids), dtype=np.uint8) if typed else None
        keys = None if self.attend or real == len(ids) else real
        return Encoded(ids, type_ids, keys, query=self.query)


def roles_of(late: LateInteraction, max_length: int) -> dict[bool, Role]:
    """The roles by whether they are the query's; `max_length` is the model's own."""
    filled = late.expand_queries and late.query_length is not None
    return {
        True: Role(
            query=True,
            limit=min(late.query_length or max_length, max_length),
            prefix=np.array(late.query_prefix_ids, dtype=np.int32),
            filling=late.expansion_token_id if filled else None,
            attend=late.attend_to_expansion,
        ),
        False: Role(
            query=False,
            limit=min(late.document_length or max_length, max_length),
            prefix=np.array(late.document_prefix_ids, dtype=np.int32),
        ),
    }
