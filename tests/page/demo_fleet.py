"""A daemon with an instance of each kind, one that failed and one that is stopped: for the browser and for pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import models
from tests.support.daemon_process import MINILM, DaemonProcess, WarmDaemonProcess

LIMIT_S = 100.0
RUNNING = ("docs-search", "support-rerank", "sentiment", "colbert")


@contextmanager
def demo_fleet(folder: Path, **settings: Any) -> Iterator[DaemonProcess]:
    """The daemon, once every instance is in the state it is meant to have. `folder` gets the models."""
    made = {
        "support-rerank": models.build_cross_encoder("bert", folder / "acme" / "cross-encoder-small"),
        "sentiment": models.build_classifier("bert", folder / "acme" / "review-classifier"),
        "colbert": models.build_multi_vector("bert", folder / "acme" / "late-interaction"),
        "nightly-index": models.build("bert", folder / "acme" / "encoder-base"),
    }
    broken = folder / "acme" / "truncated-download"
    models.build("bert", broken)
    (broken / "model.safetensors").write_bytes(b"short")
    with WarmDaemonProcess(**settings) as daemon, daemon.client() as client:
        client.create("docs-search", MINILM, tags={"team": "search", "tier": "1"}, replicas=2)
        for name, model in made.items():
            tags = {"team": "support"} if name in ("support-rerank", "sentiment") else {"team": "search"}
            client.create(name, str(model), tags=tags, prometheus_port=0)
        client.create("candidate", str(broken), tags={"team": "search"}, prometheus_port=0)
        for name in (*RUNNING, "nightly-index"):
            client.wait_until_running(name, deadline_s=LIMIT_S)
        client.stop("nightly-index")
        yield daemon
