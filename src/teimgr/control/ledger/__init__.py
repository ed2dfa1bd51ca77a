"""Memory of the fleet: capacity of devices, reservations and use of workers, predicted footprints of models."""
