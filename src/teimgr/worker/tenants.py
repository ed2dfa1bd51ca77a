"""Tenant accounting of calls in a worker: charge, count, share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from teimgr.engine.job import EQUAL, Job, Share, characters
from teimgr.errors import CallOverQuota, TeimgrError, TryLater
from teimgr.spec import WorkerSpec
from teimgr.wire.tenants.table import Counter
from teimgr.wire.text_column import TextColumn
from teimgr.worker.calls import WorkerCall
from teimgr.worker.remote_tenants import RemoteMeter
from teimgr.worker.submission import Submission
from teimgr.worker.tenant_meter import TenantMeter, open_meter


class Tenants:
    """The meter in the file at `path`, opened when there is one. Without it nothing is charged or counted.

    For the loop's thread.
    """

    def __init__(self, path: Path | None, spec: WorkerSpec) -> None:
        self._path = path
        self._spec = spec
        self._meter: TenantMeter | None = None
        self._is_open = False
        if path is not None and path.exists():
            self._open()

    def charge(self, submission: Submission) -> None:
        """Say whose the jobs of a call are, and have them charged before they are computed if the key has a quota.

        Raises:
            TenantQuotaReached, CallOverQuota: a token for each of its texts would be too many already. It is counted.
        """
        if not (tenant := submission.call.tenant):
            return
        if not self._is_open:  # keys were configured after this worker had started
            self._open()
        if (meter := self._meter_of(submission.call)) is None:
            return
        standing = meter.standing(tenant)
        for job in submission.jobs:
            job.belongs_to(standing.share)
            if standing.has_quota:
                if standing.refuses(len(job.inputs)) and (error := standing.refuses(_least_tokens(job))):
                    meter.count(tenant, Counter.REFUSED)
                    raise error
                submission.charge_to(job, standing.open_account())

    def share(self, call: WorkerCall) -> Share:
        """Whose the call is, as one of those that share the instance."""
        if not (tenant := call.tenant) or (meter := self._meter_of(call)) is None:
            return EQUAL
        return meter.standing(tenant).share

    def finished(self, call: WorkerCall, job: Job, error: TeimgrError | None) -> None:
        """Count a call whose job the engine has finished."""
        if (meter := self._meter_of(call)) is None:
            return
        if error is None:
            meter.answered(job.tenant, job.tokens, len(job.inputs) - len(job.errors), 0 if call.is_part else 1)
            if job.account is not None and job.account.is_shadowed:
                meter.count(job.tenant, Counter.SHADOWED)
        elif isinstance(error, TryLater | CallOverQuota):
            meter.count(call.tenant, Counter.REFUSED)

    def refused(self, call: WorkerCall) -> None:
        """Count a call that was not admitted."""
        if (meter := self._meter_of(call)) is not None:
            meter.count(call.tenant, Counter.REFUSED)

    def _meter_of(self, call: WorkerCall) -> TenantMeter | RemoteMeter | None:
        """That of the host that admitted the caller, where that one has a table."""
        remote = None if call.context is None else call.context.meter
        return remote if isinstance(remote, RemoteMeter) and remote.knows(call.tenant) else self._meter

    def _open(self) -> None:
        self._is_open = True
        if self._path is not None:
            self._meter = open_meter(self._path, self._spec.name, self._spec.model_id)


def _least_tokens(job: Job) -> int:
    """Tokens that a job has at least, for certain and before it is tokenized: one for each text that is not empty."""
    if isinstance(job.inputs, TextColumn):
        return int(np.count_nonzero(job.inputs.lengths))
    return sum([1 for item in job.inputs if characters(item)])
