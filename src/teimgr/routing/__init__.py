"""From a target to a worker: leases and links."""
