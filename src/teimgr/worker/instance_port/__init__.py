"""The instance's own HTTP port: `worker/tei/` over HTTP/1.1, with TEI's routes, key and CORS."""

from teimgr.worker.instance_port.app import create_app, metrics_app

__all__ = ["create_app", "metrics_app"]
