"""A model's own forward as a list of steps that the C library runs: recorded, lowered, packed, called."""
