"""Inference on the daemon's HTTP port: each request goes to a worker as it came, and the answer back as it is.

`dialects.py` says which paths there are, `naming.py` which instance a request means, `bodies.py` how a body is read
within bounds, `door.py` puts them together. Bodies are parsed and written by workers (`worker/dialects/`).
"""

from teimgr.gateway.gateway import Gateway

__all__ = ["Gateway"]
