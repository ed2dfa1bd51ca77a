"""Names of other libraries below their public surface: each is listed here, exists, and its library has an upper bound.

A release of a library may rename them, so `pyproject.toml` allows none that was not tested.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Modules whose names the library documents.
PUBLIC = (
    *("aiohttp.abc", "fastapi.exceptions", "fastapi.routing"),
    *("transformers.modeling_outputs", "transformers.utils"),
)
LIBRARIES = ("aiohttp", "fastapi", "hpack", "transformers", "uvicorn")
IMPORTED = {
    "aiohttp.client_exceptions.UnixClientConnectorError",
    "fastapi.dependencies.models.Dependant",
    "hpack.huffman_table.decode_huffman",
    "hpack.table.HeaderTable",
    "transformers.audio_utils.mel_filter_bank",
    "transformers.configuration_utils.PreTrainedConfig",
    "transformers.dynamic_module_utils.get_class_from_dynamic_module",
    "transformers.initialization.no_init_weights",
    "transformers.integrations.sdpa_attention.sdpa_attention_forward",
    "transformers.masking_utils.create_bidirectional_mask",
    "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS",
    "transformers.modeling_utils.PreTrainedModel",
    "transformers.models.auto.tokenization_auto.TOKENIZER_MAPPING_NAMES",
    "uvicorn.config.Config",
    "uvicorn.middleware.proxy_headers.ProxyHeadersMiddleware",
    "uvicorn.protocols.http.flow_control.FlowControl",
    "uvicorn.protocols.http.httptools_impl.HEADER_RE",
    "uvicorn.protocols.http.httptools_impl.HEADER_VALUE_RE",
    "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol",
    "uvicorn.protocols.http.httptools_impl.STATUS_LINE",
    "uvicorn.protocols.utils.get_local_addr",
    "uvicorn.protocols.utils.get_remote_addr",
    "uvicorn.protocols.utils.is_ssl",
    "uvicorn.server.ServerState",
}
OVERRIDDEN = {"aiohttp.UnixConnector._create_connection", "aiohttp.UnixConnector._factory"}
"""Methods of a library's class that a subclass of ours overrides or calls, and attributes."""


def imported() -> Iterator[str]:
    for path in (ROOT / "src" / "teimgr").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and _is_below_the_surface(node.module or ""):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_below_the_surface(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES and "." in module and module not in PUBLIC


def test_every_name_below_the_public_surface_is_listed() -> None:
    assert set(imported()) == IMPORTED


@pytest.mark.parametrize("name", sorted(IMPORTED))
def test_the_name_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


def test_the_methods_that_are_overridden_exist() -> None:
    import aiohttp

    source = Path(importlib.import_module(aiohttp.UnixConnector.__module__).__file__ or "").read_text()
    assert all(name.rpartition(".")[2] in source for name in OVERRIDDEN)


@pytest.mark.parametrize("library", LIBRARIES)
def test_its_library_has_an_upper_bound(library: str) -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (requirement,) = [each for each in dependencies if re.match(rf"{library}\b", each)]
    assert "<" in requirement, requirement
