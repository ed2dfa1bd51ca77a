"""Loads the C library of `native/`, if the package was built with a compiler, for the instructions of this CPU.

It is an extension without a Python module, loaded through ctypes, which releases the GIL during its calls. Attention
within a model's own forward runs on torch's OpenMP threads, the native forward on its own threads.

Bulk work calls `give_way` between two steps. If each lane has a thread, the bulk thread waits there until no query is
computed, like the threads of the native forward within a forward. If one thread serves both lanes, it computes the
waiting queries.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

log = logging.getLogger(__name__)

# `attention_level` of library.h
_X86_LEVELS = ("baseline", "avx2", "avx_vnni", "avx512", "avx512_bf16", "amx")
_ARM_LEVELS = ("baseline", "neon", "neon_dot", "neon_bf16")
LEVELS = _ARM_LEVELS if platform.machine() in ("aarch64", "arm64") else _X86_LEVELS
BFLOAT16_LEVEL = next(at for at, name in enumerate(LEVELS) if "bf16" in name)  # the first with bfloat16
MAX_HEAD_SIZE, MAX_HEADS = 1024, 1 << 16  # limits of buffers in library.h
NO_MEMORY = "can't allocate memory"  # torch's text too, by which `runner` recognises a batch that was too large
# "0" disables the library. "attention" uses only its attention, within the model's own forward. One of `LEVELS` is the
# highest level of instructions to use.
_SWITCH = "TEIMGR_NATIVE"

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
# Arguments of the functions of vectors.c.
_VECTORS = {
    "pool_mean": [_POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER, _POINTER],
    "scale_rows": [_POINTER, *[_NUMBER] * 4, _POINTER],
    "finite_rows": [_POINTER, _NUMBER, _NUMBER, _POINTER],
}
_WORDPIECE_ENCODE: list[Any] = [
    *(_POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER, _NUMBER, ctypes.c_int32, _POINTER, _NUMBER, _POINTER)
]
_NO_PALETTE = -1  # result of `tiles_refusal` in library.h
_here = threading.local()  # `serve` of a thread of both lanes, during a bulk batch
# The structures of `struct_size` in validity.c, in its order.
_STRUCTS = ("attention", "slot", "step", "program", "forward")


class NativeLibrary:
    """The library in `path`; `level` is the index in `LEVELS` of the best instructions that this CPU has.

    `byte_sum_bits(level)` is 0 if a level has no int8, otherwise the bits in which it sums the products of two
    neighbouring bytes: 32, or 16, which saturate. `refused` is the reason why instructions of the CPU cannot be used,
    or empty.

    `parallel` is the address of GOMP_parallel in the OpenMP that torch has loaded, None if there was no such library:
    then work runs on the calling thread. `run_threads` is the address of the same function for the library's threads.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.path = library._name
        self.attention = library.attention
        self.forward = library.forward
        self.panel_width = library.panel_width
        self.panel_width.restype = ctypes.c_int64
        self.wordpiece_fill = library.wordpiece_fill
        self.wordpiece_encode = library.wordpiece_encode
        self.wordpiece_encode.argtypes = _WORDPIECE_ENCODE
        self.wordpiece_encode.restype = ctypes.c_int64
        for name, arguments in _VECTORS.items():
            function = getattr(library, name)
            function.argtypes, function.errcheck = arguments, _refused
        self.pool_mean, self.scale_rows, self.finite_rows = (getattr(library, name) for name in _VECTORS)
        size_of, wordpiece_size = library.struct_size, library.wordpiece_size
        size_of.restype = wordpiece_size.restype = ctypes.c_int64
        quick = ctypes.PyDLL(library._name, handle=library._handle)  # keeps the GIL: they are short
        # Without argument types: the arguments need no conversion, which would take as long as the functions.
        self.tenant_charge, self.tenant_refund = quick.tenant_charge, quick.tenant_refund
        self.tenant_charge_at, self.tenant_refund_at = quick.tenant_charge_at, quick.tenant_refund_at
        self.tenant_charge_at.argtypes, self.tenant_charge_at.restype = [_POINTER, *[_NUMBER] * 3], ctypes.c_int64
        self.tenant_refund_at.argtypes, self.tenant_refund_at.restype = [_POINTER, *[_NUMBER] * 2], None
        self._sizes = {name: int(size_of(at)) for at, name in enumerate(_STRUCTS)}
        self._sizes["wordpiece"] = int(wordpiece_size())
        most = LEVELS.index(switch) if (switch := _switch()) in LEVELS else len(LEVELS)
        self.level = min(int(library.attention_level()), most)
        refusal = getattr(library, "tiles_refusal", None)  # present if the compiler has AMX
        self.refused = "" if refusal is None or self.level == most else _words_of(int(refusal()))
        self.byte_sum_bits = library.byte_sum_bits
        self.parallel = _openmp_parallel()
        self._set_background = getattr(library, "set_background", None)  # only on Linux, like the next two
        self.set_wait: Any = getattr(library, "set_wait", None)
        self.wait_for_foreground: Any = getattr(library, "wait_for_foreground", None)
        own = getattr(library, "run_threads", None)
        self.run_threads = self.parallel if own is None else ctypes.cast(own, ctypes.c_void_p).value

    @property
    def gives_way(self) -> bool:
        """True if background threads pause for the forwards of other threads."""
        return self.set_wait is not None

    def to_background(self) -> None:
        """Let forwards of the calling thread give way to those of others from now on, but for a fifth of the time."""
        if self._set_background is not None:
            self._set_background(ctypes.c_int32(1))

    def knows(self, **structures: type[ctypes.Structure]) -> bool:
        """True if each structure has the size that the library, which may be of another version, gives that name."""
        return all(ctypes.sizeof(declared) == self._sizes[name] for name, declared in structures.items())


