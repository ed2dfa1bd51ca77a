"""A seed that a create would refuse is refused before anything starts, naming the file and the seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from teimgr.cli.main import main

SEED = '[[instances]]\nname = "a"\nmodel_id = "m"\n'


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (SEED + 'extra_args = ["--nope"]\n', "instances[0]"),
        (SEED + 'pooling = "middle"\n', "pooling"),
        (SEED + 'kind = "llm"\n', "kind"),
        ("max_instances = 1\n" + SEED + SEED.replace('"a"', '"b"'), "max_instances is 1"),
    ],
    ids=["flag", "pooling", "kind", "too many"],
)
@pytest.mark.parametrize("command", [["config", "check"], ["serve", "-c"]], ids=["check", "serve"])
def test_a_seed_that_could_not_be_created_is_refused(
    command: list[str], config: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(config)

    assert main([*command, str(path)]) == 1
    assert says in capsys.readouterr().err
