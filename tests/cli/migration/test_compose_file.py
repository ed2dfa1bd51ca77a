"""Reading of compose files: forms of each part, and limits."""

from __future__ import annotations

import io
import sys
import textwrap
from pathlib import Path

import pytest
from tests.cli.migration.conftest import Convert

from teimgr.cli.migration.compose_file import (
    MAX_FILE_BYTES,
    MAX_SERVICES,
    PublishedPort,
    Service,
    Volume,
    read_compose,
)
from teimgr.cli.migration.conversion import convert
from teimgr.cli.migration.draft import KeyOutcome
from teimgr.errors import InvalidConfig


def service(folder: Path, text: str, **environ: str) -> Service:
    """The one service `tei`, whose table is `text`."""
    file = folder / "compose.yml"
    file.write_text("services:\n  tei:\n" + textwrap.indent(textwrap.dedent(text), "    "))
    return read_compose(file, environ).services[0]


def test_commands_and_variables_in_both_forms(tmp_path: Path) -> None:
    by_list = service(tmp_path, 'command: ["--model-id", "a b"]\nenvironment:\n  - A=x=y\n  - B\n  - GONE\n', B="shell")
    by_text = service(tmp_path, "command: --model-id 'a b'\nenvironment:\n  A: x=y\n  B:\n  GONE: null\n", B="shell")

    assert by_list.words == by_text.words == ("--model-id", "a b")
    assert by_list.environ == by_text.environ == {"A": "x=y", "B": "shell"}


def test_texts_are_not_guessed_to_be_numbers_or_booleans(tmp_path: Path) -> None:
    read = service(
        tmp_path, "ports:\n  - 8080:30\nenvironment:\n  A: yes\n  B: true\n  C: 007\n  D: 1e3\n  E: 2026-01-01\n"
    )

    assert read.ports == (PublishedPort(30, 8080),)
    assert read.environ == {"A": "yes", "B": "true", "C": "007", "D": "1e3", "E": "2026-01-01"}


@pytest.mark.parametrize(
    ("entry", "ports"),
    [
        ("'8080:80'", [PublishedPort(80, 8080)]),
        ("'80'", [PublishedPort(80, None)]),
        ("127.0.0.1:8080:80/tcp", [PublishedPort(80, 8080, "127.0.0.1")]),
        ("'127.0.0.1::80'", [PublishedPort(80, None, "127.0.0.1")]),
        ("'[::1]:8080:80'", [PublishedPort(80, 8080, "::1")]),
        ("8080-8081:80-81", [PublishedPort(80, 8080), PublishedPort(81, 8081)]),
        ("53:53/udp", []),
        ("{target: 80, published: '8080', host_ip: 127.0.0.1, protocol: tcp}", [PublishedPort(80, 8080, "127.0.0.1")]),
    ],
)
def test_ports(tmp_path: Path, entry: str, ports: list[PublishedPort]) -> None:
    assert list(service(tmp_path, f"ports:\n  - {entry}\n").ports) == ports


def test_volumes_lead_from_the_container_to_the_host(tmp_path: Path) -> None:
    read = service(
        tmp_path,
        """
        volumes:
          - ./models:/models:ro
          - /srv/special:/models/special
          - cache:/data
          - type: bind
            source: ./other
            target: /other
          - /anonymous
        """,
    )

    assert read.volumes == (
        Volume(str(tmp_path / "models"), "/models", True),
        Volume("/srv/special", "/models/special", True),
        Volume("cache", "/data", False),
        Volume(str(tmp_path / "other"), "/other", True),
        Volume("", "/anonymous", False),
    )
    assert read.on_host("/models/a") == str(tmp_path / "models" / "a")
    assert read.on_host("/models/special/a") == "/srv/special/a"
    assert read.on_host("/modelsandmore") is None
    assert read.on_host("/data/a") is None


