"""A batch: its record, which is also the journal of its results, and its representation in OpenAI's API."""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Self

import orjson

from teimgr.api.batches.files import new_file_id
from teimgr.errors import ObjectInUse, ValidationError
from teimgr.spec import known

_VERSION = 1
_WINDOW = re.compile(r"([1-9]\d{0,5})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_WINDOW_S = 7 * 86_400


class Status(str, Enum):
    """OpenAI's status of a batch."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED)


class BatchFault(NamedTuple):
    """An error in an input file: at a line, counted from 1, or with None in the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class RowSet:
    """A set of rows, as a bit set."""

    def __init__(self, bits: bytes | bytearray = b"") -> None:
        self._bits = bytearray(bits)

    def __contains__(self, row: int) -> bool:
        place = row >> 3
        return place < len(self._bits) and bool(self._bits[place] >> (row & 7) & 1)

    def with_rows(self, rows: Iterable[int]) -> RowSet:
        """This set and `rows`, as a new set."""
        added = RowSet(self._bits)
        for row in rows:
            place = row >> 3
            if place >= len(added._bits):
                added._bits.extend(bytes(place + 1 - len(added._bits)))
            added._bits[place] |= 1 << (row & 7)
        return added

    def to_text(self) -> str:
        return base64.b64encode(self._bits).decode()

    @classmethod
    def from_text(cls, text: str) -> RowSet:
        return cls(base64.b64decode(text))


@dataclass(frozen=True, slots=True)
class ResultPart:
    """The committed lines and bytes of one of the two files of results."""

    id: str = field(default_factory=new_file_id)
    lines: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """The committed results: rows in `done`, each in one of the two files; `tokens` are those of all inputs."""

    output: ResultPart = field(default_factory=ResultPart)
    error: ResultPart = field(default_factory=ResultPart)
    done: RowSet = field(default_factory=RowSet)
    tokens: int = 0

    def to_plain(self) -> dict[str, Any]:
        return {"output": self.output, "error": self.error, "done": self.done.to_text(), "tokens": self.tokens}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Self:
        parts = {name: ResultPart(**known(ResultPart, values[name])) for name in ("output", "error")}
        return cls(**parts, done=RowSet.from_text(values["done"]), tokens=values["tokens"])


@dataclass(slots=True)
class Batch:
    """One batch. `owner` is the name of an API key; times are seconds of the Unix epoch.

    `moments` are the times of each status by OpenAI's field name, such as `in_progress_at`.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created: float
    expires: float
    metadata: dict[str, str] | None = None
    output_lifetime_s: int | None = None
    status: Status = Status.VALIDATING
    moments: dict[str, int] = field(default_factory=dict)
    faults: list[BatchFault] = field(default_factory=list)
    model: str | None = None
    total: int = 0
    progress: BatchProgress = field(default_factory=BatchProgress)
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def ended(self) -> int | None:
        """When its final status was reached; None before."""
        return self.moments[f"{self.status.value}_at"] if self.status.is_final else None

    def enter(self, status: Status, now: float) -> None:
        self.status = status
        self.moments[f"{status.value}_at"] = int(now)

    def note_validated(self, total: int, model: str | None, faults: list[BatchFault]) -> None:
        self.total, self.model, self.faults = total, model, faults

    def note_published(self, output_file_id: str | None, error_file_id: str | None) -> None:
        self.output_file_id, self.error_file_id = output_file_id, error_file_id

    def advance(self, progress: BatchProgress) -> None:
        """More results are written to disk."""
        self.progress = progress

    def check_can_be_cancelled(self) -> None:
        """Raises ObjectInUse where the batch has ended, or its results are being published."""
        if self.status.is_final or self.status is Status.FINALIZING:
            raise ObjectInUse(f"Cannot cancel a batch with status '{self.status.value}'")

    def as_object(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        moments = dict.fromkeys(f"{status.value}_at" for status in Status if status is not Status.VALIDATING)
        faults = [fault._asdict() for fault in self.faults]
        output, error = self.progress.output, self.progress.error
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": faults} if faults else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": int(self.created),
            **moments,
            **self.moments,
            "expires_at": int(self.expires),
            "request_counts": {"total": self.total, "completed": output.lines, "failed": error.lines},
            "usage": _usage(self.progress.tokens),
            "metadata": self.metadata,
        }

    def to_record(self, progress: BatchProgress | None = None) -> bytes:
        """The record of this batch, with `progress` if it is given."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values["faults"] = [tuple(fault) for fault in self.faults]
        values["progress"] = (progress or self.progress).to_plain()
        return orjson.dumps({"version": _VERSION, **values})

    @classmethod
    def from_record(cls, record: bytes) -> Self:
        """Raises ValueError, KeyError or TypeError for a record that is damaged or of another version."""
        values = orjson.loads(record)
        if values.pop("version") != _VERSION:
            raise ValueError("another version")
        values["status"] = Status(values["status"])
        values["faults"] = [BatchFault(*each) for each in values["faults"]]
        values["progress"] = BatchProgress.from_plain(values["progress"])
        return cls(**known(cls, values))


def _usage(tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens,
    }


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


def window_s(window: str) -> int:
    """The seconds of a completion window such as `24h`.

    Raises:
        ValidationError: it is not a whole number of s, m, h or d, or longer than seven days.
    """
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_WINDOW_S:
        raise ValidationError(f"completion_window: must be a time such as 24h, of 7d at most (got {window[:80]!r})")
    return seconds
