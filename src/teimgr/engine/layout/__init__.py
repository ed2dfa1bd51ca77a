"""The old name of `teimgr.layout`."""

from teimgr.layout import *  # noqa: F403
