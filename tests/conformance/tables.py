"""All cases."""

from __future__ import annotations

from tests.conformance import grpc_mux, grpc_tei, http_form, http_models, http_routes
from tests.conformance.case import Http, Rpc

HTTP: tuple[Http, ...] = (*http_form.cases(), *http_routes.cases(), *http_models.cases())
GRPC: tuple[Rpc, ...] = (*grpc_tei.cases(), *grpc_mux.cases())
