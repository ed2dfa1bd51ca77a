"""An entry that does what hangs in a child of a nursery that ever ran a parallel tensor op."""

from __future__ import annotations

import json
from pathlib import Path


def main(listener_fd: int, incarnation: str, run_dir: str, spec_json: str, ports: str) -> int:
    """Multiply large matrices with two threads; the threads used and the result's sum go to a file."""
    import torch

    torch.set_num_threads(2)
    product = torch.ones(600, 600) @ torch.ones(600, 600)
    before = len(list(Path("/proc/self/task").iterdir()))
    said = {"sum": float(product.sum()), "threads": torch.get_num_threads(), "tasks": before}
    (Path(run_dir) / "matmul").write_text(json.dumps(said))
    return 0
