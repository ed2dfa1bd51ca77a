"""The choices made at load, each by trying it: numeric type and way of batching.

The truth is the library's own float32 forward of one input at a time. Packed batching is taken only where it gives the
same results (T5 accepts a packed row and is silently wrong), and a faster type only where it stays close enough;
`fingerprint` says what is compared, and how.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine.attention import CannotPackError
from teimgr.engine.backbone import Batching, StaticTable
from teimgr.engine.batch import Encoded, pack
from teimgr.engine.heads import Rows
from teimgr.engine.job import Input, Output, Pair
from teimgr.engine.linears import PackedLinear, prepacking_works
from teimgr.engine.model import Model
from teimgr.engine.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.errors import ModelLoadFailed
from teimgr.model_files import Kind, Layout

# Of one input, float32 [rows, width] for every output: a vector, the logits, all weights of a vocabulary, or a row for
# each token.
Fingerprint = dict[Output, Tensor]


@dataclass(frozen=True, slots=True)
class Closeness:
    """How far results are from the truth.

    `mean_cosine` and `min_cosine` are over the inputs; that of an input with several rows is their mean, since what
    is made of them adds them up. Hidden states are left out of both: what is made of them counts. `difference` is the
    largest of any two numbers of rows that are scaled to length 1, `score_difference` that of logits, in units of the
    largest true one where that is above 1.
    """

    mean_cosine: float
    min_cosine: float
    difference: float
    score_difference: float


def plainly(model: Model, encoded: Encoded) -> Fingerprint:
    """Of one input, through the library's own forward."""
    return _taken_apart(model.run_reference(encoded), model.widths, 1)[0]


def together(model: Model, inputs: Sequence[Encoded]) -> list[Fingerprint]:
    """Of all inputs, in one batch."""
    batch = pack(inputs)
    found = _taken_apart(model.run(batch, model.outputs), model.widths, len(inputs))
    at = {source: place for place, source in enumerate(batch.order.tolist())}
    return [found[at[i]] for i in range(len(inputs))]


def compare(results: Sequence[Fingerprint], truth: Sequence[Fingerprint]) -> Closeness:
    """Results that are no numbers are as far off as can be.

    Raises:
        ValueError: an output has another number of rows than it truly has.
    """
    cosines: list[float] = [1.0]
    differences, score_differences = [0.0], [0.0]
    largest_score = max((float(t[Output.SCORES].abs().max()) for t in truth if Output.SCORES in t), default=1.0)
    for ours, theirs in zip(results, truth, strict=True):
        for output, there in theirs.items():
            here = ours[output]
            if here.shape != there.shape:
                raise ValueError(f"{output.value}: {tuple(here.shape)} instead of {tuple(there.shape)}")
            if output is Output.SCORES:
                score_differences.append(_largest(here - there) / max(1.0, largest_score))
            elif len(there):
                unit, true_unit = functional.normalize(here), functional.normalize(there)
                differences.append(_largest(unit - true_unit))
                if output is not Output.TOKENS:
                    cosine = functional.cosine_similarity(here.double(), there.double())
                    cosine = cosine.masked_fill((here == there).all(dim=1), 1.0)  # two of zeros, too
                    cosines.append(float(cosine.nan_to_num(-1.0).mean()))
    known = cosines[1:] or cosines
    return Closeness(sum(known) / len(known), min(known), max(differences), max(score_differences))


def _largest(difference: Tensor) -> float:
    return float(difference.abs().nan_to_num(torch.inf).max())


def _taken_apart(rows: dict[Output, Rows], widths: dict[Output, int], inputs: int) -> list[Fingerprint]:
    """A batch's results by input, in the batch's order."""
    return [{output: _one(of, i, widths[output]) for output, of in rows.items()} for i in range(inputs)]


def _one(rows: Rows, i: int, width: int) -> Tensor:
    if rows.offsets is None:
        return rows.values[i : i + 1].float()
    begin, stop = int(rows.offsets[i]), int(rows.offsets[i + 1])
    if rows.indices is None:
        return rows.values[begin:stop].float()
    weights = torch.zeros(1, width, device=rows.values.device)
    weights[0, rows.indices[begin:stop]] = rows.values[begin:stop].float()
    return weights


