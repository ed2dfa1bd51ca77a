"""`docker run` lines: TEI's own quick start, the forms of flags, and what is not followed."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from tests.cli.migration.conftest import Convert

from teimgr.cli.migration.conversion import convert
from teimgr.cli.migration.draft import KeyOutcome
from teimgr.errors import InvalidConfig

# As in TEI's README.
QUICK_START = """\
    model=BAAI/bge-large-en-v1.5
    volume=$PWD/data # share a volume with the Docker container

    docker run --gpus all -p 8080:80 -v $volume:/data --pull always \\
        ghcr.io/huggingface/text-embeddings-inference:1.9 --model-id $model
"""


def test_the_quick_start_of_tei(converted: Convert) -> None:
    done = converted({"PWD": "/srv"}, run_sh=QUICK_START)

    assert done.instances == [{"name": "bge-large-en-v1.5", "model_id": "BAAI/bge-large-en-v1.5", "port": 8080}]
    assert done.draft.environment == {"HF_HUB_CACHE": "/srv/data"}
    assert done.decisions() == []
    assert [done.found(key).key for key in ("--publish", "--volume /data", "--gpus", "--pull")]


def test_forms_of_flags_and_what_is_not_followed(converted: Convert) -> None:
    done = converted(
        {"HF_TOKEN": "secret"},
        run_sh="""
        #!/bin/sh
        set -e && docker pull text-embeddings-inference; token=$(cat file)
        # docker run text-embeddings-inference --model-id not/this
        sudo docker run -itd --rm --quiet --name=one -p127.0.0.1:8081:80 -e HF_TOKEN -eOTHER=$token \\
            --gpus '"device=1,2"' --shm-size 1g --entrypoint text-embeddings-router \\
            text-embeddings-inference:cpu-1.9 --model-id a/b --default-prompt "" --unknown x  # and a comment
        podman container run -dp 127.0.0.1:8082:80 --mount type=bind,src=/m,dst=/models,readonly \\
            text-embeddings-inference --model-id /models/c; docker run -d nginx
        """,
    )

    one, two = done.instances
    assert (one["name"], one["model_id"], one["port"], one["gpu_id"]) == ("one", "a/b", 8081, 1)
    assert (two["name"], two["model_id"], two["port"]) == ("c", "/m/c", 8082)
    assert done.decisions() == ["$token", "docker run.one.command --unknown"]
    for key in ("set", "docker pull", "--shm-size", "--rm", "docker run.tei.image"):
        assert done.found(key).outcome is KeyOutcome.NONE
    assert "secret" not in str(done.draft.findings)


def test_lines_of_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("docker run text-embeddings-inference --model-id a/b"))
    assert [each.name for each in convert([Path("-")], {}).instances] == ["b"]
    for text, why in (("docker ps", "standard input: no `docker run`"), ("docker run 'x", "-: No closing quotation")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        with pytest.raises(InvalidConfig, match=why):
            convert([Path("-")], {})
