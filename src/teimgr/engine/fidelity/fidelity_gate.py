"""Chooses dtype and batching at load, each verified on known inputs.

The reference is the library's own float32 forward of one input at a time. Packed batching is used only if its results
are the same (T5 accepts a packed row and is silently wrong), and a faster dtype only if it is close enough.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from teimgr.engine import gpu
from teimgr.engine.attention import WIDEST_PROBED_WINDOW, WINDOW_KEYS, CannotPackError
from teimgr.engine.attention_kernel import DTYPES, attention_kernel
from teimgr.engine.backbone import Batching, prepacking_works
from teimgr.engine.batching.batch import Encoded, pack
from teimgr.engine.fidelity.dtype_speed import Preference, preference
from teimgr.engine.fidelity.reference_cache import KnownReference, ReferenceCache
from teimgr.engine.gpu_kernels import varlen_kernel
from teimgr.engine.heads import Rows
from teimgr.engine.job import Input, Output, Pair
from teimgr.engine.model import Model, name_of
from teimgr.engine.native_forward.program import CannotLowerError
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models.layout import Layout
from teimgr.spec import Kind

log = logging.getLogger(__name__)

# A dtype is accepted with at least these cosines to float32, and at most this difference of scores.
MIN_COSINE = 0.9995
_MAX_SCORE_DIFFERENCE = 1e-2
# A requested dtype is refused only if it is clearly broken; int8 deviates more.
_REQUESTED_COSINE = {torch.int8: 0.98}
MIN_REQUESTED_COSINE = 0.99
_REQUESTED_SCORE_DIFFERENCE = 0.1
_EXACT_DIFFERENCE = 2e-5  # of vectors of length 1
_EXACT_SCORE_DIFFERENCE = 1e-5
# Limit of a packed text's error, as a multiple of its error in 16 bits against float32: two rounded results differ by
# up to twice that error, and the cosine falls with its square.
_OF_ROUNDING = 4.0
_LONG_TEXT_WORDS = 300

# Known texts of one to many words in several scripts, to reveal wrong positions or masks. The longest have some 80
# tokens; `probe_texts` adds a longer one for models with a sliding window.
PROBE_TEXTS = (
    "yes",
    "The quick brown fox jumps over the lazy dog.",
    "What is deep learning?",
    "Zürich, Łódź and São Paulo: 3.14159 km² — “quoted”, hyphen-ated; (nested [brackets]).",
    "这是一个文本向量化的测试句子",
    "def add(a: int, b: int) -> int:\n    return a + b  # a comment",
    "A worker embeds texts of many lengths at once, and no text may notice its neighbours. " * 2,
    "Rain fell on the harbour all night, and by morning the boats lay in fog, their lamps still lit, "
    "while the first of the fishermen argued about the price of diesel and the colour of the sky. " * 2,
)

# The results for one input by output, float32 [rows, width] on the host: a vector, logits, all weights of a vocabulary,
# or rows per token.
ProbeResult = dict[Output, Tensor]


@dataclass(frozen=True, slots=True)
class Closeness:
    """The deviation of results from the reference.

    `mean_cosine` and `min_cosine` are over the inputs. The cosine of an input with several rows is their mean, since
    late interaction adds them up. Hidden states (TOKENS) do not count in either. `difference` is the largest between
    numbers of rows scaled to length 1. `score_difference` is the largest between logits, relative to the largest
    reference logit if that is above 1. Cosines are 1.0 for models with scores only; `score_difference` is 0.0 for
    models without.
    """

    mean_cosine: float
    min_cosine: float
    difference: float
    score_difference: float


def reference_of(model: Model, encoded: Encoded) -> ProbeResult:
    """Compute the results for one input through the library's own forward."""
    return _split(model.run_reference(encoded), model.widths, 1)[0]


def finite_reference(model: Model, inputs: Sequence[Encoded]) -> list[ProbeResult]:
    """Compute `reference_of` each input.

    Raises:
        ModelLoadFailed: the library's code raises an error, or gives vectors of a size that config.json does not
            declare, or numbers that are NaN or infinite, as for a broken checkpoint.
    """
    name = type(getattr(model.backbone, "owner", model.backbone)).__name__
    try:
        found = [reference_of(model, encoded) for encoded in inputs]
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        gpu.raise_if_the_devices(error, model.backbone.device)
        if gpu.is_gpu(model.backbone.device):  # may pass, as the code did not fail on the host
            raise
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ModelLoadFailed(f"{name} fails on known texts, so it is not served: {why}") from error
    for output, width in model.widths.items():
        given = {rows.shape[-1] for result in found for rows in (result.get(output),) if rows is not None}
        if given - {width}:
            raise ModelLoadFailed(f"{name} gives {max(given)} numbers ({output.value}), and its files declare {width}")
    if all(torch.isfinite(rows).all() for result in found for rows in result.values()):
        return found
    weight = model.broken_weight()
    why = "" if weight is None else f": the weight {weight} in its files has NaN or infinity"
    raise ModelLoadFailed(f"the model gives NaN or infinity for known texts in float32{why}")


