"""Memory of the fleet: what each device has, what workers reserve and take, what a model is expected to take."""
