"""The daemon's hold on its mux processes: launch or adopt, feed with snapshots, start again when one dies.

A mux outlives a daemon that crashes and goes on serving the last snapshot it was given. The next daemon finds its
run file, checks that the process is the one it names and was told the same, and goes on feeding it.
"""

from teimgr.muxes.fleet import Muxes

__all__ = ["Muxes"]
