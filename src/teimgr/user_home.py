"""The home directory of this process's user: `~` in paths, and a stand-in for a user that has none."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from teimgr.errors import InvalidConfig

# What `getpass.getuser` reads before it looks for the user's entry.
_USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")


def expanded(path: str | Path) -> Path:
    """The path with `~` or `~user` replaced.

    Raises:
        InvalidConfig: that user has no home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        who = str(path).split("/", 1)[0]
        raise InvalidConfig(
            f"{path}: there is no home directory for `{who}`; set HOME, or give the whole path"
        ) from None


def ensure_home(folder: Path) -> bool:
    """Set HOME to `folder`, and LOGNAME to the user id, if neither the environment nor the system's users have them.

    Containers run under user ids without an entry in /etc/passwd; libraries that look for their caches, and for the
    user's name, then fail. Returns whether HOME was set; it holds for child processes too.
    """
    try:
        pwd.getpwuid(os.getuid())
        return False
    except KeyError:
        pass
    if not any(os.environ.get(name) for name in _USER_VARIABLES):
        os.environ["LOGNAME"] = str(os.getuid())
    if os.environ.get("HOME"):
        return False
    os.environ["HOME"] = str(folder.absolute())
    return True
