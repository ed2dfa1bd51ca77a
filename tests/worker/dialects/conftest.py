"""A daemon with a tiny model of every kind, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess, free_ports
from tests.support.models import (
    build,
    build_classifier,
    build_cross_encoder,
    build_m3,
    build_multi_vector,
    build_routed_sparse,
    build_splade,
)
from tests.support.models.dual_encoders import (
    build_clap,
    build_clip,
    build_colqwen2,
    build_dinov2,
    build_qwen3_vl_embedding,
    build_qwen3_vl_reranker,
    build_siglip2_naflex,
)
from tests.support.models.scoring import build_token_classifier
from tests.worker.dialects.dialect_client import LIMIT_S, Asking

PROMPTS = {"query": "query: ", "document": "document: "}


def pytest_itemcollected(item: pytest.Item) -> None:
    if "fleet" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model for each instance."""
    folder = tmp_path_factory.mktemp("fleet")
    return {
        "dense": build("bert", folder / "dense", prompts=PROMPTS),
        "m3": build_m3(folder / "m3"),
        "splade": build_splade("bert", folder / "splade"),
        "routed": build_routed_sparse(folder / "routed"),
        "colbert": build_multi_vector("bert", folder / "colbert"),
        "reranker": build_cross_encoder("bert", folder / "reranker"),
        "classifier": build_classifier("bert", folder / "classifier"),
        "clip": build_clip(folder / "clip"),
        "naflex": build_siglip2_naflex(folder / "naflex"),
        "dinov2": build_dinov2(folder / "dinov2"),
        "clap": build_clap(folder / "clap"),
        "pages": build_colqwen2(folder / "pages"),
        "chat": build_qwen3_vl_embedding(folder / "chat"),
        "judge": build_qwen3_vl_reranker(folder / "judge"),
        "entities": build_token_classifier("bert", folder / "entities"),
    }


@pytest.fixture(scope="package")
def served(fleet: dict[str, Path]) -> Iterator[tuple[DaemonProcess, dict[str, int]]]:
    """The daemon, and the port of each instance."""
    aliases = {"text-embedding-3-small": "dense", "ada": str(fleet["dense"]), "dead": "nobody"}
    settings = {"inference_max_body_mb": 4, "ollama_port": free_ports(1)[0], "health_check_interval_secs": 10}
    with (
        WarmDaemonProcess(aliases=aliases, **settings) as daemon,
        daemon.client() as client,
    ):
        for name, model in fleet.items():
            client.create(name, str(model), dtype="float32", threads=1)  # bit for bit, whatever else runs
        client.create("idle", str(fleet["splade"]))
        client.stop("idle")
        for name in fleet:
            client.wait_until_running(name, deadline_s=100)
        yield daemon, {name: client.get(name).port for name in fleet}


@pytest.fixture
async def ask(served: tuple[DaemonProcess, dict[str, int]]) -> AsyncIterator[Asking]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as session:
        yield Asking(*served, session)
