"""Where an instance runs: GPUs, CPU threads, batch tokens and ports."""
