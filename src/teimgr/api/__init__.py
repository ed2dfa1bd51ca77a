"""The APIs on the daemon's port: REST, inference in every dialect, batches, the page."""
