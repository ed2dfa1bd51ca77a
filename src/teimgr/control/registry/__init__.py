"""The model registry: the models that this host lists, has downloaded, and has tried.

`registry.py` is the entry point; `cache.py` reads the disk, `records.py` keeps added models and results of trials,
and has what REST shows, `tasks.py` runs downloads (the process `fetcher.py`) and trials,
`trial.py` loads a model in a temporary worker and measures it.
"""
