"""`python -m teimgr.worker LISTENER_FD INCARNATION RUN_DIR SPEC_JSON`: a worker without a nursery."""

import sys

from teimgr.worker.process import main

if __name__ == "__main__":
    listener_fd, incarnation, run_dir, spec_json = sys.argv[1:]
    sys.exit(main(int(listener_fd), incarnation, run_dir, spec_json))
