"""The control plane: instances, models on disk, placement, and worker and mux processes."""
