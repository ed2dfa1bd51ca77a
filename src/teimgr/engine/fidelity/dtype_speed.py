"""Chooses what `dtype = "auto"` tries first on a CPU, by the instruction set and the measured speed of a layer.

The measurement overrules the instruction set only by a margin larger than any effect of other load on the machine. So a
model keeps its type, and the precision of its space, across restarts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from teimgr.engine.attention_kernel import DTYPES
from teimgr.engine.backbone import PackedLinear, StaticTable, Transformer, prepacking_works
from teimgr.engine.batching.batch import Encoded, pack
from teimgr.engine.model import Model, name_of
from teimgr.engine.native_forward.kernel import ForwardKernel
from teimgr.engine.native_forward.program import CannotLowerError, Columns, ForwardProgram, Step
from teimgr.engine.native_library import BFLOAT16_LEVEL, LEVELS, native_forward_allowed, native_library

_TOKENS = 64
_RUNS = 8
_MIN_RUNS = 3
_LIMIT_S = 0.02  # for all runs
_WIDTHS = 64, 512  # limits of a measured layer; wider ones take longer to create than to measure
_WIDTH_UNIT = 16
_CLEAR = 1.5  # speed-up that overrules the instruction set in favour of 16 bits; float32 only has to be faster


# Configuration keys of models whose layers send each token to some of several experts.
_EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"
_BFLOAT16_OF_TORCH = "amx_bf16", "avx512_bf16"  # instructions by which torch multiplies it


@dataclass(frozen=True, slots=True)
class Preference:
    """The dtype to try first, why, and the microseconds of a layer of 64 tokens on one thread, by the name of a dtype.

    A type without an entry does not run on this machine. None means that it was not measured.
    """

    dtype: torch.dtype
    reason: str
    layer_us: dict[str, float | None]


def risk_of_fewer_bits(model: Model) -> str | None:
    """Return why some texts may be far off in fewer bits than float32 although the known ones are not; None if there is
    no such risk."""
    config: Any = getattr(model.backbone, "config", None)
    texts = config.get_text_config() if hasattr(config, "get_text_config") else config
    if any(getattr(texts, key, 0) for key in _EXPERTS):
        return "tokens may go to other experts"
    if "linear_attention" in (getattr(texts, "layer_types", None) or ()):
        return "linear attention carries its errors along a text"
    if isinstance(model.backbone, Transformer) and model.backbone.has_tasks:
        return "each task has its own weights, and the loss of precision differs between them"
    return None


def preference(model: Model) -> Preference:
    """Return the dtypes to try first for `model`."""
    if isinstance(model.backbone, StaticTable):
        return Preference(torch.float32, "a static table is not computed", {})
    if (risk := risk_of_fewer_bits(model)) is not None:
        return Preference(torch.float32, f"{risk} in fewer bits, which the known texts may not show", {})
    wanted = int(getattr(model.backbone.config, "hidden_size", 0) or _WIDTHS[1])
    width = min(max(wanted, _WIDTHS[0]), _WIDTHS[1]) // _WIDTH_UNIT * _WIDTH_UNIT
    layers = _native_layers(width) or _library_layers(width)
    best = _timed(layers)
    layer_us: dict[str, float | None] = {name_of(dtype): round(best[dtype] * 1e6, 1) for dtype in layers}
    instructions, multiplies = _instructions()
    if torch.bfloat16 not in best:
        return Preference(torch.float32, f"{instructions} has no products of bfloat16", layer_us)
    dtype, reason = decided(best[torch.float32] / best[torch.bfloat16], multiplies, instructions)
    return Preference(dtype, reason, layer_us)


def decided(times_as_fast: float, multiplies: bool, instructions: str) -> tuple[torch.dtype, str]:
    """Choose bfloat16 or float32, if a layer is `times_as_fast` in bfloat16 and the CPU `multiplies` it or not; return
    why, too."""
    measured = f"a layer is {times_as_fast:.2f} times as fast in bfloat16 as in float32"
    if multiplies:
        dtype, rule = (
            (torch.bfloat16, "") if times_as_fast >= 1.0 else (torch.float32, ", though it has products of it")
        )
        return dtype, f"{instructions}: {measured}{rule}"
    if times_as_fast >= _CLEAR:
        return torch.bfloat16, f"{instructions} has no products of bfloat16, but {measured}"
    return torch.float32, f"{instructions} has no products of bfloat16; {measured}, and a gain needs {_CLEAR:g}"


def _instructions() -> tuple[str, bool]:
    """Return the instruction set, with the reason why a better one of the CPU is not used, and whether it multiplies
    bfloat16."""
    library = native_library()
    if library is not None and native_forward_allowed():
        why = f" ({library.refused})" if library.refused else ""
        return f"{LEVELS[library.level]}{why}", library.level >= BFLOAT16_LEVEL
    found = torch.cpu.get_capabilities()
    name = next((name for name in _BFLOAT16_OF_TORCH if found.get(name)), None)
    return name or torch.backends.cpu.get_cpu_capability().lower(), name is not None


def _native_layers(width: int) -> dict[torch.dtype, Callable[[], object]]:
    """Return a layer of our library in each type that it computes here; none without the library."""
    layers: dict[torch.dtype, Callable[[], object]] = {}
    if native_library() is None or not native_forward_allowed():
        return layers
    steps = (
        Step("embed", 0, width, tables=((torch.ones(1, width), "ids"),)),
        Step("linear", 1, 4 * width, x=Columns(0, 0, width), weights=torch.ones(4 * width, width)),
    )
    batch = pack([Encoded(np.zeros(_TOKENS, np.int32))])
    for dtype in (*DTYPES, torch.int8):
        try:
            kernel = ForwardKernel(ForwardProgram(steps, 4 * width), dtype)
        except CannotLowerError:
            continue
        layers[dtype] = partial(kernel, batch, batch.position_ids, 1)
    return layers


def _library_layers(width: int) -> dict[torch.dtype, Callable[[], object]]:
    """Return a layer of torch in each type for which it has packed layers; float32 always."""
    linear = nn.Linear(width, 4 * width)
    found = [torch.float32, *([torch.bfloat16] if prepacking_works(torch.bfloat16) else [])]
    layers: dict[torch.dtype, Callable[[], object]] = {}
    for dtype in found:
        layer: Callable[[torch.Tensor], object] = PackedLinear(linear, dtype) if len(found) > 1 else linear
        x = torch.zeros(_TOKENS, width, dtype=dtype)
        layers[dtype] = partial(layer, x)
    return layers


@torch.inference_mode()
def _timed(layers: dict[torch.dtype, Callable[[], object]]) -> dict[torch.dtype, float]:
    """Return the seconds of each layer. They run in turns, and the best of several counts, so that a busy machine
    disturbs all alike."""
    best = dict.fromkeys(layers, float("inf"))
    end = time.perf_counter() + _LIMIT_S
    for number in range(_RUNS):
        if number >= _MIN_RUNS and time.perf_counter() > end:
            break
        for dtype, run in layers.items():
            began = time.perf_counter()
            run()
            best[dtype] = min(best[dtype], time.perf_counter() - began)
    return best