def batched(model: Model, inputs: Sequence[Encoded]) -> list[ProbeResult]:
    batch = pack(inputs)
    found = _split(model.run(batch, model.outputs), model.widths, len(inputs))
    at = {source: place for place, source in enumerate(batch.order.tolist())}
    return [found[at[i]] for i in range(len(inputs))]


def compare(results: Sequence[ProbeResult], reference: Sequence[ProbeResult]) -> Closeness:
    """Measure the deviation; NaN counts as the largest possible.

    Raises:
        ValueError: an output has another number of rows than in the reference.
    """
    cosines: list[float] = [1.0]
    differences, score_differences = [0.0], [0.0]
    # Only token classifiers have TOKENS as their only output; it is their scores.
    scores = Output.TOKENS if all(known.keys() == {Output.TOKENS} for known in reference) else Output.SCORES
    largest_score = max((float(t[scores].abs().max()) for t in reference if scores in t), default=1.0)
    for ours, theirs in zip(results, reference, strict=True):
        for output, there in theirs.items():
            here = ours[output]
            if here.shape != there.shape:
                raise ValueError(f"{output.value}: {tuple(here.shape)} instead of {tuple(there.shape)}")
            if output is scores:
                score_differences.append(_largest(here - there) / max(1.0, largest_score))
            elif len(there):
                unit, true_unit = functional.normalize(here), functional.normalize(there)
                differences.append(_largest(unit - true_unit))
                if output is not Output.TOKENS:
                    cosine = functional.cosine_similarity(here.double(), there.double())
                    cosine = cosine.masked_fill((here == there).all(dim=1), 1.0)  # also for zero rows
                    cosines.append(float(cosine.nan_to_num(-1.0).mean()))
    known = cosines[1:] or cosines
    return Closeness(sum(known) / len(known), min(known), max(differences), max(score_differences))


def _largest(difference: Tensor) -> float:
    return float(difference.abs().nan_to_num(torch.inf).max())


def _split(rows: dict[Output, Rows], widths: dict[Output, int], inputs: int) -> list[ProbeResult]:
    return [{output: _result(of, i, widths[output]) for output, of in rows.items()} for i in range(inputs)]


