"""REST API of the daemon on port 9000: routes, schemas, permissions, middleware."""
