"""The C library under AddressSanitizer and UBSan: programs, shapes and vocabularies at random, valid ones and others.

`python -m tests.fuzz.native CASES SEED` is the process that runs them, with the library that is named by
TEIMGR_SANITISED; `run` builds that, starts the process, and reports what the sanitizers say. The process needs the
structures of the library alone: torch, whose import takes ten seconds under a sanitizer, is a stand-in there.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.abc
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np


class _Named(type):
    """A class, and attributes of any name that are nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _StandIn(ModuleType):
    """A module with whatever is imported from it."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {}) if name[0].isupper() else MagicMock(name=name)


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for torch and transformers."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ("torch", "transformers") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if __name__ == "__main__":
    sys.meta_path.insert(0, _StandIns())

from teimgr.engine.attention_kernel import _Call as Attention  # noqa: E402  after the stand-ins
from teimgr.engine.native_forward.kernel import _ACTIVATIONS, _KINDS, _Call, _Operand, _Program, _Slot, _Step  # noqa: E402
from teimgr.engine.native_library import BFLOAT16_LEVEL  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src/teimgr/engine/native").glob("*.c"))
# Not optimised: every access is checked all the same, and it is built in a third of the time. -g1 has the lines.
SANITISED = "-g1 -O0 -std=gnu11 -fPIC -shared -fsanitize=address,undefined,float-cast-overflow -fno-sanitize=alignment"
ODD = (-(2**63), -(2**31), -65, -1, 0, 1, 3, 17, 1024, 1025, 2048, 65_537, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
LIBRARY = "sanitised.so"
LIMIT_S = 600


def compiler_runtime() -> str | None:
    """The file of the runtime that the sanitised library needs; None without a compiler that has it."""
    try:
        found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    path = found.stdout.strip()
    return path if Path(path).is_absolute() else None


def run_cases(cases: int, seed: int) -> subprocess.CompletedProcess[str]:
    """Run so many cases with the sanitised library, in a process of their own.

    Raises:
        TimeoutExpired: they do not end within `LIMIT_S`.
    """
    environ = os.environ | {
        "LD_PRELOAD": str(compiler_runtime()),
        "ASAN_OPTIONS": "detect_leaks=0,allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1,print_stacktrace=1",
        "TEIMGR_SANITISED": str(Path(_built().name) / LIBRARY),
    }
    command = [sys.executable, "-m", "tests.fuzz.native", str(cases), str(seed)]
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@functools.cache
def _built() -> TemporaryDirectory[str]:
    """A folder with the sanitised library, built once: that takes as long as two thousand cases."""
    folder = TemporaryDirectory()
    library = str(Path(folder.name) / LIBRARY)
    subprocess.run(["gcc", *SANITISED.split(), *map(str, SOURCES), "-lm", "-o", library], check=True)
    return folder


class _Programs:
    """Random programs of one instruction set, each with exactly the memory that its sizes say."""

    def __init__(self, library: ctypes.CDLL, chance: random.Random) -> None:
        self._library = library
        self._chance = chance
        self._level = self._panel = self._bfloat16 = 0  # of the present program
        self._kept: list[Any] = []

    def call(self) -> int:
        """The status of one program, in half of the cases with some fields that are odd."""
        chance, self._kept = self._chance, []
        self._largest = chance.choice((1.0, 1.0, 1e-41, 3e38))
        self._level = chance.randint(1, self._library.attention_level())
        self._panel = int(self._library.panel_width(self._level))
        self._bfloat16 = chance.randrange(2) if self._level >= BFLOAT16_LEVEL else 0
        tokens = chance.choice((1, 2, 7, 8, 64, 65, 130, 600))
        cuts = sorted(chance.sample(range(1, tokens), min(tokens - 1, chance.randrange(4))))
        begins = self._array(np.array([0, *cuts, tokens], np.int32))
        rows = chance.randrange(1, 40)
        steps, columns = [self._embed(rows)], 16 * chance.randrange(1, 9)
        steps[0].width = columns
        steps[0].tables[0], steps[0].table_size[0] = self._floats(rows * columns), rows * columns
        slots = [_Slot(0, 4 * self._whole(columns))]
        for _ in range(chance.randrange(6)):
            last = slots[-1]
            if chance.randrange(4) == 0 and self._library.byte_sum_bits(self._level):
                steps.append(self._quantise(len(slots) - 1, columns))
                slots.append(_Slot(last.offset + last.stride, self._whole(steps[-1].width)))
                step = self._linear_of_bytes(len(slots) - 1, columns)
                columns = step.width
            else:
                step, columns = self._next(len(slots) - 1, columns, rows)
            steps.append(step)
            last = slots[-1]
            slots.append(_Slot(last.offset + last.stride, 4 * self._whole(max(columns, step.width * step.groups))))
            step.floats = len(slots) - 1
            if step.kind == _KINDS.index("attend"):
                step.operands = step.floats
        program = _Program(
            steps=(_Step * len(steps))(*steps), slots=(_Slot * len(slots))(*slots), step_count=len(steps),
            slot_count=len(slots), bytes=slots[-1].offset + slots[-1].stride, width=columns,
            rows=(rows, rows, rows), result=len(slots) - 1, bfloat16=self._bfloat16, level=self._level,
        )  # fmt: skip
        ids = [self._array(np.array([chance.randrange(rows) for _ in range(tokens)])) for _ in range(3)]
        call = _Call(
            program=ctypes.pointer(program), ids=ids[0], positions=ids[1], types=ids[2], begins=begins,
            texts=len(cuts) + 1, tokens=tokens, threads=1,
        )  # fmt: skip
        kept = [self._chance.randrange(tokens) for _ in range(call.texts)]
        way = chance.choice(("tokens", "kept", "mean"))
        call.kept = self._array(np.array(kept)) if way == "kept" else None
        call.pools = way == "mean"
        call.out_size = (tokens if way == "tokens" else call.texts) * columns
        call.out = self._floats(call.out_size)
        if chance.randrange(2):
            call.unit, call.unit_size = self._floats(call.out_size), call.out_size
        for _ in range(chance.choice((0, 0, 1, 2))):
            at = chance.choice([call, program, *program.steps[: len(steps)], *program.slots[: len(slots)]])
            self._spoil(at)
        return int(self._library.forward(ctypes.byref(call)))

    def _embed(self, rows: int) -> _Step:
        step = self._step("embed")
        step.table_count, step.floats, step.scale = 1, 0, 1.0
        return step

    def _next(self, slot: int, columns: int, rows: int) -> tuple[_Step, int]:
        chance = self._chance
        kind = chance.choice(("linear", "norm", "add", "activate", "gate", "rotate", "attend"))
        step = self._step(kind)
        step.x, step.inner, step.width = _Operand(slot, 0), columns, columns
        step.activation = chance.randrange(len(_ACTIVATIONS))
        if kind == "linear":
            step.width = 16 * chance.randrange(1, 9)
            wide = -(-step.width // self._panel) * self._panel
            step.halved = 0 if self._bfloat16 else chance.randrange(3)
            numbers = wide * columns // (2 if self._bfloat16 or step.halved else 1)
            step.weights, step.weights_size = self._floats(numbers), 4 * numbers
            step.bias, step.bias_size = self._floats(wide), wide
        elif kind == "norm":
            step.weights, step.weights_size = self._floats(columns), 4 * columns
        elif kind == "add":
            step.bias, step.bias_size = self._floats(columns), columns
        elif kind == "gate":
            step.with_ = _Operand(slot, 0)
        elif kind == "rotate":
            step.width, step.groups, step.table_count = columns // 2, 2, 2
            for place in range(2):
                step.tables[place], step.table_size[place] = self._floats(rows * step.width), rows * step.width
                step.index[place] = 1
        elif kind == "attend":
            step.heads = step.key_heads = chance.choice((1, 2, 4))
            step.head_size = columns // step.heads
            step.with_ = step.third = _Operand(slot, 0)
            step.reach, step.causal, step.scale = chance.choice((-1, 0, 3)), chance.randrange(2), 0.1
            if chance.randrange(2):
                step.bias, step.bias_size = self._floats(step.heads), step.heads
            return step, columns
        return step, step.width * step.groups

    def _quantise(self, slot: int, columns: int) -> _Step:
        step = self._step("quantise")
        step.x, step.inner, step.operands = _Operand(slot, 0), columns, slot + 1
        step.width = columns + 8  # with struct row_scale
        return step

    def _linear_of_bytes(self, slot: int, columns: int) -> _Step:
        step = self._step("linear")
        step.x, step.inner, step.width = _Operand(slot, 0), columns, 16 * self._chance.randrange(1, 9)
        step.activation = self._chance.randrange(len(_ACTIVATIONS))
        wide = -(-step.width // self._panel) * self._panel
        step.weights, step.weights_size = self._array(np.full(wide * columns, 64, np.int8)), wide * columns
        step.scales, step.scales_size = self._floats(wide), wide
        step.sums, step.sums_size = self._array(np.full(wide, 64 * columns, np.int32)), wide
        return step

    def _step(self, kind: str) -> _Step:
        none = _Operand(-1, 0)
        return _Step(
            kind=_KINDS.index(kind), x=none, with_=none, third=none, floats=-1, operands=-1, groups=1, reach=-1
        )

    def _whole(self, columns: int) -> int:
        return -(-columns // 64) * 64

    def _floats(self, count: int) -> int:
        return self._array((self._largest * np.linspace(-1, 1, max(count, 1))[:count]).astype(np.float32))

    def _array(self, array: np.ndarray[Any, Any]) -> int:
        self._kept.append(array)
        return array.ctypes.data

    def _spoil(self, structure: ctypes.Structure) -> None:
        """Put an odd number in a field that is a number and no address, nor a size of what an address points to."""
        fixed = {"weights_size", "bias_size", "scales_size", "sums_size", "out_size", "unit_size"}
        fixed |= {"threads", "waited", "level"}
        numbers = [
            (name, kind) for name, kind in (each[:2] for each in structure._fields_)
            if kind in (ctypes.c_int32, ctypes.c_int64) and name not in fixed
            and name not in ("texts", "tokens", "slot_count", "step_count")  # lengths of arrays behind addresses
        ]  # fmt: skip
        if numbers:
            name, kind = self._chance.choice(numbers)
            setattr(structure, name, kind(self._chance.choice(ODD)).value)


def attention_status(library: ctypes.CDLL, chance: random.Random) -> int:
    """The status of one call of attention alone, with exactly the rows that its sizes say."""
    heads, groups = chance.choice((1, 2, 4)), chance.choice((1, 2, 3))
    size, tokens = chance.choice((1, 5, 16, 64, 1000, 1024, 1040, 2048)), chance.choice((1, 6, 70))
    wide = heads * size
    rows = [np.ones(tokens * wide, np.float32) for _ in range(4)]
    begins = np.array([0, tokens], np.int32)
    call = Attention(
        query=rows[0].ctypes.data, key=rows[1].ctypes.data, value=rows[2].ctypes.data, out=rows[3].ctypes.data,
        out_stride=wide, query_stride=(wide, size), key_stride=(wide, size), value_stride=(wide, size),
        begins=begins.ctypes.data, texts=1, longest=tokens, tokens=tokens, query_size=rows[0].size,
        key_size=rows[1].size, value_size=rows[2].size, out_size=rows[3].size, heads=heads,
        key_heads=max(1, heads // groups), head_size=size, reach=-1, level=chance.randint(0, library.attention_level()),
        scale=1.0,
    )  # fmt: skip
    slopes = np.ones(heads, np.float32)
    if chance.random() < 0.5:
        call.slopes, call.slopes_size = slopes.ctypes.data, heads
    if chance.random() < 0.5:
        names = ("heads", "key_heads", "head_size", "longest", "out_stride", "reach", "causal", "bfloat16")
        name, value = chance.choice(names), chance.choice(ODD)
        setattr(call, name, value if abs(value) < 2**31 or name not in ("causal", "bfloat16") else 1)
    return int(library.attention(ctypes.byref(call)))


def main(cases: int, seed: int) -> None:
    """Run the cases and print how many of each status there were; a sanitizer ends the process."""
    library, chance = ctypes.CDLL(os.environ["TEIMGR_SANITISED"]), random.Random(seed)
    library.panel_width.restype = ctypes.c_int64
    programs, found = _Programs(library, chance), Counter[str]()
    for _ in range(cases):
        found[f"forward {programs.call()}"] += 1
        found[f"attention {attention_status(library, chance)}"] += 1
    print(dict(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
