"""The `teimgr` command line."""

from teimgr.cli.main import main

__all__ = ["main"]
