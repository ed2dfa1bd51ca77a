"""Whether a model can be served as an instance asks for it: judged from its files, where this machine has them."""

from __future__ import annotations

import logging
from pathlib import Path

from teimgr import hub
from teimgr.errors import InvalidConfig, ModelLoadFailed, ModelNotFound
from teimgr.layout import read_layout
from teimgr.spec import WorkerSpec

log = logging.getLogger(__name__)


def check_model(told: WorkerSpec) -> None:
    """Read the files that a worker with these orders would read, as far as they lie here. Blocking; no network.

    What is not here yet is judged by the worker, once it has fetched it.

    Raises:
        InvalidConfig: the model is of a kind that is not served, or not as the orders have it; the message says why.
    """
    try:
        path = _local_files(told)
        if path is not None:
            read_layout(path, told.pooling, kind=told.kind, trust_remote_code=told.trust_remote_code, render=False)
    except ModelNotFound as error:
        log.info("%s is judged by its worker: %s", told.model_id, error.message)
    except ModelLoadFailed as error:
        raise InvalidConfig(f"model_id: {told.model_id} cannot be served: {error.message}") from error


def _local_files(told: WorkerSpec) -> Path | None:
    folder = Path(told.model_id).expanduser()
    if folder.is_dir():
        return folder
    cached = hub.find_cached(told.model_id, told.revision)
    return cached.path if cached else None
