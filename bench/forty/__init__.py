"""`bench forty`: forty models on demand on a host with memory for four, under random calls of every interface.

`catalogue` makes the models, `calls` calls them over each interface, `traffic` keeps callers going, `watching` reads
the memory and the events of the fleet meanwhile, `residence` judges how long models stayed, `command` runs it all.
"""

from bench.forty.command import arguments, run

__all__ = ["arguments", "run"]
