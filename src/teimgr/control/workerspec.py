"""From what a user wants and how the daemon is set to what one worker is told."""

from __future__ import annotations

from dataclasses import replace

from teimgr.control.extra_args import parse
from teimgr.settings import Settings
from teimgr.spec import InstanceSpec, WorkerSpec


def worker_spec(
    spec: InstanceSpec, settings: Settings, gpu_uuid: str | None, threads: int, replica: int = 0
) -> WorkerSpec:
    """The orders of one worker. `extra_args` win over the instance's fields, which win over the settings.

    Raises:
        InvalidConfig: an extra argument cannot be understood.
    """
    told = WorkerSpec(
        name=spec.name,
        model_id=spec.model_id,
        replica=replica,
        revision=spec.revision,
        dtype=spec.dtype,
        pooling=spec.pooling,
        kind=spec.kind,
        trust_remote_code=spec.trust_remote_code,
        gpu=gpu_uuid,
        threads=threads,
        instance_host=settings.instance_host,
        port=spec.port,
        prometheus_port=spec.prometheus_port,
        max_batch_tokens=spec.max_batch_tokens,
        max_concurrent_requests=spec.max_concurrent_requests,
        max_client_batch_size=settings.max_client_batch_size,
        max_message_bytes=settings.grpc_max_message_bytes,
        arrow_output_dtype=settings.arrow_output_dtype,
        orphan_grace_s=float(settings.orphan_grace_secs),
        nice=settings.cpu_worker_nice if gpu_uuid is None else 0,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    return replace(told, **parse(spec.extra_args))
