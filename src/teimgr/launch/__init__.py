"""How a worker process comes to be."""
