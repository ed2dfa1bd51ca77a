"""Runs batches with pictures; a picture that cannot be decoded fails alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from teimgr.engine.batching.queue import QueueEntry
from teimgr.engine.finisher import Failures
from teimgr.engine.images.inputs import EncodedPicture
from teimgr.engine.images.model import PicturedModel
from teimgr.engine.intake import Intake
from teimgr.engine.job import Job
from teimgr.engine.known_results import DistinctInputs
from teimgr.engine.runner import Runner
from teimgr.engine.text.tokenizer import TokenizeOptions
from teimgr.errors import TeimgrError


class PictureIntake(Intake):
    """An intake that counts the tokens of pictures, which are known before decoding."""

    def estimate(self, job: Job, options: TokenizeOptions) -> int:
        """Estimate the tokens of a job before it is tokenized."""
        return super().estimate(job, options) + job.tokens_of_media()


class PictureRunner(Runner):
    """A runner for models of texts and images; pictures are never computed on a caller's thread."""

    _pack: Callable[..., Any]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert isinstance(self._model, PicturedModel)
        self._pack = self._model.pack

    def serve_queries(self, entries: list[QueueEntry]) -> bool:
        """Serve queries of texts alone, as `Runner` does."""
        return not _has_pictures(entries) and super().serve_queries(entries)

    def _execute_last(self, left: list[list[QueueEntry]]) -> None:
        if not _has_pictures(left[-1]):
            super()._execute_last(left)
            return
        failed, good = [], []
        for entry in left[-1]:
            encoded = entry.encoded
            taken = [one.take() for one in encoded.waiting] if isinstance(encoded, EncodedPicture) else []
            if broken := [result for result in taken if isinstance(result, TeimgrError)]:
                failed.append((entry.job, int(entry.rows[0]), broken[0]))
            else:
                good.append(entry)
        left[-1:] = [good] if good else []
        if failed:
            self._finisher.put(Failures(failed))
        if good:
            super()._execute_last(left)

    def _start(self, left: list[list[QueueEntry]], distinct: DistinctInputs | None = None) -> Any:
        if not _has_pictures(left[-1]):
            return super()._start(left, distinct)
        of_texts = self._token_s
        try:
            return super()._start(left, distinct)
        finally:
            self._token_s = of_texts  # only texts count for the estimated time of a text query


def _has_pictures(entries: Sequence[QueueEntry]) -> bool:
    return any(isinstance(entry.encoded, EncodedPicture) for entry in entries)