log = logging.getLogger(__name__)

MIN_COSINE = 0.9995
_MAX_SCORE_DIFFERENCE = 1e-2
_ASKED_FOR_COSINE = 0.99  # a type that the user chose is served unless it is plainly broken
_ASKED_FOR_SCORE_DIFFERENCE = 0.1
_EXACT_DIFFERENCE = 2e-5  # of vectors of length 1
_EXACT_SCORE_DIFFERENCE = 1e-5
_TRIAL_TOKENS = 64
_TRIALS = 8
_WORTH_A_CHANGE = 1.15
_LONG_TEXT_WORDS = 300
_WIDEST_PROBED_WINDOW = 1024  # tokens; a text past a wider one would cost seconds of every load on a CPU
_WINDOW_KEYS = ("sliding_window", "local_attention")

# Lengths from one word to many, in several scripts: a wrong position or mask shows in one of them. The longest have
# some 80 tokens; a model whose window could be wrong gets a longer one, by `probe_texts`.
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


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen and how close it is to the float32 truth over the known inputs.

    Cosines are 1.0 where a model has scores only; `score_difference` is 0.0 where it has none.
    """

    dtype: torch.dtype
    batching: Batching
    mean_cosine: float
    min_cosine: float
    score_difference: float


def probe_texts(config: dict[str, Any], max_length: int) -> tuple[str, ...]:
    """The known texts for a model with this config.json.

    Where its attention has a window smaller than `max_length` tokens, one text is longer than the window; windows wider
    than `_WIDEST_PROBED_WINDOW` are believed untried.
    """
    windows = [config[key] for key in _WINDOW_KEYS if isinstance(config.get(key), int)]
    window = max((w for w in windows if w < max_length and w <= _WIDEST_PROBED_WINDOW), default=None)
    if window is None or config.get("use_sliding_window") is False:
        return PROBE_TEXTS
    words = PROBE_TEXTS[-1].split()
    wanted = max(_LONG_TEXT_WORDS, window + window // 4)  # a word is a token or more
    return (*PROBE_TEXTS, " ".join(words[i % len(words)] for i in range(wanted)))


def probe_inputs(layout: Layout, tokenizer: TextTokenizer) -> list[Encoded]:
    """The known inputs of a model, as it will be used: pairs where it reads pairs, both roles where it has roles.

    Raises:
        ModelLoadFailed: the tokenizer fails on every one.
    """
    texts = probe_texts(layout.config, tokenizer.max_length)
    pairs: list[Input] = [Pair(text, texts[i - 3]) for i, text in enumerate(texts)]
    singles: list[Input] = list(texts)
    if layout.kind is Kind.RERANKER:
        asked = [(pairs, TokenizeOptions()), (singles[:2], TokenizeOptions())]
    elif layout.kind is Kind.CLASSIFIER:
        asked = [(singles, TokenizeOptions()), (pairs[:2], TokenizeOptions())]
    elif layout.late is not None:
        asked = [(singles, TokenizeOptions()), (singles[:4], TokenizeOptions(query=True))]
    else:
        asked = [(singles, TokenizeOptions())]
    results = [result for inputs, reading in asked for result in tokenizer.encode(inputs, reading)]
    encoded = [result for result in results if isinstance(result, Encoded)]
    if not encoded:
        raise ModelLoadFailed("the tokenizer fails on every known text")
    return encoded


def choose(load: Callable[[], Model], wanted: torch.dtype | None, inputs: Sequence[Encoded]) -> tuple[Model, Choice]:
    """Load a model and settle its type and batching; `wanted` None asks for the fastest type that is close enough.

    Raises:
        ModelLoadFailed: no way of batching gives the library's own results.
    """
    model = load()
    device = model.backbone.device
    truth = [plainly(model, encoded) for encoded in inputs]
    types = _from(_fastest(model), device) if wanted is None else [wanted]
    for i, dtype in enumerate(types):
        if i > 0:
            log.warning("%s strays too far from float32 for this model; %s is tried", types[i - 1], dtype)
            del model  # before the next is loaded: the device may have no room for two
            _return_memory(device)
            model = load()
        model.backbone.convert(dtype)
        if (choice := _settle(model, dtype, inputs, truth, asked_for=wanted is not None)) is not None:
            return model, choice
    raise ModelLoadFailed(f"the model's results in {types[-1]} differ from its own float32 results on known texts")


def _from(fastest: torch.dtype, device: torch.device) -> list[torch.dtype]:
    """The types to try, best first. On a GPU float16 is as fast as bfloat16, and finer."""
    second = [torch.float16] if device.type == "cuda" else []
    return list(dict.fromkeys([fastest, *(second if fastest is not torch.float32 else []), torch.float32]))


def _return_memory(device: torch.device) -> None:
    gc.collect()  # modules hold one another in circles
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _settle(
    model: Model, dtype: torch.dtype, inputs: Sequence[Encoded], truth: Sequence[Fingerprint], asked_for: bool
) -> Choice | None:
    """The first way of batching whose results are the truth's; None where none is."""
    for batching in _ways(model):
        try:
            model.backbone.use(batching)
            close = compare(together(model, inputs), truth)
        except torch.OutOfMemoryError:
            raise
        except (CannotPackError, ValueError, TypeError, RuntimeError, NotImplementedError) as refusal:
            log.info("%s batching is not for this model: %s", batching.value, _first_line(refusal))
            continue
        if _close_enough(close, dtype, asked_for):
            return Choice(dtype, batching, close.mean_cosine, close.min_cosine, close.score_difference)
        log.info("%s batching in %s refused: %s", batching.value, dtype, close)
    return None


