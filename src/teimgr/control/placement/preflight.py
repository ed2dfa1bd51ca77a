"""Preflight check that this build of torch has code for the GPUs of this host, before a worker fails for lack of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from teimgr.control.launch.nursery import TorchBuild
from teimgr.control.launch.process_handle import LaunchFailed
from teimgr.control.placement.gpus import Gpu, GpuInventory
from teimgr.errors import InvalidConfig

log = logging.getLogger(__name__)

_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
# From torch 2.8 on, builds for CUDA 12.8 and later leave these out, and those for 12.6 have them.
_LAST_OF_CUDA_12_6 = (7, 0)


class Preflight:
    """Compares the cards with the build, once. An unsupported card is an alarm, and with mode "fail" an error; so are
    cards that CUDA_VISIBLE_DEVICES names and that are not there, as models would silently run on the CPU."""

    def __init__(
        self, mode: Literal["warn", "fail"], gpus: GpuInventory, build: Callable[[], Awaitable[TorchBuild]]
    ) -> None:
        self._mode = mode
        self._gpus = gpus
        self._build = build
        self._problems: list[str] = []

    @property
    def must_pass(self) -> bool:
        """True if the daemon may serve only after the check has passed."""
        return self._mode == "fail"

    def alarms(self) -> list[str]:
        return self._problems

    async def run(self) -> None:
        """Run the check; without a card it does not wait for the nursery.

        Raises:
            InvalidConfig: with mode "fail", a card cannot be used or is missing, or the build of torch is unknown.
        """
        inventory = await self._gpus.read()
        try:
            if inventory.gpus:
                self._problems = problems(inventory.gpus, await self._build())
            elif inventory.misses_cards:
                self._problems = [f"gpu_preflight: models run on the CPU: {inventory.reason}"]
        except LaunchFailed as error:
            self._problems = [f"gpu_preflight: the build of torch is unknown: {error}"]
        for problem in self._problems:
            log.error(problem)
        if self._problems and self.must_pass:
            raise InvalidConfig("; ".join(self._problems))


def problems(cards: Sequence[Gpu], build: TorchBuild) -> list[str]:
    """A message for each card that `build` has no code for; one of unknown compute capability passes."""
    has = f"has {' '.join(build.archs)}" if build.cuda else "is for the CPU alone"
    return [
        f"gpu_preflight: GPU {card.index} ({card.name}, sm_{card.compute_capability[0]}{card.compute_capability[1]}) "
        f"is not supported by torch {build.version}, which {has}: {_remedy(card.compute_capability, build)}"
        for card in cards
        if card.compute_capability and not runs_on(card.compute_capability, build.archs)
    ]


def runs_on(capability: tuple[int, int], archs: Sequence[str]) -> bool:
    """True if code for one of `archs` runs on a card of this compute capability.

    Machine code (`sm_`) runs on its own major version from its minor version on (with `a`: on that very one); PTX
    (`compute_`) is compiled for any later card.
    """
    major, minor = capability
    for arch in archs:
        if match := _ARCH.fullmatch(arch):
            kind, has, only = match[1], (int(match[2]), int(match[3])), match[4] == "a"
            if only:
                fits = capability == has
            elif kind == "compute":
                fits = capability >= has
            else:
                fits = major == has[0] and minor >= has[1]
            if fits:
                return True
    return False


def _remedy(capability: tuple[int, int], build: TorchBuild) -> str:
    if build.cuda is None:
        return "install a build of torch for CUDA"
    if capability <= _LAST_OF_CUDA_12_6:
        return "install torch for CUDA 12.6, the last builds that have it"
    return f"install torch for a CUDA later than {build.cuda}"
