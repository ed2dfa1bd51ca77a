"""The one address that Ray's servers listen on: a C library preloaded into its processes, as Ray has no setting.

`native/listen_address.c` is compiled with the package, where there was a compiler. Without it Ray listens on all
addresses of the host.
"""

from __future__ import annotations

import importlib.machinery
import os
from collections.abc import Mapping
from pathlib import Path

UNRESTRICTED = (
    "Ray listens on all addresses of this host: its library listen_address was not built, as pip found no C compiler"
)
_VARIABLE = "TEIMGR_LISTEN_ADDRESS"
_PRELOADED = "LD_PRELOAD"


def library() -> Path | None:
    """The compiled library; None if the package was built without a compiler."""
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if (path := folder / f"_listen_address{suffix}").exists():
            return path
    return None


def listening_on(address: str) -> Mapping[str, str]:
    """Environment variables of a process whose sockets for all addresses shall listen on `address`, a numeric one.

    Empty without the library.
    """
    path = library()
    if path is None:
        return {}
    others = os.environ.get(_PRELOADED, "")
    return {_VARIABLE: address, _PRELOADED: f"{path}:{others}" if others else str(path)}
