"""A module that a nursery should not import: it starts a thread."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
