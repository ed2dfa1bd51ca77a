"""Residence: decides which models are loaded, by their calls and the available memory."""