def _ways(model: Model) -> list[Batching]:
    packed = model.backbone
    varlen = packed.device.type == "cuda" and packed.dtype in (torch.float16, torch.bfloat16)
    return [*([Batching.VARLEN] if varlen else []), Batching.BY_RUN, Batching.EQUAL_LENGTH]


def _close_enough(close: Closeness, dtype: torch.dtype, asked_for: bool) -> bool:
    if dtype is torch.float32:
        return close.difference <= _EXACT_DIFFERENCE and close.score_difference <= _EXACT_SCORE_DIFFERENCE
    if asked_for:
        return close.min_cosine >= _ASKED_FOR_COSINE and close.score_difference <= _ASKED_FOR_SCORE_DIFFERENCE
    return close.min_cosine >= MIN_COSINE and close.score_difference <= _MAX_SCORE_DIFFERENCE


def _fastest(model: Model) -> torch.dtype:
    """The type worth trying: a 16-bit one on a GPU, and on a CPU bfloat16 where layers run faster in it."""
    transformer = model.backbone
    if isinstance(transformer, StaticTable):  # looking up costs nothing
        return torch.float32
    if transformer.device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if not prepacking_works(torch.bfloat16):
        return torch.float32
    slow, fast = _time_layers(int(getattr(transformer.config, "hidden_size", 512)))
    log.debug("a layer takes %.0f µs in float32 and %.0f µs in bfloat16", slow * 1e6, fast * 1e6)
    return torch.bfloat16 if fast * _WORTH_A_CHANGE < slow else torch.float32


@torch.inference_mode()
def _time_layers(hidden: int) -> tuple[float, float]:
    """Seconds for a feed-forward layer of this width in float32 and in bfloat16.

    Taken in turns and as the best of several, so that a busy machine disturbs neither or both.
    """
    types = (torch.float32, torch.bfloat16)
    linear = nn.Linear(hidden, 4 * hidden)
    trials = [(PackedLinear(linear, dtype), torch.zeros(_TRIAL_TOKENS, hidden, dtype=dtype)) for dtype in types]
    best = [float("inf"), float("inf")]
    for _ in range(_TRIALS):
        for i, (layer, x) in enumerate(trials):
            began = time.perf_counter()
            layer(x)
            best[i] = min(best[i], time.perf_counter() - began)
    return best[0], best[1]


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
