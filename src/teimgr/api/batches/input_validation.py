"""Validation of a whole input file, before its first request is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

from teimgr.api.batches.batch_record import BatchFault
from teimgr.api.batches.disk import Disk
from teimgr.api.batches.lines import InputRequest, read_requests
from teimgr.errors import TeimgrError

# Faults that a batch names; the rest of the file is not read.
MAX_FAULTS = 100

CheckModel = Callable[[str], None]
"""Raises a TeimgrError where the owner may not use the model of this name."""


class Validated(NamedTuple):
    """What was found: the requests counted, the model where all name the same, and the faults."""

    total: int
    model: str | None
    faults: list[BatchFault]


async def validate(
    disk: Disk, path: Path, url: str, max_line_bytes: int, max_lines: int, check_model: CheckModel
) -> Validated:
    """Check every line: its form, its endpoint, that its custom_id is unique, and its model.

    In memory are a chunk of lines, and 16 bytes for each custom_id.

    Raises:
        OSError: the file cannot be read.
    """
    seen = _Seen(check_model)
    total = 0
    async with aclosing(read_requests(disk, path, url, max_line_bytes)) as chunks:
        async for chunk in chunks:
            for parsed in chunk:
                if total == max_lines:
                    text = f"The file has more than {max_lines} requests (batches.max_lines)."
                    seen.faults.append(BatchFault("too_many_requests", text))
                    return Validated(total, None, seen.faults)
                total += 1
                if isinstance(parsed, BatchFault):
                    seen.faults.append(parsed)
                elif seen.check(parsed):
                    await asyncio.sleep(0)  # to look for names like an unknown one takes milliseconds
                if len(seen.faults) >= MAX_FAULTS:
                    return Validated(total, None, seen.faults)
    if not total:
        seen.faults.append(BatchFault("empty_file", "The file has no request."))
    models = list(seen.models)
    return Validated(total, models[0] if len(models) == 1 else None, seen.faults)


class _Seen:
    """The custom_ids and models of the requests so far."""

    def __init__(self, check_model: CheckModel) -> None:
        self.faults: list[BatchFault] = []
        self.models: dict[str, str | None] = {}  # why each cannot be used
        self._ids: set[bytes] = set()
        self._check_model = check_model

    def check(self, request: InputRequest) -> bool:
        """Note a request and its faults; whether its model was looked up."""
        digest = request.digest
        if digest in self._ids:
            text = "The custom_id of this request is that of another one; it must be unique in a batch."
            self.faults.append(BatchFault("duplicate_custom_id", text, request.number, "custom_id"))
        self._ids.add(digest)
        is_new = request.model not in self.models
        if is_new:
            self.models[request.model] = self._refusal(request.model)
        if (why := self.models[request.model]) is not None:
            self.faults.append(BatchFault("model_not_found", why, request.number, "body.model"))
        return is_new

    def _refusal(self, model: str) -> str | None:
        try:
            self._check_model(model)
        except TeimgrError as error:
            return error.message
        return None
