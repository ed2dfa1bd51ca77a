"""The forward of a transformer in one call of our C library: the steps of a program with their packed weights.

A query needs no Python call per layer, and a batch is computed group by group, so that a layer's results are still in
the cache when the next layer reads them. The residual stream and the norms are float32 in every dtype.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from teimgr.engine.batching.batch import PackedBatch
from teimgr.engine.core_load import HelperWaits
from teimgr.engine.native_forward.lowering import lower
from teimgr.engine.native_forward.program import (
    CannotLowerError,
    ForwardProgram,
    Step,
    Table,
    WeightPacker,
    narrowest,
    quantised,
)
from teimgr.engine.native_forward.trace import trace_forward
from teimgr.engine.native_library import (
    BFLOAT16_LEVEL,
    LEVELS,
    NO_MEMORY,
    address,
    native_forward_allowed,
    native_library,
)

_KINDS = ("embed", "linear", "attend", "norm", "add", "activate", "gate", "rotate", "quantise")
_ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "silu", "tanh", "quick_gelu")
_NORMS = ("layer", "rms")
_INDICES = ("ids", "positions", "types")
_HALVED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `enum weights`
_MAX_TABLES = 4
_NO_SLOT = -1
# A row of a slot is a multiple of this many elements, the columns of the widest panel; a quantised one, of bytes.
_SLOT_UNIT = 64
_BAD_INDEX, _BAD_CALL = 3, 4
_ERRORS = {
    1: NO_MEMORY,
    2: "this CPU lacks the instructions",
    _BAD_INDEX: "a token id, position or type has no row in the model's tables",
    _BAD_CALL: "a size in the program or the batch is outside of what it is of",
}
_SMALL_TOKENS = 512  # batches up to this size are computed by one thread while helpers are held up
_NO_TABLE = (1 << 63) - 1
_FIRST_POSITIONS = 512
_ROW_SCALE_BYTES = 8  # struct row_scale
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)  # a comparison with a class takes 1 µs


class _Slot(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_int64), ("stride", ctypes.c_int64))


class _Operand(ctypes.Structure):
    _fields_ = (("slot", ctypes.c_int32), ("column", ctypes.c_int64))


class _Step(ctypes.Structure):
    """`struct step` of forward.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("norm", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("x", _Operand),
        ("with_", _Operand),
        ("third", _Operand),
        ("floats", ctypes.c_int32),
        ("operands", ctypes.c_int32),
        ("halved", ctypes.c_int32),
        ("width", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("weights_size", ctypes.c_int64),
        ("bias_size", ctypes.c_int64),
        ("scales_size", ctypes.c_int64),
        ("sums_size", ctypes.c_int64),
        ("tables", ctypes.c_void_p * _MAX_TABLES),
        ("table_size", ctypes.c_int64 * _MAX_TABLES),
        ("index", ctypes.c_int32 * _MAX_TABLES),
        ("table_count", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("key_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("reach", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("epsilon", ctypes.c_float),
    )


class _Program(ctypes.Structure):
    """`struct program` of forward.h."""

    _fields_ = (
        ("steps", ctypes.POINTER(_Step)),
        ("slots", ctypes.POINTER(_Slot)),
        ("step_count", ctypes.c_int64),
        ("slot_count", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("rows", ctypes.c_int64 * len(_INDICES)),
        ("result", ctypes.c_int32),
        ("bfloat16", ctypes.c_int32),
        ("level", ctypes.c_int32),
    )


class _Call(ctypes.Structure):
    """`struct forward` of forward.h."""

    _fields_ = (
        ("program", ctypes.POINTER(_Program)),
        ("ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("types", ctypes.c_void_p),
        ("begins", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("texts", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_size", ctypes.c_int64),
        ("unit", ctypes.c_void_p),
        ("unit_size", ctypes.c_int64),
        ("pools", ctypes.c_int32),
        ("finite", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("parallel", ctypes.c_void_p),
        ("waited", ctypes.c_int64),
    )


class Vectors(NamedTuple):
    """Vectors of the N texts of a batch: `values`, float32 [N, width], and `unit`, the same scaled to length 1; and
    whether all `values` are finite."""

    values: NDArray[np.float32]
    unit: NDArray[np.float32]
    are_finite: bool


@dataclass(frozen=True, slots=True)
class _Value:
    """The result of a step: its slots for float32 and for operands, which are equal if operands are float32."""

    floats: int = _NO_SLOT
    operands: int = _NO_SLOT


@dataclass(frozen=True, slots=True)
class _SizedProgram:
    """The program with tables for `positions` positions. A call keeps the program that it started with."""

    positions: int
    tables: tuple[Tensor, ...]
    steps: ctypes.Array[_Step]
    program: _Program


def forward_kernel(
    module: Any, options: dict[str, Any], dtype: torch.dtype, trained: int | None = None
) -> tuple[ForwardKernel, ForwardProgram]:
    """Make the kernel for a transformers `module` in float32, and return it with its program; `options` go to the
    module's forward, `trained` to the kernel.

    Raises:
        CannotLowerError: the model computes something that is not among the steps, or the library is missing.
    """
    if native_library() is None or not native_forward_allowed():
        raise CannotLowerError("the native library is missing, or the environment disables it")
    program = lower(trace_forward(module, options))
    return ForwardKernel(program, dtype, trained=trained), program


class ForwardKernel:
    """A program with its weights in `dtype`.

    Layers of bfloat16 are multiplied in it where the CPU has such products. Elsewhere, and in float16 everywhere, the
    weights are kept in 16 bits and read as float32, in which everything is computed. The same is done in float32 with
    weights that 16 bits hold exactly, as a file may store them. int8 has a scale for each column of a layer and for
    each token's row; between the layers it computes in bfloat16 where the CPU has it, else in float32.

    Tables of positions are those of texts of up to `trained` tokens; longer texts have tables of that length, so
    that a batch with one has texts of its length alone.

    Raises:
        CannotLowerError: the library is missing, or the CPU lacks the instructions for int8, or the program reads a
            result in a way that the library does not.
    """

    def __init__(
        self, program: ForwardProgram, dtype: torch.dtype, *, level: str | None = None, trained: int | None = None
    ) -> None:
        library = native_library()
        structures = {"slot": _Slot, "step": _Step, "program": _Program, "forward": _Call}
        if library is None or not library.knows(**structures):
            raise CannotLowerError("no native library of this version")
        self._library = library
        self._level = library.level if level is None else LEVELS.index(level)
        self._panel = int(library.panel_width(self._level))
        byte_sum_bits = int(library.byte_sum_bits(self._level))
        has_bfloat16, is_int8 = self._level >= BFLOAT16_LEVEL, dtype is torch.int8
        self._bfloat16 = has_bfloat16 and (is_int8 or dtype is torch.bfloat16)
        self._weights = torch.float32 if is_int8 else dtype
        known = {**dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), True), torch.int8: bool(byte_sum_bits)}
        if not self._panel or not known.get(dtype, False):
            raise CannotLowerError(f"no {dtype} on {LEVELS[self._level]}")
        if is_int8:
            program = quantised(program)
        self._quantised = frozenset(step.key for step in program.steps if step.kind == "quantise")
        self._kept: list[Tensor] = []  # what the steps point to
        slots, values = self._slots(program)
        self._tables: list[tuple[int, int, Table]] = []  # step, place, table of positions
        self._rows = [_NO_TABLE] * len(_INDICES)  # of the smallest table of each index, but those
        linears = [step for step in program.steps if step.kind == "linear" and not self._reads_bytes(step)]
        self._stored = {step.key: self._stored_dtype(step) for step in linears}
        shapes = [(step.width, step.x.width, self._stored[step.key]) for step in linears if step.x is not None]
        self._packer = WeightPacker(shapes, self._panel, pairs=self._bfloat16, byte_sum_bits=byte_sum_bits)
        self._steps = (_Step * len(program.steps))(*[self._step(step, values) for step in program.steps])
        self._slots_array = (_Slot * len(slots))(*slots)
        self._program = _Program(
            steps=self._steps,
            slots=self._slots_array,
            step_count=len(self._steps),
            slot_count=len(slots),
            bytes=max(slot.offset + slot.stride for slot in slots),
            width=program.width,
            rows=tuple(self._rows),
            result=values[len(program.steps) - 1].floats,
            bfloat16=self._bfloat16,
            level=self._level,
        )
        self._growing = threading.Lock()
        self._helper_waits = HelperWaits()
        self._trained = sys.maxsize if trained is None else trained
        self._sized = self._of_positions(min(_FIRST_POSITIONS, self._trained))
        self._longer: _SizedProgram | None = None  # of the last length beyond `trained`

    @property
    def multiplies(self) -> torch.dtype:
        """The dtype of the operands of its products, but for those of int8: bfloat16 or float32."""
        return torch.bfloat16 if self._bfloat16 else torch.float32

    def __call__(self, batch: PackedBatch, positions: NDArray[np.int64], threads: int) -> Tensor:
        """Hidden states, float32 [T, width], or [N, width] if the batch has `kept` tokens; `positions` are int64 [T].

        Any number of threads may call at a time.

        Raises:
            RuntimeError: a thread's part of the batch cannot be allocated.
            IndexError: the model has no such token id, position or type.
            ValueError: the arrays of the batch do not belong together.
        """
        self._check(batch, positions)
        return self._computed(self._sized_for(positions), batch, positions, threads)

    def vectors(self, batch: PackedBatch, positions: NDArray[np.int64], threads: int) -> Vectors:
        """The mean of each text's hidden states, or if the batch has `kept` tokens these, all in one call: behind a
        forward, which leaves nothing else in the caches, each further one would take some 20 µs.

        Raises:
            RuntimeError, IndexError, ValueError: as a call.
        """
        self._check(batch, positions)
        values, unit = np.empty((2, batch.texts, self._program.width), np.float32)
        call = self._run(self._sized_for(positions), batch, positions, threads, address(values), address(unit))
        return Vectors(values, unit, bool(call.finite))

    def _check(self, batch: PackedBatch, positions: NDArray[np.int64]) -> None:
        tokens, texts = batch.tokens, batch.texts
        of_tokens = _is_read(batch.ids, tokens, _INT64) and _is_read(positions, tokens, _INT64)
        of_tokens = of_tokens and _is_read(batch.type_ids, tokens, _INT64) and _is_read(batch.kept, texts, _INT64)
        borders = _is_read(batch.cu_seqlens, texts + 1, _INT32) and _is_read(batch.keys, texts, _INT32)
        if not of_tokens or not borders:
            raise ValueError("native forward: ids, positions, types, borders, keys or kept tokens are not the batch's")

    def _sized_for(self, positions: NDArray[np.int64]) -> _SizedProgram:
        """Return the program with tables that have these positions."""
        if not self._tables or (most := int(positions.max()) + 1) <= self._sized.positions:
            return self._sized
        return self._of_length(most) if most > self._trained else self._grown(1 << (most - 1).bit_length())

    def of_rows(
        self,
        rows: Tensor,
        length: int,
        threads: int,
        positions: NDArray[np.int64] | None = None,
        *,
        first: bool = False,
    ) -> Tensor:
        """Hidden states, float32 [T, width], of inputs of `length` rows each: float32 [T, width of a row], which take
        the place of the program's only table of ids; those of the `first` row of each alone. `positions` are int64 [T],
        all 0 where None. Any number of threads may call at a time.

        Raises:
            RuntimeError: as a call.
            ValueError: the rows are not those of whole inputs, or of another width, or without a position each.
        """
        step, tokens = self._steps[0], len(rows)
        if tokens % length or rows.shape != (tokens, step.width) or rows.dtype is not torch.float32:
            raise ValueError(f"native forward: {tuple(rows.shape)} cannot be inputs of {length} rows of {step.width}")
        if positions is None:
            positions = np.zeros(tokens, np.int64)
        if len(positions) != tokens:
            raise ValueError(f"native forward: {len(positions)} positions of {tokens} rows")
        sized, kept = self._sized_for(positions), rows.contiguous()
        steps = type(self._steps).from_buffer_copy(sized.steps)
        steps[0].tables[0], steps[0].table_size[0] = kept.data_ptr(), kept.numel()
        program = _Program.from_buffer_copy(sized.program)
        program.steps = steps
        program.rows[_INDICES.index("ids")] = tokens
        batch = PackedBatch(
            ids=np.arange(tokens),
            position_ids=positions,
            cu_seqlens=np.arange(0, tokens + 1, length, dtype=np.int32),
            max_seqlen=length,
            runs=(),
            order=np.arange(tokens // length),
            kept=np.arange(0, tokens, length) if first else None,
        )
        own = _SizedProgram(sized.positions, (kept, *sized.tables), steps, program)
        return self._computed(own, batch, positions, threads)

    def _computed(self, sized: _SizedProgram, batch: PackedBatch, positions: NDArray[np.int64], threads: int) -> Tensor:
        out = torch.empty(batch.tokens if batch.kept is None else batch.texts, self._program.width)
        self._run(sized, batch, positions, threads, out.data_ptr())
        return out

    def _run(
        self,
        sized: _SizedProgram,
        batch: PackedBatch,
        positions: NDArray[np.int64],
        threads: int,
        out: int,
        unit: int | None = None,
    ) -> _Call:
        """Run the call; results are at the address `out`, and are vectors if there is `unit`."""
        is_small = batch.tokens <= _SMALL_TOKENS
        if is_small and threads > 1:
            threads = self._helper_waits.threads(threads)
        pools = unit is not None and batch.kept is None
        size = (batch.tokens if batch.kept is None and not pools else batch.texts) * self._program.width
        call = _Call(
            program=ctypes.pointer(sized.program),
            ids=address(batch.ids),
            positions=address(positions),
            types=None if batch.type_ids is None else address(batch.type_ids),
            begins=address(batch.cu_seqlens),
            keys=None if batch.keys is None else address(batch.keys),
            kept=None if batch.kept is None else address(batch.kept),
            texts=batch.texts,
            tokens=batch.tokens,
            out=out,
            out_size=size,
            unit=unit,
            unit_size=size,
            pools=pools,
            threads=threads,
            parallel=self._library.run_threads,
        )
        if status := self._library.forward(ctypes.byref(call)):
            raise (IndexError if status == _BAD_INDEX else RuntimeError)(f"native forward: {_ERRORS[status]}")
        if is_small and threads > 1:
            self._helper_waits.note(call.waited / 1e9)
        return call

    def _grown(self, positions: int) -> _SizedProgram:
        """Return the program with at least `positions` rows, for all later calls; the old one is freed after its last
        call."""
        with self._growing:
            if positions > self._sized.positions:
                self._sized = self._of_positions(min(positions, self._trained))
            return self._sized

    def _of_length(self, length: int) -> _SizedProgram:
        """Return the program with the tables for texts of `length` tokens; the last one is kept."""
        with self._growing:
            if self._longer is None or self._longer.positions != length:
                self._longer = self._of_positions(length)
            return self._longer

    def _of_positions(self, positions: int) -> _SizedProgram:
        """Copy the program with tables of `positions` rows.

        Steps share tables with equal rows: the layers of a model rotate by one pair of tables or two, although each
        computes its own.
        """
        steps = type(self._steps).from_buffer_copy(self._steps)
        distinct: list[Tensor] = []
        for step, place, table in self._tables:
            rows = table.rows(positions).detach().float().contiguous()
            shared = next((known for known in distinct if torch.equal(known, rows)), rows)
            if shared is rows:
                distinct.append(rows)
            steps[step].tables[place], steps[step].table_size[place] = shared.data_ptr(), shared.numel()
        program = _Program.from_buffer_copy(self._program)
        program.steps = steps
        if self._tables:
            at = _INDICES.index("positions")
            program.rows[at] = min(positions, program.rows[at])
        return _SizedProgram(positions, tuple(distinct), steps, program)

    def _kept_floats(self, tensor: Tensor) -> tuple[int, int]:
        """Return address and count of a tensor's numbers as float32, which are kept as long as the kernel."""
        kept = tensor.detach().float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr(), kept.numel()

    def _step(self, step: Step, values: dict[int, _Value]) -> _Step:
        is_same = values[step.key].floats == values[step.key].operands
        made = _Step(
            kind=_KINDS.index(step.kind),
            activation=_ACTIVATIONS.index(step.activation),
            norm=_NORMS.index(step.norm),
            causal=step.causal,
            floats=values[step.key].floats,
            operands=_NO_SLOT if is_same and step.kind != "attend" else values[step.key].operands,
            width=step.width,
            inner=0 if step.x is None else step.x.width,
            groups=step.groups,
            table_count=len(step.tables),
            heads=step.heads[0],
            key_heads=step.heads[1],
            head_size=step.heads[2],
            reach=-1 if step.reach is None else step.reach,
            scale=_scale(step),
            epsilon=step.epsilon,
        )
        if len(step.tables) > _MAX_TABLES:
            raise CannotLowerError(f"a sum of {len(step.tables)} embeddings")
        for name in ("x", "with_", "third"):
            setattr(made, name, _Operand(_NO_SLOT, 0))
        for name, read in step.named_reads.items():
            value = values[read.key]
            setattr(made, name, _Operand(value.operands if step.reads_operands(name) else value.floats, read.column))
        if step.kind == "linear":
            assert step.weights is not None
            assert step.x is not None
            parts = (step.weights, *step.further)
            if self._reads_bytes(step):
                weights, scales, sums = self._packer.pack_bytes(torch.cat(parts))
                self._kept += (scales, sums)
                made.scales, made.sums = scales.data_ptr(), sums.data_ptr()
                made.scales_size, made.sums_size = scales.numel(), sums.numel()
            else:
                dtype = self._stored[step.key]
                weights = self._packer.pack(parts, dtype)
                made.halved = 0 if self._bfloat16 else _HALVED[dtype]
            self._kept.append(weights)
            made.weights, made.weights_size = weights.data_ptr(), weights.nbytes
            if step.bias is not None:
                made.bias, made.bias_size = self._kept_floats(self._packer.padded(step.bias.float()))
            return made
        if step.weights is not None:
            made.weights, numbers = self._kept_floats(step.weights)
            made.weights_size = numbers * ctypes.sizeof(ctypes.c_float)
        if step.bias is not None:
            made.bias, made.bias_size = self._kept_floats(step.bias)
        for place, (table, index) in enumerate(step.tables):
            made.index[place] = _INDICES.index(index)
            if isinstance(table, Table):
                self._tables.append((step.key, place, table))
            else:
                made.tables[place], made.table_size[place] = self._kept_floats(table)
                self._rows[made.index[place]] = min(self._rows[made.index[place]], len(table))
        return made

    def _stored_dtype(self, step: Step) -> torch.dtype:
        """Return the dtype in which the weights of a linear layer are kept."""
        assert step.weights is not None
        if self._bfloat16:
            return torch.bfloat16
        exact = narrowest((step.weights, *step.further))
        return self._weights if exact is torch.float32 else exact

    def _reads_bytes(self, step: Step) -> bool:
        return step.x is not None and step.x.key in self._quantised

    def _slots(self, program: ForwardProgram) -> tuple[list[_Slot], dict[int, _Value]]:
        """Assign a place to every result for as long as it is read, in memory that results share."""
        last = len(program.steps) - 1
        floats, operands, until = {last}, set[int](), {last: last}
        for step in program.steps:
            for name, read in step.named_reads.items():
                (operands if step.reads_operands(name) else floats).add(read.key)
                until[read.key] = max(until.get(read.key, 0), step.key)
        layout = _SlotLayout()
        values: dict[int, _Value] = {}
        for step in program.steps:
            key, elements = step.key, -(-step.width * step.groups // _SLOT_UNIT) * _SLOT_UNIT
            if step.kind == "attend" and self._bfloat16 and key in floats:
                raise CannotLowerError("attention's result as float32")
            layout.release(key)
            last_read = until.get(key, key)
            if step.kind == "quantise":
                slot = layout.take(-(-(step.width + _ROW_SCALE_BYTES) // _SLOT_UNIT) * _SLOT_UNIT, last_read)
                values[key] = _Value(operands=slot)
            elif self._bfloat16:
                wide = layout.take(elements * 4, last_read) if key in floats else _NO_SLOT
                narrow = layout.take(elements * 2, last_read) if key in operands else _NO_SLOT
                values[key] = _Value(wide, narrow)
            else:
                slot = layout.take(elements * 4, last_read)
                values[key] = _Value(slot, slot)
        return layout.slots, values


def _is_read(array: NDArray[Any] | None, length: int, dtype: np.dtype[Any]) -> bool:
    """True if the library may read this many numbers from where `array` begins; True for None, from which nothing is
    read."""
    return array is None or (len(array) == length and array.dtype == dtype and array.flags.c_contiguous)


def _scale(step: Step) -> float:
    if step.scale is not None:
        return step.scale
    return float(step.heads[2] ** -0.5) if step.kind == "attend" else 1.0


class _SlotLayout:
    """Assigns results to places in the memory of a token; a place is free again after the last step that reads it."""

    def __init__(self) -> None:
        self.slots: list[_Slot] = []
        self._taken: list[tuple[int, int, int]] = []  # offset, end, last step that reads it

    def release(self, step: int) -> None:
        """Free the places that no step from `step` on reads."""
        self._taken = [one for one in self._taken if one[2] >= step]

    def take(self, size: int, last_read: int) -> int:
        """Return the number of a new slot of `size` bytes, at the first place that is wide enough."""
        offset = 0
        for begin, end, _ in sorted(self._taken):
            if offset + size <= begin:
                break
            offset = max(offset, end)
        self._taken.append((offset, offset + size, last_read))
        self.slots.append(_Slot(offset, size))
        return len(self.slots) - 1
