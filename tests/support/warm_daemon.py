"""`teimgr` whose fork server is forked from that of the test process, instead of importing torch once more.

    TEIMGR_TEST_NURSERIES=SOCKET python -m tests.support.warm_daemon serve …

For tests that are not about how a fleet starts: the imports are most of what a daemon costs.
"""

from __future__ import annotations

import os
import socket
import sys

from teimgr.cli.main import main
from teimgr.control.launch.nursery_link import NurseryLink, NurseryProcess

SERVICE = "TEIMGR_TEST_NURSERIES"


def _spawn(link: NurseryLink) -> NurseryProcess:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as service:
        service.connect(os.environ[SERVICE])
        socket.send_fds(service, [b"!"], [theirs.fileno()])
        pid, (pidfd,), _, _ = socket.recv_fds(service, 32, 1)
    return NurseryProcess(link, int(pid), pidfd, ours)


if __name__ == "__main__":
    NurseryLink._spawn = _spawn  # type: ignore[method-assign]
    sys.exit(main())
