"""Every kind of model against the library it was made with; `python -m bench fidelity` writes the table."""