def _words_of(refusal: int) -> str:
    """Return why the CPU's tiles are not used, from `tiles_refusal` of library.h; empty for 0."""
    if not refusal:
        return ""
    if refusal == _NO_PALETTE:
        return "the CPU has AMX, but the virtual machine shows no tiles of it"
    return f"the CPU has AMX, but the kernel refuses its tiles: arch_prctl: {os.strerror(refusal)}"


def _refused(status: int, *_: Any) -> None:
    """Raise ValueError if a function of vectors.c has refused its sizes."""
    if status:
        raise ValueError("native library: rows outside of the array they are of")


@functools.cache
def native_library() -> NativeLibrary | None:
    """Return the library, or None if the package was built without a compiler or the environment forbids it."""
    if _switch() == "0":
        return None
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if (path := folder / f"_native{suffix}").exists():
            try:
                library = NativeLibrary(ctypes.CDLL(str(path)))
            except (OSError, AttributeError) as error:
                log.warning("the native library cannot be loaded: %s", error)
                continue
            if library.refused:
                log.warning("%s; %s is used", library.refused, LEVELS[library.level])
            return library
    return None


def address(array: NDArray[Any]) -> int:
    """Return the address of an array's memory: `array.ctypes.data`, which takes five times as long for most arrays."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (TypeError, ValueError):  # not writable, not contiguous or empty
        return array.ctypes.data


def native_forward_allowed() -> bool:
    """True if the environment allows more of the library than its attention."""
    return _switch() not in ("0", "attention")


def _switch() -> str:
    return os.environ.get(_SWITCH, "")


def _openmp_parallel() -> int | None:
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except AttributeError:
        return None


def allow_wait(most_s: float) -> None:
    """Let the calling thread, which is not the engine's, wait in its next calls of `give_way`, for at most this long in
    total."""
    if (library := native_library()) is not None and library.gives_way:
        library.set_wait(ctypes.c_int64(int(most_s * 1e9)))


def give_way() -> None:
    """Between two steps of work, compute the queries that wait, or wait for queries that other threads compute, if the
    thread may."""
    serve = getattr(_here, "serve", None)
    if serve is not None:
        with serving(None):
            serve()
    elif (library := native_library()) is not None and library.gives_way:
        library.wait_for_foreground()


@contextmanager
def serving(serve: Callable[[], None] | None) -> Iterator[None]:
    """Within the block, `give_way` calls `serve` on this thread; not from within `serve` itself."""
    former, _here.serve = getattr(_here, "serve", None), serve
    try:
        yield
    finally:
        _here.serve = former