def _result(rows: Rows, i: int, width: int) -> Tensor:
    if rows.offsets is None:
        return rows.values[i : i + 1].float().cpu()
    begin, stop = int(rows.offsets[i]), int(rows.offsets[i + 1])
    if rows.indices is None:
        return rows.values[begin:stop].float().cpu()
    weights = torch.zeros(1, width, device=rows.values.device)
    weights[0, rows.indices[begin:stop]] = rows.values[begin:stop].float()
    return weights.cpu()


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen dtype and batching, and how close they are to the float32 reference over the known inputs.

    `why` is the reason for the choice of `auto`, None if the dtype was requested; `refused` has the lowest cosine of
    each dtype that was tried and too far off.
    """

    dtype: torch.dtype
    batching: Batching
    closeness: Closeness
    why: Preference | None = None
    refused: dict[str, float] = field(default_factory=dict)


def probe_texts(config: dict[str, Any], max_length: int) -> tuple[str, ...]:
    """Return the probe texts for a model with this config.json.

    If its attention has a window smaller than `max_length` tokens, one text is longer than the window; windows wider
    than `WIDEST_PROBED_WINDOW` are not tested: `attention.unproved_window`.
    """
    windows = [config[key] for key in WINDOW_KEYS if isinstance(config.get(key), int)]
    window = max((w for w in windows if w < max_length and w <= WIDEST_PROBED_WINDOW), default=None)
    if window is None or config.get("use_sliding_window") is False:
        return PROBE_TEXTS
    words = PROBE_TEXTS[-1].split()
    wanted = max(_LONG_TEXT_WORDS, window + window // 4)  # a word is a token or more
    return (*PROBE_TEXTS, " ".join(words[i % len(words)] for i in range(wanted)))


def probe_inputs(layout: Layout, tokenizer: TextTokenizer) -> list[Encoded]:
    """Return the probe inputs of a model in its intended use: pairs for rerankers, both roles if there are two.

    Raises:
        ModelLoadFailed: the tokenizer fails on every one.
    """
    texts = probe_texts(layout.config, tokenizer.max_length)
    pairs: list[Input] = [Pair(text, texts[i - 3]) for i, text in enumerate(texts)]
    singles: list[Input] = list(texts)
    if layout.kind is Kind.RERANKER:
        probes = [(pairs, TokenizeOptions()), (singles[:2], TokenizeOptions())]
    elif layout.kind is Kind.CLASSIFIER:
        probes = [(singles, TokenizeOptions()), (pairs[:2], TokenizeOptions())]
    elif layout.late is not None or layout.query_table is not None:
        probes = [(singles, TokenizeOptions()), (singles[:4], TokenizeOptions(query=True))]
    else:
        probes = [(singles, TokenizeOptions())]
    results = [result for inputs, options in probes for result in tokenizer.encode(inputs, options)]
    encoded = [result for result in results if isinstance(result, Encoded)]
    if not encoded:
        raise ModelLoadFailed("the tokenizer fails on all known texts")
    return encoded


class Load(Protocol):
    """Loads the model, in the shortest way if `is_known`: it is then compared with results of an earlier load."""

    def __call__(self, *, is_known: bool = False) -> Model: ...


def choose(
    load: Load, wanted: torch.dtype | None, inputs: Sequence[Encoded], cache: ReferenceCache | None = None
) -> tuple[Model, Choice]:
    """Load a model and choose its dtype and batching; `wanted` None is the fastest dtype that is close enough.

    For CPUs, and for embedding tables on any device; for other models on a GPU see `gpu_choice`. `cache` may have the
    reference from an earlier load, otherwise it is stored there, but only for a model whose forward is native.

    Raises:
        ModelLoadFailed: no way of batching gives the library's own results.
        InvalidConfig: int8 is requested, and the model or the CPU cannot compute in it.
    """
    if cache is not None and (known := cache.read()) is not None:
        if (found := _choose_known(load(is_known=True), wanted, inputs, known)) is not None:
            return found
        cache.discard()
        gc.collect()
    model = load()
    reference = finite_reference(model, inputs)
    why, types = None, [wanted or torch.float32]
    if wanted is None:
        why = preference(model)
        types = list(dict.fromkeys([why.dtype, *types]))
    refused: dict[str, float] = {}
    is_fresh = True
    for dtype in types:
        for choose_way in (_choose_native, *([_choose_batching] if _has_other_ways(dtype, wanted) else [])):
            if not is_fresh:
                del model  # memory may have no room for two
                gc.collect()  # modules are in reference cycles
                model = load()
            try:
                choice = choose_way(model, dtype, inputs, reference, requested=wanted is not None)
            except CannotLowerError as refusal:  # the model is unchanged
                if dtype is torch.int8:
                    raise InvalidConfig(f"dtype int8 is not for this model or this machine: {refusal}") from refusal
                log.info("the forward is not native: %s", refusal)
                continue
            if isinstance(choice, Choice):
                if cache is not None and choice.batching is Batching.NATIVE:
                    cache.write(KnownReference(reference, None if wanted else choice.dtype, why, refused))
                return model, replace(choice, why=why, refused=refused)
            if choice is not None:
                refused[name_of(dtype)] = round(choice.min_cosine, 6)
            is_fresh = False
        log.warning("%s deviates too much from float32 for this model", dtype)
    raise ModelLoadFailed(f"the model's results in {types[-1]} differ from its own float32 results on known texts")


def _has_other_ways(dtype: torch.dtype, wanted: torch.dtype | None) -> bool:
    """True if torch's operators compute in a dtype that was requested, or that a layer was measured in."""
    if wanted is None:  # on some CPUs bfloat16 is fast only in the native forward
        return dtype is torch.float32 or prepacking_works(dtype)
    return dtype is not torch.int8


def _choose_known(
    model: Model, wanted: torch.dtype | None, inputs: Sequence[Encoded], known: KnownReference
) -> tuple[Model, Choice] | None:
    """Return the native forward, compared with the reference of an earlier load; None if it does not match that."""
    if len(known.results) != len(inputs) or any(result.keys() != model.outputs for result in known.results):
        return None
    if (dtype := wanted or known.dtype) is None:
        return None
    try:
        choice = _choose_native(model, dtype, inputs, known.results, requested=wanted is not None)
    except (CannotLowerError, ValueError) as refusal:
        log.info("the reference of an earlier load cannot be used: %s", refusal)
        return None
    return (model, replace(choice, why=known.why, refused=known.refused)) if isinstance(choice, Choice) else None


