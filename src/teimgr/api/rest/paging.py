"""Pages of OpenAI's lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from teimgr.errors import ValidationError


class Listed(Protocol):
    """A member of a list."""

    @property
    def id(self) -> str:
        """Unique in the list."""

    def as_object(self) -> dict[str, Any]:
        """Its object on the wire."""


def page_of(members: Sequence[Listed], after: str | None, limit: int) -> dict[str, Any]:
    """The page of at most `limit` members that follows the one whose id is `after`.

    Raises:
        ValidationError: no member has that id.
    """
    start = 0
    if after is not None:
        start = next((place for place, each in enumerate(members, 1) if each.id == after), -1)
        if start < 0:
            raise ValidationError(f"after: there is no {after[:80]!r} in this list")
    page = members[start : start + limit]
    return {
        "object": "list",
        "data": [each.as_object() for each in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": start + limit < len(members),
    }
