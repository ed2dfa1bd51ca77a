"""What /metrics says of inference on the daemon's HTTP port."""

from __future__ import annotations

from teimgr import catalogue
from teimgr.metrics import Metrics


class InferenceFigures:
    """Counts answers by dialect, the worker's route and HTTP status; every label is of a small fixed set."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def answered(self, dialect: str, route: str, status: int, seconds: float) -> None:
        """A request got its answer, or the answer that there is none."""
        self._metrics.observe(catalogue.INFERENCE, seconds, dialect, route, str(status))

    def carried(self, dialect: str, request_bytes: int, reply_bytes: int) -> None:
        """Bodies of a request and of its answer went through."""
        self._metrics.count(catalogue.INFERENCE_BYTES, dialect, "in", by=request_bytes)
        self._metrics.count(catalogue.INFERENCE_BYTES, dialect, "out", by=reply_bytes)
