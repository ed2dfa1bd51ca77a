"""Debian's nginx in front of a daemon, as in docs/how-to/proxy.md."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.polling import until

# Debian has it in a folder that is not on every user's PATH.
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="no nginx: apt-get install nginx-light")

_CONFIG = """
daemon off;
{user}
worker_processes 1;
pid {folder}/pid;
error_log stderr;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
{server}
    }}
}}
"""


@contextmanager
def nginx(folder: Path, server: str) -> Iterator[str]:
    """The URL of an nginx with these directives of its `server` block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "nginx.conf"
    user = "user root;" if os.getuid() == 0 else ""
    config.write_text(_CONFIG.format(folder=folder, port=port, server=server, user=user))
    command = [str(NGINX), "-p", str(folder), "-c", str(config), "-e", "stderr"]
    with (folder / "nginx.log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            until(lambda: _answers(port) or process.poll() is not None, "nginx listens", 20)
            assert process.poll() is None, (folder / "nginx.log").read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def below(prefix: str, daemon: str) -> str:
    """The directives of the how-to page: `daemon` below `prefix`, which is stripped."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "proxy.md"
    block = page.read_text().partition("```nginx\n")[2].partition("```")[0]
    return block.replace("/teimgr", prefix).replace("127.0.0.1:9000", urlsplit(daemon).netloc)
