"""The web page at `/` of the REST port: views, live figures, sessions. Its scripts change things over the REST routes."""
