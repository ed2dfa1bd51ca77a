"""What this run of the suite has of the native library: all of it, its attention alone, or nothing.

    TEIMGR_NATIVE=0 python3.11 dev.py test            as where the package was built without a compiler
    TEIMGR_NATIVE=attention python3.11 dev.py test    its attention alone
    TEIMGR_NATIVE=avx2 python3.11 dev.py test         no instructions beyond these

Tests of the library itself are skipped where it is missing; tests of what serves models expect what serves here.
"""

from __future__ import annotations

import pytest

from teimgr.engine.backbone import Batching
from teimgr.engine.native_library import native_forward_allowed, native_library

LIBRARY = native_library()
HAS_FORWARD = LIBRARY is not None and native_forward_allowed()
MULTIPLIES_BYTES = HAS_FORWARD and LIBRARY is not None and bool(LIBRARY.byte_sum_bits(LIBRARY.level))

FORWARD = "native" if HAS_FORWARD else "library"
"""`forward` of `/info` for a model that is lowered."""
PACKED = Batching.NATIVE if HAS_FORWARD else Batching.BY_RUN if LIBRARY is None else Batching.VARLEN
"""How a lowered model's batches are run."""

needs_native_library = pytest.mark.skipif(LIBRARY is None, reason="needs the native library")
needs_native_forward = pytest.mark.skipif(not HAS_FORWARD, reason="needs the native library, not its attention alone")
needs_int8 = pytest.mark.skipif(not MULTIPLIES_BYTES, reason="needs the native library and a CPU that multiplies bytes")
