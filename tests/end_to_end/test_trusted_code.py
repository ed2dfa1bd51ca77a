"""Code of a model's own, through a real daemon: fetched from another repository, pinned, named or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from tests.support.daemon_process import DaemonProcess
from tests.support.hub_server import SHA, Hub
from tests.support.models import WIDTH, build, edit

from teimgr.errors import InvalidConfig, TeimgrError

CODE = "somebody/code"
MODELING = b"""
import transformers

class OwnConfig(transformers.BertConfig):
    model_type = "own-bert"

class OwnModel(transformers.BertModel):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.last_hidden_state = found.last_hidden_state + 1.0
        return found
"""
MODULE = """
import json
from pathlib import Path

import torch


class Scale(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, features):
        vectors = features["sentence_embedding"]
        features["sentence_embedding"] = torch.cat([vectors, vectors * self.factor], dim=-1)
        return features

    @staticmethod
    def load(model_name_or_path, **kwargs):
        folder = Path(model_name_or_path) / kwargs["subfolder"]
        return Scale(json.loads((folder / "config.json").read_text())["factor"])
"""
READER = """
from sentence_transformers.sentence_transformer.modules import Transformer


class Reader(Transformer):
    pass
"""
TEXTS = ["fog", "Rain fell on the harbour all night."]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub(CODE, {"own_code.py": MODELING + (MODULE + READER).encode(), "model.safetensors": b"w"}) as hub:
        yield hub


@pytest.fixture(scope="module")
def daemon(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(allow_remote_code=True)
    home = str(tmp_path_factory.mktemp("home"))
    try:
        yield daemon.start({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": home})
    finally:
        daemon.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("bert", tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def coded(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain` by a class of another repository, and with a module of its own behind the pooling."""
    folder = shutil.copytree(plain, tmp_path_factory.mktemp("coded") / "model")
    auto_map = {"AutoConfig": f"{CODE}--own_code.OwnConfig", "AutoModel": f"{CODE}--own_code.OwnModel"}
    edit(folder / "config.json", model_type="own-bert", auto_map=auto_map)
    (folder / "own.py").write_text(MODULE)
    (folder / "2_Scale").mkdir()
    (folder / "2_Scale" / "config.json").write_text('{"factor": 3.0}')
    chain = json.loads((folder / "modules.json").read_text())
    chain.append({"idx": len(chain), "name": str(len(chain)), "path": "2_Scale", "type": "own.Scale"})
    (folder / "modules.json").write_text(json.dumps(chain))
    return folder


@pytest.fixture(scope="module")
def expected(plain: Path) -> np.ndarray:
    """The vectors of `coded`, from the hidden states of `plain`."""
    states = SentenceTransformer(str(plain), device="cpu").encode(TEXTS, output_value="token_embeddings")
    means = np.stack([rows.numpy().mean(axis=0) for rows in states]) + 1.0
    vectors = np.concatenate([means, means * 3.0], axis=1)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def test_trusted_code_runs_and_gives_what_it_computes(
    daemon: DaemonProcess, hub: Hub, coded: Path, expected: np.ndarray
) -> None:
    with daemon.client() as client:
        client.create("own", str(coded), trust_remote_code=True, code_revision=SHA, dtype="float32")
        client.wait_until_running("own", deadline_s=120)
        vectors = client.embed(TEXTS, instance="own")
        port = client.get("own").port
    with urlopen(f"http://127.0.0.1:{port}/info", timeout=30) as reply:
        code = json.load(reply)["code"]

    assert vectors.shape == (len(TEXTS), 2 * WIDTH)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert code == [f"{coded}: own.py", f"{CODE}@{SHA}: own_code.py"]
    assert hub.asked == ["own_code.py"]


@pytest.mark.parametrize("where", ["", f"{CODE}--own_code."], ids=["own", "other"])
def test_a_first_module_loads_the_code_at_the_pinned_revision(
    daemon: DaemonProcess, coded: Path, expected: np.ndarray, tmp_path: Path, where: str
) -> None:
    """The module is sentence-transformers' own by another name, so that the vectors are those without it. In another
    repository it is pinned too, and so is the module behind the pooling.
    """
    folder = shutil.copytree(coded, tmp_path / "model")
    (folder / "first.py").write_text(READER)
    chain = json.loads((folder / "modules.json").read_text())
    chain[0]["type"] = f"{where or 'first.'}Reader"
    chain[-1]["type"] = f"{where or 'own.'}Scale"
    (folder / "modules.json").write_text(json.dumps(chain))
    with daemon.client() as client:
        client.create("first", str(folder), trust_remote_code=True, code_revision=SHA, dtype="float32")
        client.wait_until_running("first", deadline_s=120)
        found = client.embed(TEXTS, instance="first")
        client.delete("first")

    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_trial_compares_with_the_code_at_the_same_revision(daemon: DaemonProcess, coded: Path) -> None:
    """The cache has this commit of the code and no other, by no name: without the revision no library finds it."""
    with daemon.client() as client:
        client.add_model(str(coded))
        found = client.try_model(str(coded), device="cpu", dtype="float32", trust_remote_code=True, code_revision=SHA)
    assert found["status"] == "verified", found
    measured = found["verification"]
    assert measured["compared_with"].startswith("sentence-transformers"), measured
    assert measured["min_cosine"] >= 0.99999


def test_without_trust_it_is_refused_by_name(daemon: DaemonProcess, coded: Path) -> None:
    with daemon.client() as client, pytest.raises(InvalidConfig, match="trust_remote_code = true"):
        client.create("untrusted", str(coded))


def test_a_revision_that_the_code_lacks_is_named(daemon: DaemonProcess, coded: Path) -> None:
    with daemon.client() as client:
        client.create("lost", str(coded), trust_remote_code=True, code_revision="v9")
        with pytest.raises(TeimgrError, match="has no revision 'v9'"):
            client.wait_until_running("lost", deadline_s=120)
