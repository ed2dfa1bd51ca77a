"""A mux process and scripted workers."""

from tests.mux.conftest import channel, control, mux, start_mux, start_worker

__all__ = ["channel", "control", "mux", "start_mux", "start_worker"]
