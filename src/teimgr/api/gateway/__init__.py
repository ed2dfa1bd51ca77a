"""The HTTP inference gateway on the daemon's port."""

from teimgr.api.gateway.gateway import Gateway

__all__ = ["Gateway"]
