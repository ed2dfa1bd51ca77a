"""The routes of the fleet; from a target to a worker: leases and links."""