def test_variables_come_from_the_shell_then_from_the_file_beside(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TAG=file\nMODEL=from-file\n")
    (tmp_path / "more.env").write_text("A=of-env-file\nB=of-env-file\n")
    read = service(
        tmp_path,
        """
        image: tei:${TAG}
        command: --model-id ${MODEL:-none}
        env_file: more.env
        environment: {A: "${TAG}"}
        """,
        TAG="shell",
    )

    assert (read.image, read.tag, read.words) == ("tei:shell", "shell", ("--model-id", "from-file"))
    assert read.environ == {"A": "shell", "B": "of-env-file"}
    (tmp_path / "named.env").write_text("MODEL=named\n")
    assert read_compose(tmp_path / "compose.yml", {}, tmp_path / "named.env").services[0].words[-1] == "named"


def test_anchors_and_merged_keys(tmp_path: Path) -> None:
    file = tmp_path / "compose.yml"
    file.write_text(
        "x-tei: &tei\n  image: a\n  command: --x\nservices:\n  one: {<<: *tei, image: b}\n  two: {<<: *tei}\n"
    )

    one, two = read_compose(file, {}).services
    assert (one.image, one.words, two.image) == ("b", ("--x",), "a")


DEEP = "services:\n  a:\n    labels: " + "[" * 40 + "]" * 40
BOMB = "a0: &a0 {x: y}\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
# A merge of merges: PyYAML has all pairs of it up to 6.0.3, and each key once from 6.0.4 on.
MERGES = "a0: &a0 {x: y}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("services: [", "no YAML"),
        ("services:\n  a: {image: x, image: y}\n", "2: no YAML: the key 'image' twice"),
        ("version: '3'\n", "it has no table `services`"),
        ("- a\n", "it has no table `services`"),
        ("services:\n  a: text\n", "services.a: must be a table"),
        ("services:\n  a: {ports: ['x:y']}\n", r"services.a.ports\[0\]: no port"),
        ("services:\n  a: {ports: ['80:99999']}\n", r"services.a.ports\[0\]: no port"),
        ("services:\n  a: {ports: ['1-65000:1-65000']}\n", "more than 1024 ports"),
        ("services:\n  a: {ports: 80}\n", "services.a.ports: must be a list"),
        ('services:\n  a: {command: "\'"}\n', "services.a.command: No closing quotation"),
        ("services:\n  a: {env_file: none.env}\n", "none.env: cannot be read"),
        ("services:\n  a: {image: !!python/object:os.system x}\n", "no YAML"),
        ("services:\n" + "".join(f"  s{n}: {{}}\n" for n in range(MAX_SERVICES + 1)), f"more than {MAX_SERVICES}"),
        ("services: {}\n#" + "x" * MAX_FILE_BYTES, "larger than"),
        (DEEP, "deeper than"),
        ("services: " + "[" * 100_000, "nested too deep"),
        (BOMB + "services:\n  a: {labels: *a8}\n", "more than 50000 values"),
        (f"a: &a {{{', '.join(f'k{n}: ' for n in range(10_001))}}}\nb: {{<<: *a}}\nservices: {{}}\n", "merged keys"),
        ("services:\n  a: &a\n    labels: *a\n", "deeper than"),
    ],
    ids=str.split(
        "syntax twice no-services list no-table port high-port many-ports ports-no-list command env-file tag services"
        " size depth brackets aliases merges recursion"
    ),
)
def test_what_cannot_be_read_is_refused_by_place(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "compose.yml"
    file.write_text(text)

    with pytest.raises(InvalidConfig, match=why):
        read_compose(file, {})


def test_merges_of_merges_are_refused_or_each_key_is_merged_once(tmp_path: Path) -> None:
    file = tmp_path / "compose.yml"
    file.write_text(MERGES + "services: {a: {image: x, <<: *a11}}\n")

    try:
        found = read_compose(file, {})
    except InvalidConfig as error:
        assert "merged keys" in error.message
    else:
        assert len(found.services) == 1


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
