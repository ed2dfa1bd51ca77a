"""What is wanted when the daemon starts: the state of the last one, and the seeds of the configuration."""

from __future__ import annotations

from dataclasses import replace

from teimgr.control.store import Loaded, Store
from teimgr.settings import Settings
from teimgr.spec import InstanceSpec


def wanted_at_boot(settings: Settings, store: Store) -> Loaded:
    """The instances to have, those of the state first.

    The state wins for the names it knows; further seeds are added. With `auto_restore_on_restart` off it is the seeds
    alone, and the old state is kept as a backup; only a port that a seed leaves open is taken from it, so that a
    worker that outlived the last daemon still fits.
    """
    state = store.load()
    known = {spec.name: spec for spec in state.specs}
    if settings.auto_restore_on_restart:
        new = [seed for seed in settings.instances if seed.name not in known]
        return Loaded((*state.specs, *new), state.alarm)
    return Loaded(tuple(_with_old_ports(seed, known) for seed in settings.instances), _back_up(store, state))


def _with_old_ports(seed: InstanceSpec, known: dict[str, InstanceSpec]) -> InstanceSpec:
    old = known.get(seed.name)
    if old is None:
        return seed
    prometheus = old.prometheus_port if seed.prometheus_port is None else seed.prometheus_port
    return replace(seed, port=seed.port or old.port, prometheus_port=prometheus)


def _back_up(store: Store, state: Loaded) -> str | None:
    if not state.specs:
        return state.alarm
    try:
        store.set_aside("backup")
    except OSError as error:
        return f"{state.alarm or 'the old state'} could not be backed up: {error}"
    return state.alarm
