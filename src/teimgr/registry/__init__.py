"""The model registry: which models this host knows, has, fetches and has tried.

`registry.py` is the door; `cache.py` reads what lies on the disk, `facts.py` keeps what no disk layout says,
`download.py` fetches in a process of its own (`fetcher.py`), `trial.py` loads a model in a throw-away worker.
"""
