"""The kustomizations of deploy/kubernetes build, by kubectl where it is installed, and no two files say the same."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.kustomization import build

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))


def deployment(overlay: str) -> Any:
    [found] = [each for each in build(KUBERNETES / "overlays" / overlay) if each["kind"] == "Deployment"]
    return found["spec"]


def by_name(documents: Any) -> dict[tuple[str, str], Any]:
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is missing")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_builds_the_same_objects(overlay: str) -> None:
    folder = KUBERNETES / "overlays" / overlay
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert by_name(yaml.safe_load_all(done.stdout)) == by_name(build(folder))


def test_overlays_differ_by_the_image_the_card_and_the_number_of_pods() -> None:
    assert OVERLAYS == ["cpu", "gpu", "keda", "keda-metrics-api", "three-models"]
    for overlay in OVERLAYS:
        spec = deployment(overlay)
        [container] = spec["template"]["spec"]["containers"]
        card, tag = (None, "cpu") if overlay in ("cpu", "three-models") else ("1", "cuda")
        assert container["image"] == f"teimgr:{tag}"
        assert container["resources"]["limits"].get("nvidia.com/gpu") == card
        assert ("replicas" in spec) == (not overlay.startswith("keda"))  # else each apply would undo KEDA's number


def test_every_file_is_named_once_and_every_object_is_in_one_file() -> None:
    named: Counter[Path] = Counter()
    for file in KUBERNETES.glob("**/kustomization.yaml"):
        said = yaml.safe_load(file.read_text())
        files = [
            *said.get("resources", ()),
            *(each for map in said.get("configMapGenerator", ()) for each in map["files"]),
        ]
        named.update(path for each in files if not (path := (file.parent / each).resolve()).is_dir())
    others = {path for path in KUBERNETES.glob("**/*") if path.is_file() and path.name != "kustomization.yaml"}
    assert set(named) == others
    assert set(named.values()) == {1}
