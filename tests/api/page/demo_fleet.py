"""Daemons for the browser: small and with API keys for tests, with a real model and all states for pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import models
from tests.support.credentials import SECRETS
from tests.support.daemon_process import MINILM, DaemonProcess, WarmDaemonProcess
from tests.support.models.dual_encoders import build_clip

LIMIT_S = 100.0
KEYS = [
    {"name": "operator", "key": SECRETS["admin"], "rights": ["admin", "read", "inference"]},
    {"name": "viewer", "key": SECRETS["read"], "rights": ["read"]},
]


@contextmanager
def small_fleet(folder: Path) -> Iterator[DaemonProcess]:
    """`embedding`, which has an unknown key, `reranker` and `classifier`, tiny ones, behind API keys."""
    made = {
        "embedding": models.build("bert", folder / "embedding"),
        "reranker": models.build_cross_encoder("bert", folder / "reranker"),
        "classifier": models.build_classifier("bert", folder / "classifier"),
    }
    models.edit(made["embedding"] / "config.json", speed_of_light=299792458)
    auth = {"enabled": True, "providers": ["api_keys"], "api_keys": KEYS}
    with WarmDaemonProcess(auth=auth) as daemon, daemon.client(api_key=SECRETS["admin"]) as client:
        _create(client, made)
        yield daemon


@contextmanager
def pictured_fleet(folder: Path) -> Iterator[DaemonProcess]:
    """MiniLM and tiny models, one that failed and one that is stopped."""
    made = {
        "support-rerank": models.build_cross_encoder("bert", folder / "acme" / "cross-encoder-small"),
        "sentiment": models.build_classifier("bert", folder / "acme" / "review-classifier"),
        "colbert": models.build_multi_vector("bert", folder / "acme" / "late-interaction"),
        "photo-search": build_clip(folder / "acme" / "clip-small"),
        "nightly-index": models.build("bert", folder / "acme" / "encoder-base"),
    }
    broken = folder / "acme" / "truncated-download"
    models.build("bert", broken)
    (broken / "model.safetensors").write_bytes(b"short")
    with WarmDaemonProcess(health_check_interval_secs=10) as daemon, daemon.client() as client:
        client.create("docs-search", MINILM, tags={"team": "search", "tier": "1"}, replicas=2)
        client.create("candidate", str(broken), tags={"team": "search"}, prometheus_port=0)
        _create(client, made)
        client.wait_until_running("docs-search", deadline_s=LIMIT_S)
        client.stop("nightly-index")
        yield daemon


def _create(client: Any, made: Mapping[str, Path]) -> None:
    for name, model in made.items():
        tags = {"team": "moderation" if name in ("classifier", "sentiment") else "search"}
        client.create(name, str(model), dtype="float32", tags=tags, prometheus_port=0)
    for name in made:
        client.wait_until_running(name, deadline_s=LIMIT_S)
