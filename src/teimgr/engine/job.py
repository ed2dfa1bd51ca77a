"""A job: one call's texts on their way through the engine, and the one answer they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from teimgr.errors import TeimgrError


class Lane(Enum):
    """Who waits for the answer: somebody at a prompt, or a pipeline that wants throughput."""

    INTERACTIVE = "interactive"
    BULK = "bulk"


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """What a call asks of every one of its texts.

    `dimensions` keeps that many leading values of the vector, before `normalize` scales it to length 1.
    """

    truncate: bool = True
    truncation_left: bool = False
    prompt_name: str | None = None
    normalize: bool = True
    dimensions: int | None = None


class Job:
    """Texts in, `vectors` and `errors` out; a null text is a row that fails alone.

    `deadline` is a `time.monotonic()` moment or None. `context` is the caller's own and never looked at.
    Results are the finisher thread's to write and complete once the job is delivered: `vectors` is float32
    [texts, dimensions], zero in the rows that `errors` explains. The three times are means over the served rows:
    from submission to queue, from queue to the start of the batch, and the duration of the batch the row rode in.
    """

    __slots__ = (
        "cancelled",
        "chars",
        "context",
        "deadline",
        "errors",
        "inference_ns",
        "lane",
        "options",
        "queue_ns",
        "remaining",
        "submitted_ns",
        "texts",
        "tokenization_ns",
        "tokens",
        "vectors",
    )

    def __init__(
        self,
        texts: Sequence[str | None],
        options: EmbedOptions,
        lane: Lane,
        deadline: float | None = None,
        context: object = None,
    ) -> None:
        self.texts = texts
        self.options = options
        self.lane = lane
        self.deadline = deadline
        self.context = context
        self.cancelled = False
        self.vectors: NDArray[np.float32] = np.zeros((len(texts), 0), dtype=np.float32)
        self.errors: dict[int, TeimgrError] = {}
        self.remaining = len(texts)
        self.chars = sum(len(text) for text in texts if text)
        self.tokens = 0
        self.submitted_ns = 0
        self.tokenization_ns = 0
        self.queue_ns = 0
        self.inference_ns = 0

    def cancel(self) -> None:
        """Any thread: rows not yet started are skipped, and the job is never delivered."""
        self.cancelled = True

    def average_times(self) -> None:
        """Turn the summed times into means over the rows that were served."""
        served = max(len(self.texts) - len(self.errors), 1)
        self.tokenization_ns //= served
        self.queue_ns //= served
        self.inference_ns //= served
