"""A mux that fails in the way that its first argument names; the second one is the path of its config.

crash: ends at once with status 7 · absent: never listens · mute: listens and never answers · garbage: answers with what
is no JSON · list: answers with JSON that is no object · flood: answers with a line that does not end · hangup: takes
the connection and closes it · reset: closes it after each answer · good: answers · busy: answers, and does not end at
SIGTERM · leaves: says after its first answer that it stops, and reports use to the next connection that has terms
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path

ANSWERS = {
    "garbage": b"\xff{]\n",
    "list": b"[1]\n",
    "flood": b"x" * (65 << 20),
    "reset": b'{"in_flight": 0}\n',
    "good": b'{"in_flight": 0}\n',
    "busy": b'{"in_flight": 1}\n',
    "leaves": b'{"in_flight": 1}\n{"stopping": 30}\n',
    "large": b'{"in_flight": 0, "calls": [%s]}\n' % (b" " * (8 << 20)),
}


def main(how: str, config: str) -> int:
    if how == "crash":
        return 7
    if how == "absent":
        signal.pause()
    if how == "busy":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    path = json.loads(Path(config).read_text())["control_socket"]
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        serve(how, server)
        if how == "leaves":
            report_use(server)
            return 0
        while True:
            serve(how, server)


def report_use(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection, connection.makefile("rb") as lines:
        while b'"terms"' not in lines.readline():
            pass
        connection.sendall(b'{"used": [[1, "a", "model-a", [7, 1, 1, 0, 0]]]}\n')


def serve(how: str, server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection, connection.makefile("rb") as lines:
        if how == "hangup":
            return
        for line in lines:
            if line.startswith(b'{"ack"'):
                connection.sendall(b'{"ack": true}\n')
            if line.startswith(b'{"stats"') and how in ANSWERS:
                connection.sendall(ANSWERS[how])
                if how == "reset":
                    return


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
