"""What the torch of this installation was built for, asked in a process that has it imported."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """A build of torch. `cuda` is None for one that is for the CPU alone; `archs` are such as `sm_90`, `compute_90`."""

    version: str = ""
    cuda: str | None = None
    archs: tuple[str, ...] = ()

    @classmethod
    def imported(cls) -> TorchBuild:
        """That of this process; an empty one where torch is not imported.

        The list is the one that was compiled in: asking for it does not wake the driver, which no fork would survive.
        """
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return cls()
        flags = getattr(torch._C, "_cuda_getArchFlags", None)
        return cls(str(torch.__version__), torch.version.cuda, tuple((flags() or "").split()) if flags else ())
