"""One daemon with the real model for the tests that only ask; each fault test starts its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bench import weights
from tests.support.daemon_process import MINILM, DaemonProcess, WarmDaemonProcess

TEXTS = 300


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    return weights.minilm()


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Mixed lengths, from one word to longer than the model takes, with what tokenizers trip over."""
    source = Path(random.__file__).read_text().split()
    chance = random.Random(20261121)
    found = ["a", "naïve café — 日本語テキスト", "🙂" * 40, "tab\tand\nnewline", "x" * 3000, "(((((" * 60]
    while len(found) < TEXTS:
        length = int(2 ** chance.uniform(0, 7))
        start = chance.randrange(len(source) - length)
        found.append(" ".join(source[start : start + length]))
    chance.shuffle(found)
    return found


@pytest.fixture(scope="session")
def reference(minilm_folder: Path, texts: list[str]) -> np.ndarray:
    """What sentence-transformers says of `texts` in float32, unit length."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm_folder), device="cpu")
    return np.asarray(model.encode(texts, normalize_embeddings=True, batch_size=32), np.float32)


@pytest.fixture(scope="package")
def daemon() -> Iterator[DaemonProcess]:
    """`exact` is MiniLM in float32, `fast` the same in the dtype the engine chooses."""
    with WarmDaemonProcess() as running:
        with running.client() as client:
            client.create("exact", MINILM, dtype="float32")
            client.create("fast", MINILM)
            for name in ("exact", "fast"):
                client.wait_until_running(name, deadline_s=60)
        yield running
