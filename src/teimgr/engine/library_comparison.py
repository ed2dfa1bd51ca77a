"""Compare a loaded model with sentence-transformers or transformers, as a trial does (`teimgr models check`).

The gate of each load (`fidelity_gate`) compares with this engine's own float32 forward, which uses our tokenizer and
our readers of the files. This comparison shares nothing, so it also detects a wrong prompt, truncation, pooling or
token. It needs a second copy of the model and, if installed, an optional package, so only a trial's process makes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from teimgr.engine.engine import Engine
from teimgr.engine.fidelity.fidelity_gate import PROBE_TEXTS
from teimgr.engine.job import InferOptions, Input, Job, Output, Pair
from teimgr.engine.library_reference import TRANSFORMERS, LibraryReference, Matrix, NoReferenceError, load_reference
from teimgr.errors import TeimgrError
from teimgr.models.directory import weight_files
from teimgr.models.layout import Layout
from teimgr.spec import OWN_FORWARD, Kind, LoadedModel

log = logging.getLogger(__name__)

# Tokens of the long text: the library takes seconds for more on a CPU, and memory quadratic in the length.
_LONGEST_TEXT = 4096
_OVER_HALF = 9 / 16
_PROMPT = "query: "
_SHORT = (PROBE_TEXTS[1], PROBE_TEXTS[3], PROBE_TEXTS[4])
_EMPTY = ""  # in a pair
_BLANK = " "  # alone: empty texts are refused by all APIs, white space is not
# By dtype, the lowest cosine and the largest difference of scores, relative to the largest above 1.
_LIMITS = {"float32": (0.999, 1e-3), "bfloat16": (0.98, 0.1), "float16": (0.98, 0.1), "int8": (0.95, 0.2)}
_LOADING_BYTES = 1 << 30  # of the library and its results, in addition to the weights


@dataclass(frozen=True, slots=True)
class LibraryComparison:
    """The reference of a comparison, and how close the model is to it.

    `compared_with` is a library with its version, or `OWN_FORWARD` with the reason in `not_compared`. `min_cosine` is
    the lowest of all inputs; None for models with scores, whose `score_difference` is relative to the largest above 1.
    `longest_tokens` is the length of the longest input.
    """

    compared_with: str
    min_cosine: float | None = None
    score_difference: float | None = None
    inputs: int = 0
    longest_tokens: int = 0
    not_compared: str | None = None
    agrees: bool = True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Probe:
    inputs: tuple[Input, ...]
    prompt_name: str | None
    prompt: str | None

    def options(self, output: Output) -> InferOptions:
        return InferOptions(frozenset({output}), prompt_name=self.prompt_name, prompt=self.prompt, raw_scores=True)


def compare_with_library(engine: Engine, threads: int, room_bytes: int | None, limit_s: float) -> LibraryComparison:
    """Compare an engine's results with the library's. Loads the model a second time, with at most `room_bytes` of
    memory where they are known; what takes longer than `limit_s` is not compared. Never raises.
    """
    began = time.monotonic()
    try:
        needed = _LOADING_BYTES + _float32_bytes(engine.layout)
        if room_bytes is not None and needed > room_bytes:
            raise NoReferenceError(
                f"a second copy in float32 needs {needed / 1e9:.1f} GB of memory, "
                f"and {room_bytes / 1e9:.1f} GB are free"
            )
        torch.set_num_threads(threads)  # the engine computes nothing meanwhile
        reference = load_reference(engine.layout)
        found = _compared(engine, reference, began + limit_s)
    except NoReferenceError as reason:
        return _own(engine.info, str(reason))
    except TeimgrError as error:
        return _own(engine.info, f"this model does not answer: {error.message}")
    except Exception as error:  # of any type, from the library or the model's own code
        log.info("the library cannot run the model", exc_info=error)
        first = str(error).strip().partition("\n")[0]
        return _own(engine.info, f"the library cannot run it: {type(error).__name__}: {first[:300]}")
    log.info("compared with %s: %s", found.compared_with, found)
    return found


def _float32_bytes(layout: Layout) -> int:
    """Estimate the bytes of a float32 copy of the weights, which have two bytes or more in their files, and of its
    reader."""
    return 2 * sum(file.stat().st_size for file in weight_files(layout.weights_dir) if file.is_file())


def _own(info: LoadedModel, reason: str) -> LibraryComparison:
    return LibraryComparison(OWN_FORWARD, info.min_cosine, not_compared=reason)


def _compared(engine: Engine, reference: LibraryReference, deadline: float) -> LibraryComparison:
    cosines: list[float] = []
    differences: list[float] = []
    count = longest = 0
    for probe in _probes(engine):
        for one in probe.inputs:
            if time.monotonic() > deadline:
                raise NoReferenceError(f"{reference.name} took too long")
            job = engine.answers([one], probe.options(reference.output), max(1.0, deadline - time.monotonic()))
            if 0 in job.errors:  # the engine refuses it, such as a text in place of a pair
                continue
            theirs = reference.compute(one, _prompt(engine, probe, reference))
            ours = _result(job, reference.output, theirs.shape[-1])
            if ours.shape != theirs.shape:
                raise NoReferenceError(f"{reference.name} gives {theirs.shape} numbers, not {ours.shape}")
            count, longest = count + 1, max(longest, job.tokens)
            if reference.output in (Output.SCORES, Output.TOKENS):
                differences.append(float(np.abs(ours - theirs).max() / max(1.0, float(np.abs(theirs).max()))))
            else:
                cosines.append(_cosine(ours, theirs))
    if not count:
        raise NoReferenceError("it answers none of the known texts")
    least, most = _LIMITS.get(engine.info.dtype, _LIMITS["float32"])
    cosine = round(min(cosines), 7) if cosines else None
    difference = round(max(differences), 7) if differences else None
    agrees = (cosine is None or cosine >= least) and (difference is None or difference <= most)
    return LibraryComparison(reference.name, cosine, difference, count, longest, agrees=agrees)


def _probes(engine: Engine) -> Sequence[_Probe]:
    """Short texts, a long one, a blank one, one with a prompt; pairs of these where the model scores pairs."""
    info = engine.info
    long = _long_text(engine)
    if info.kind == Kind.RERANKER:
        pairs = (Pair(_SHORT[0], _SHORT[1]), Pair(_SHORT[2], _SHORT[0]), Pair(_SHORT[0], long), Pair(_SHORT[0], _EMPTY))
        return [_Probe(pairs, None, None)]
    plain = (*_SHORT, long, _BLANK)
    if info.kind == Kind.CLASSIFIER:
        return [_Probe((*plain, Pair(_SHORT[0], _SHORT[1])), None, None)]
    if info.kind in (Kind.TOKEN_CLASSIFIER, Kind.MULTI_VECTOR):
        return [_Probe(plain, None, None)]
    if info.has_routes:
        return [_Probe(plain, "document", None), _Probe(plain, "query", None)]
    named = next((name for name in info.prompts if engine.prompts.text(name)), None)
    prompted = _Probe(_SHORT[:2], named, None) if named else _Probe(_SHORT[:2], None, _PROMPT)
    return [_Probe(plain, None, None), prompted]


def _prompt(engine: Engine, probe: _Probe, reference: LibraryReference) -> dict[str, str]:
    """The keyword arguments for the prompt; sentence-transformers reads its default and its names from the files, and
    the route of a text from `task`.
    """
    if engine.info.has_routes:
        text = engine.prompts.text(probe.prompt_name)
        return {"task": probe.prompt_name or "", "prompt": text}
    if probe.prompt is not None:
        return {"prompt": probe.prompt}
    if reference.library == TRANSFORMERS:
        return {"prompt": engine.prompts.text(probe.prompt_name)}
    return {} if probe.prompt_name is None else {"prompt_name": probe.prompt_name}


def _long_text(engine: Engine) -> str:
    """A text of more than half of the maximal length, or of `_LONGEST_TEXT` tokens where that is less."""
    limit = engine.info.max_input_length
    wanted = min(int(limit * _OVER_HALF) + 1, _LONGEST_TEXT)
    words = PROBE_TEXTS[-1].split()
    per_word = max(1.0, len(engine.tokenizer.tokenize(PROBE_TEXTS[-1], False, "")) / len(words))
    count = int(wanted / per_word) + 1
    return " ".join(words[i % len(words)] for i in range(count))


def _result(job: Job, output: Output, width: int) -> Matrix:
    if output is Output.DENSE:
        return np.asarray(job.vectors[0])[None, :]
    if output is Output.SCORES:
        return np.asarray(job.scores[0])
    if output is Output.SPARSE:
        full = np.zeros((1, width), dtype=np.float32)
        row = job.sparse[0]
        if row is not None:
            full[0, row.indices] = row.values
        return full
    rows = (job.tokens_of if output is Output.TOKENS else job.multi_vectors)[0]
    return np.zeros((0, width), dtype=np.float32) if rows is None else rows


def _cosine(ours: Matrix, theirs: Matrix) -> float:
    """The mean over rows; 1 for rows that are equal, zeros too, and -1 for NaN."""
    if ours.size == 0 or np.array_equal(ours, theirs):
        return 1.0
    here, there = ours.astype(np.float64), theirs.astype(np.float64)
    norms = np.linalg.norm(here, axis=1) * np.linalg.norm(there, axis=1)
    cosines = (here * there).sum(axis=1) / np.where(norms == 0.0, 1.0, norms)
    return float(np.nan_to_num(cosines, nan=-1.0).mean())