def _choose_native(
    model: Model, dtype: torch.dtype, inputs: Sequence[Encoded], reference: Sequence[ProbeResult], requested: bool
) -> Choice | Closeness:
    """Return the forward as one call of our library, or its deviation if its results do not match the reference.

    Raises:
        CannotLowerError: the model does not have one.
    """
    model.backbone.make_native(dtype)
    close = compare(batched(model, inputs), reference)
    if close_enough(close, dtype, requested):
        return Choice(dtype, Batching.NATIVE, close)
    log.warning("the native forward in %s is refused: %s", dtype, close)
    return close


def _choose_batching(
    model: Model, dtype: torch.dtype, inputs: Sequence[Encoded], reference: Sequence[ProbeResult], requested: bool
) -> Choice | Closeness | None:
    """Convert the model to `dtype`, then `first_batching`."""
    model.backbone.convert(dtype)
    return first_batching(model, dtype, inputs, reference, requested)


def first_batching(
    model: Model, dtype: torch.dtype, inputs: Sequence[Encoded], reference: Sequence[ProbeResult], requested: bool
) -> Choice | Closeness | None:
    """Return the first batching but NATIVE whose results in the model's `dtype` match the reference; otherwise the
    deviation of the last one that ran, None if none did.

    Raises:
        OutOfDeviceMemory, DeviceFailed: the device is at fault.
    """
    device, close = model.backbone.device, None
    varlen = [Batching.VARLEN] if _has_varlen_kernel(device, model.backbone.dtype) else []
    for batching in (*varlen, Batching.BY_RUN, Batching.EQUAL_LENGTH):
        try:
            model.backbone.use(batching)
            close = compare(batched(model, inputs), reference)
        except (CannotPackError, ValueError, TypeError, RuntimeError, LookupError, AttributeError) as refusal:
            gpu.raise_if_the_devices(refusal, device)
            why = f"is not for this model: {str(refusal).partition(chr(10))[0]}"
        else:
            if not close_enough(close, dtype, requested):
                why = f"in {dtype} is refused: {close}"
            elif not _keeps_texts_apart(model, dtype, inputs, reference):
                why = f"in {dtype} is refused: a text's results depend on the other texts of its batch"
            else:
                return Choice(dtype, batching, close)
        # On a GPU the next batching takes many more launches: layers times the different lengths of a batch.
        is_slow = gpu.is_gpu(device) and batching is Batching.VARLEN
        log.log(logging.WARNING if is_slow else logging.INFO, "%s batching %s", batching.value, why)
    return close


def _keeps_texts_apart(
    model: Model, dtype: torch.dtype, inputs: Sequence[Encoded], reference: Sequence[ProbeResult]
) -> bool:
    """True if inputs packed together have the results that each has alone, except for the rounding of a type of 16
    bits.

    The limits of such a type are wide enough to admit a little of a neighbour in each text, such as by convolutions
    over a packed row. The limits of float32 are not.
    """
    if dtype is torch.float32 or model.backbone.batching is Batching.EQUAL_LENGTH:
        return True
    alone = [batched(model, [one])[0] for one in inputs]
    rounding, apart = compare(alone, reference), compare(batched(model, inputs), alone)
    return (
        1.0 - apart.min_cosine <= _OF_ROUNDING * (1.0 - rounding.min_cosine) + _EXACT_SCORE_DIFFERENCE
        and apart.score_difference <= _OF_ROUNDING * rounding.score_difference + _EXACT_SCORE_DIFFERENCE
    )


def _has_varlen_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    if gpu.is_gpu(device):
        return dtype in varlen_kernel.DTYPES and varlen_kernel.varlen_kernel() is not None
    return attention_kernel() is not None and dtype in DTYPES


def close_enough(close: Closeness, dtype: torch.dtype, requested: bool) -> bool:
    """True if results in `dtype` are as close to the reference as the gate demands."""
    if dtype is torch.float32:
        return close.difference <= _EXACT_DIFFERENCE and close.score_difference <= _EXACT_SCORE_DIFFERENCE
    if requested:
        least = _REQUESTED_COSINE.get(dtype, MIN_REQUESTED_COSINE)
        return close.min_cosine >= least and close.score_difference <= _REQUESTED_SCORE_DIFFERENCE
    return close.min_cosine >= MIN_COSINE and close.score_difference <= _MAX_SCORE_DIFFERENCE
