"""`python -m teimgr.worker LISTENER_FD INCARNATION RUN_DIR SPEC_JSON`: a worker without a nursery, for tests."""

import os
import sys

from teimgr.worker.process import main

if __name__ == "__main__":
    listener_fd, incarnation, run_dir, spec_json = sys.argv[1:]
    status = main(int(listener_fd), incarnation, run_dir, spec_json)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as in the nursery: a thread that still loads a model must not block the exit
