"""What a caller gave, judged before anything is sent: nothing is ignored, and every refusal is a `ValidationError`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from teimgr.errors import ValidationError
from teimgr.typed import unknown


def check_keys(given: Mapping[str, object], known: Collection[str]) -> None:
    """Refuse what Python's `**` let through.

    Raises:
        ValidationError: a key is not in `known`; the message offers the nearest one that is.
    """
    for name, value in given.items():
        if name not in known:
            raise ValidationError(unknown(name, value, known))
