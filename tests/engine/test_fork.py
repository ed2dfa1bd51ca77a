"""Workers are forked from a process that has imported everything and computed nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHILD = """
import os, sys, threading
from pathlib import Path
from transformers.models.bert import modeling_bert
from teimgr.engine.engine import Engine, EngineOptions
from teimgr.engine.job import InferOptions, Job, Lane

child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
done = threading.Event()
options = EngineOptions(path=Path(sys.argv[1]), model_id="minilm", threads=2)
engine = Engine.load(options, lambda jobs: done.set())
job = Job(["a text of some words"] * 200, InferOptions(), Lane.BULK)
engine.submit(job)
served = done.wait(60) and not job.errors
rollup = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup") if ":" in line and "kB" in line)
print(served, int(rollup["Private_Dirty"].split()[0]) // 1024, flush=True)
os._exit(0)
"""


def test_a_forked_worker_serves_and_keeps_little_memory_of_its_own(minilm: Path) -> None:
    """It does not hang on a lost pool of threads, and the embedding tables stay mapped from the file."""
    command = [sys.executable, "-c", CHILD, str(minilm)]
    environment = {"OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    served, private_mib = done.stdout.split()[-2:]

    assert done.returncode == 0, done.stderr
    assert served == "True"
    assert int(private_mib) < 180
