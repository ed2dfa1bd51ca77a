"""The nursery with everything that it imports in production."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.fleet import local_launcher
from tests.support.polling import eventually

from teimgr.control.launch import nursery
from teimgr.spec import WorkerSpec


@pytest.mark.slow
async def test_it_and_its_standbys_have_one_thread_and_their_children_run_parallel_tensor_ops(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")  # the OpenMP runtime prints its settings when it is loaded
    monkeypatch.delenv("OMP_WAIT_POLICY")
    # The production entry's module is imported too, for what it drags in counts.
    launcher = local_launcher(
        folder, entry="tests.control.launch.fakes.matmul:main", preload=(*nursery.PRELOAD, "teimgr.worker.process")
    )
    await launcher.start()

    for generation in range(3):  # the nursery, its standby, the standby's standby
        handle = await launcher.launch(WorkerSpec(name="a", model_id="m"))
        nursery_pid = launcher.nursery.pid
        assert nursery_pid is not None
        tasks = list(Path(f"/proc/{nursery_pid}/task").iterdir())
        exit = await handle.wait()

        assert exit.status == 0, exit
        said = json.loads((folder / "run" / "matmul").read_text())
        assert (said["sum"], said["threads"], said["tasks"] >= 2) == (600.0**3, 2, True)
        assert len(tasks) == 1
        assert [vars(record).get("problem") for record in caplog.records if hasattr(record, "problem")] == []
        (folder / "run" / "matmul").unlink()
        if generation < 2:
            await eventually(lambda: launcher.nursery.standby_pid)
            os.kill(nursery_pid, signal.SIGKILL)
            await eventually(lambda pid=nursery_pid: launcher.nursery.pid != pid)
    assert "GOMP_SPINCOUNT = '0'" in (folder / "run" / "nursery.log").read_text()
    await launcher.close()


def test_the_daemons_side_imports_neither_torch_nor_transformers() -> None:
    modules = "teimgr.control.supervision.manager, teimgr.control.launch.launcher, teimgr.control.launch.nursery"
    code = f"import sys, {modules}; print(sorted({{'torch', 'transformers'}} & sys.modules.keys()))"

    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_the_table_of_weight_names_is_made_before_the_first_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import conversion_mapping
    from transformers.models.bert import modeling_bert  # noqa: F401  which the nursery imports

    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)

    nursery.make_tables()

    assert conversion_mapping._checkpoint_conversion_mapping_cache is not None


SHAPES = """
import psutil, torch
from teimgr.engine.backbone import PackedLinear

layers = [PackedLinear(torch.nn.Linear(32, width), torch.float32) for width in (32, 64)]
before = psutil.Process().memory_info().rss
with torch.inference_mode():
    for rows in range(1, 301):
        for layer in layers:
            layer(torch.zeros(rows, 32))
print((psutil.Process().memory_info().rss - before) >> 20)
"""


def test_the_generated_code_of_many_shapes_takes_little_memory() -> None:
    """340 MiB with the libraries' own settings, on a CPU with AVX-512."""
    environ = os.environ | nursery.LIBRARY_SETTINGS
    grown_mib = int(subprocess.check_output([sys.executable, "-c", SHAPES], env=environ, text=True))

    assert grown_mib < 200


def test_functions_that_fail_ahead_of_the_workers_are_reported_and_do_not_stop_it() -> None:
    names = ("json:loads", "no_such_module:main", "json:no_such_function", "json")

    missing, failed = nursery.preload(names), nursery.call_ahead(names)

    assert [each.partition(" ")[0] for each in missing] == ["no_such_module:main:"]
    assert [each.partition(" ")[0] for each in failed] == ["json:loads:", "json:no_such_function:"]


def test_asking_torch_for_its_cards_leaves_the_fork_server_able_to_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's build for CUDA: who asks for the compiled-in list counts as one that has initialised the driver."""
    asked: list[int] = []

    def flags() -> str:
        asked.append(os.getpid())
        return "sm_90 compute_90"

    core = SimpleNamespace(_cuda_getArchFlags=flags, _cuda_isInBadFork=lambda: bool(asked))
    build = SimpleNamespace(cuda="13.0")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=core, __version__="2.13.0+cu130", version=build))

    found = nursery.TorchBuild.imported()

    assert found == nursery.TorchBuild("2.13.0+cu130", "13.0", ("sm_90", "compute_90"))
    assert not nursery.driver_was_initialised()
