"""Where an instance runs: GPUs, CPU threads and batch tokens."""
