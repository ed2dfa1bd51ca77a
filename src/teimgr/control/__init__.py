"""The control plane: instances, the models on disk, placement, and the processes of both."""
