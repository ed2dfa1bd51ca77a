"""Routes a call from its target (a name, model id or index) to a worker: directory, router, leases, links."""
