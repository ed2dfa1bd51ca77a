"""Generated from proto/; see `just proto`."""
