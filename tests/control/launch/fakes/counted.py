"""A module that appends a line to the file COUNTED of the environment whenever a process imports it."""

import os

with open(os.environ["COUNTED"], "a") as _file:  # noqa: PTH123  as short as an import
    _file.write(f"{os.getpid()}\n")
