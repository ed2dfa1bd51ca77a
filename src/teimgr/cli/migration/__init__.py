"""Conversion of other servers' configurations to one of teimgr, with a report of every key: `teimgr import`."""
