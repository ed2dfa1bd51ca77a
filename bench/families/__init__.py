"""The catalogue of model families: each layout rebuilt as the hub has it, served, and compared with its reference.

`python -m bench fidelity --families` measures it and writes `docs/models.md`. A family is added by a row in the module
of its kind; the command with `--only KEY` measures that row alone.
"""
