"""Loads a model: reads its files, chooses dtype and batching, and computes the limits of a batch."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from teimgr.engine import gpu
from teimgr.engine.backbone import Batching, StaticTable
from teimgr.engine.batching.queue import BatchLimits
from teimgr.engine.fidelity.dtype_speed import risk_of_fewer_bits
from teimgr.engine.fidelity.fidelity_gate import Choice, probe_inputs
from teimgr.engine.heads.scoring import check_activation
from teimgr.engine.job import Output
from teimgr.engine.model import Model, name_of
from teimgr.engine.model_choice import DTYPES, EngineOptions, choose_model, tokens_of_a_batch, with_queries
from teimgr.engine.runner import return_freed_memory
from teimgr.engine.space import SpaceDigest, precision_class
from teimgr.engine.text.tokenizer import Prompts, TextTokenizer
from teimgr.engine.text.tokenizer_config import contradictions
from teimgr.engine.text.tokenizer_library import is_panic, tokenizer_faults
from teimgr.errors import InvalidConfig, ModelLoadFailed, TeimgrError
from teimgr.models.directory import check_safetensors
from teimgr.models.gguf_head import HEADS, check_tensors
from teimgr.models.layout import Layout
from teimgr.models.reading import read_layout, refuse_warnings
from teimgr.spec import CPU_BATCH_TOKENS, CPU_TEMPORARY_BYTES, CUT_TEXTS, LoadedModel

__all__ = ["EngineOptions", "EngineParts", "load_parts"]

log = logging.getLogger(__name__)

# Temporary errors of a host: the same load may succeed later. Any other exception on a CPU would recur.
_MAY_PASS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ENOSPC)
_TABLE_BATCH_TOKENS = 8192  # of an embedding table: a batch costs more than its tokens do
_CPU_BULK_TOKENS_BESIDE_INTERACTIVE = 512
_MIN_BATCH_TOKENS = 256
# One thread computes a batch with fewer multiplications per layer: each operation would wake the other threads, which
# takes as long as they save. The native forward wakes them once.
_SERIAL_MULTIPLICATIONS = 113_000_000
_SERIAL_MULTIPLICATIONS_NATIVE = 14_000_000
# Limits of a bulk batch on a GPU while queries arrive: fewer tokens do not fill it, and a query waits for one batch.
_MIN_BULK_TOKENS_BESIDE_INTERACTIVE = 2048
_MAX_BULK_TOKENS_BESIDE_INTERACTIVE = 4096
# A `max_batch_tokens` below this and the model's length is refused unless `cuts_texts` is True.
_FEW_TOKENS = 512
_VECTORS = (Output.DENSE, Output.SPARSE, Output.MULTI_VECTOR)  # the first output of a model determines its dimension


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine."""

    layout: Layout
    tokenizer: TextTokenizer
    prompts: Prompts
    model: Model
    limits: BatchLimits
    serial_tokens: int
    info: LoadedModel


def load_parts(options: EngineOptions) -> EngineParts:
    """Load a model.

    Raises:
        ModelNotFound, InvalidConfig, ModelLoadFailed: trying again changes nothing.
        OutOfDeviceMemory: the model does not fit.
        DeviceFailed: the device, not the model, is at fault.
        OSError: the host lacks something that it may have later, such as descriptors.
    """
    try:
        with HEADS.kept():
            return _load(options)
    except TeimgrError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        device = torch.device(options.device)
        gpu.raise_if_the_devices(error, device)
        may_pass = gpu.is_gpu(device) or (isinstance(error, OSError) and error.errno in _MAY_PASS)
        if may_pass and not is_panic(error):
            raise
        log.exception("loading the model failed")
        first = str(error).strip().partition("\n")[0]
        raise ModelLoadFailed(f"the model cannot be loaded: {type(error).__name__}: {first}") from error


def _load(options: EngineOptions) -> EngineParts:
    began = time.monotonic()
    if options.dtype not in DTYPES:
        raise InvalidConfig(f"dtype {options.dtype!r} is not one of {', '.join(DTYPES)}")
    device = torch.device(options.device)
    _set_threads(device, options.threads)
    layout = _read(options)
    prompts = Prompts(layout, options.default_prompt_name, options.default_prompt)
    with tokenizer_faults(layout):
        tokenizer = _tokenizer(layout, options.max_batch_tokens)
        warnings = (*layout.warnings, *contradictions(layout, tokenizer.library))
    if options.strict_model_files:
        refuse_warnings(warnings)
    _check_room(layout, options, tokenizer.special_tokens + 1)
    warnings = (*_cut(layout, options), *warnings)
    for note in (*layout.notes, *warnings):
        log.warning("%s: %s", options.model_id, note)
    with tokenizer_faults(layout):
        inputs = probe_inputs(layout, tokenizer) if layout.reads_texts else []
    of_others = tuple(each for each in options.code if not each.startswith(options.model_id))
    space = SpaceDigest(layout, tokenizer, prompts, of_others, options.threads, options.spaces)
    space.begin()
    try:
        model, choice = choose_model(layout, device, options, inputs)
        warnings = (*_fewer_bits(model, choice, options), *warnings)
        tokens = tokens_of_a_batch(model, choice, device, inputs, options.max_batch_tokens, tokenizer.max_length)
        if layout.query_route is not None:
            model, choice, tokens = with_queries(model, choice, layout, device, options, tokenizer.of_queries, tokens)
    except RuntimeError as error:
        gpu.raise_if_the_devices(error, device)
        raise
    if layout.reads_files:
        is_native = _begin_pictures(model, tokenizer, choice.dtype, is_requested=options.dtype != "auto")
        if is_native and not layout.reads_texts:
            choice = replace(choice, batching=Batching.NATIVE)
    return_freed_memory()
    info = replace(
        _info(options, layout, model, choice, tokenizer.max_length, tokens),
        prompts=prompts.names,
        default_prompt_name=prompts.default_name,
        load_s=round(time.monotonic() - began, 3),
        warnings=warnings,
        space=space.result(),
    )
    log.info(
        "%s on %s in %s, %s (attention: %s), cosine to float32 on known texts: mean %.6f, lowest %.6f, "
        "scores off by %.1e; %.2f s to load",
        info.model_id,
        info.device,
        info.dtype,
        info.batching,
        info.attention,
        choice.closeness.mean_cosine,
        choice.closeness.min_cosine,
        choice.closeness.score_difference,
        info.load_s,
    )
    limits = _limits(replace(options, max_batch_tokens=tokens), model)
    return EngineParts(layout, tokenizer, prompts, model, limits, _serial_tokens(model), info)


def _set_threads(device: torch.device, threads: int) -> None:
    """Before any tensor operation, as a forked child has no thread pool yet.

    On a CPU one thread: the few probe inputs gain nothing from a second one, while on a busy machine every step would
    wait for it. For a GPU the host computes the reference of models of any size.
    """
    torch.set_num_threads(threads if gpu.is_gpu(device) else 1)
    if gpu.is_gpu(device):
        gpu.prepare_process(threads)
    else:
        os.environ.setdefault("RAYON_NUM_THREADS", str(threads))  # the tokenizer's threads


def _read(options: EngineOptions) -> Layout:
    """The model's files, as far as they are read without its weights."""
    layout = read_layout(
        options.path,
        options.pooling,
        kind=options.kind,
        trust_remote_code=options.trust_remote_code,
        strict=options.strict_model_files,
    )
    layout = layout.at_code_revision(options.code_revision)
    if options.safetensors_only:
        check_safetensors(layout.root, layout.weights)
        layout = replace(layout, safetensors_only=True)
    check_tensors(layout)
    if layout.scoring is not None:
        check_activation(layout.scoring.activation, len(layout.scoring.labels))
    return layout


def _info(
    options: EngineOptions, layout: Layout, model: Model, choice: Choice, longest: int, tokens: int
) -> LoadedModel:
    """What follows from the model; it reads `longest` tokens of a text and computes `tokens` of a batch."""
    served = model.outputs if layout.listwise is None else frozenset({Output.SCORES})
    width = next((model.widths[output] for output in _VECTORS if output in served), 0)
    cut = layout.dimensions if Output.DENSE in model.outputs else None
    return LoadedModel(
        model_id=options.model_id,
        model_sha=options.model_sha,
        dtype=name_of(choice.dtype),
        device=options.device,
        kind=layout.kind.value,
        pooling=layout.pooling,
        dimension=width if cut is None else min(cut, width),
        most_dimensions=0 if cut is None else width,
        max_input_length=longest,
        max_batch_tokens=tokens,
        batching="packed" if model.is_packed else "equal-length",
        outputs=tuple(output.value for output in Output if output in served),
        labels=() if layout.scoring is None else layout.scoring.labels,
        activation=None if layout.scoring is None else layout.scoring.activation,
        multi_vector_dimension=model.widths.get(Output.MULTI_VECTOR, 0),
        token_dimension=model.widths.get(Output.TOKENS, 0),
        commit=options.commit,
        attention=_attention(model, choice.batching),
        forward="native" if choice.batching is Batching.NATIVE else "library",
        mean_cosine=round(choice.closeness.mean_cosine, 6),
        min_cosine=round(choice.closeness.min_cosine, 6),
        code=options.code,
        listwise=layout.listwise is not None,
        has_routes=layout.has_routes,
        precision=precision_class(name_of(choice.dtype)),
        fused=layout.chat is not None and layout.chat.fuses,
        modalities=layout.modalities,
        dtype_reason=_reason(choice, options),
        dtype_candidates=_candidates(choice),
    )


def _tokenizer(layout: Layout, most: int) -> TextTokenizer:
    max_length = min(layout.max_length, most)
    if layout.sound is not None:
        from teimgr.engine.sounds.files import SoundTokenizer

        return SoundTokenizer(layout, max_length)
    if layout.dual is None:
        return TextTokenizer(layout, max_length, most if layout.query_route is not None else None)
    if layout.pages is not None:
        from teimgr.engine.images.pages import PageTokenizer

        return PageTokenizer(layout, max_length)
    if layout.chat is not None:
        from teimgr.engine.images.chat_texts import ChatTokenizer

        return ChatTokenizer(layout, max_length)
    if not layout.reads_texts:
        from teimgr.engine.images.model import ImageTokenizer

        return ImageTokenizer(layout, layout.max_length)
    from teimgr.engine.images.inputs import DualTokenizer  # here: imports Pillow

    return DualTokenizer(layout, max_length)


def _begin_pictures(model: Model, tokenizer: TextTokenizer, dtype: torch.dtype, *, is_requested: bool) -> bool:
    """True if the layers of its image half are native."""
    from teimgr.engine.images.inputs import FileTokenizer
    from teimgr.engine.images.model import PicturedModel

    assert isinstance(model, PicturedModel)
    assert isinstance(tokenizer, FileTokenizer)
    model.check_pictures(model.use_native_layers(dtype, is_requested=is_requested))
    model.give_way_within()
    tokenizer.use(model.decoder)
    model.decoder.start()
    return bool(model.native_layers)


def _reason(choice: Choice, options: EngineOptions) -> str:
    """Why the model has its dtype."""
    if choice.why is None:
        return f"dtype = {options.dtype}" + (" on this device" if options.dtype == "auto" else "")
    if choice.dtype is choice.why.dtype:
        return choice.why.reason
    return f"{choice.why.reason}; but its results in {name_of(choice.why.dtype)} are too far from those in float32"


def _candidates(choice: Choice) -> tuple[dict[str, Any], ...]:
    """The dtypes that `auto` considered: the lowest cosine to float32 if it was compared, the microseconds of a layer
    of 64 tokens on one thread if they were measured, and what became of it.
    """
    if choice.why is None:
        return ()
    chosen, preferred = name_of(choice.dtype), name_of(choice.why.dtype)
    outcomes = dict.fromkeys((*choice.refused, preferred), "too far off") | {"int8": "on request alone"}
    return tuple(
        {
            "dtype": name,
            "layer_us": layer_us,
            "min_cosine": round(choice.closeness.min_cosine, 6) if name == chosen else choice.refused.get(name),
            "outcome": "chosen" if name == chosen else outcomes.get(name, "slower" if layer_us else "not tried"),
        }
        for name, layer_us in choice.why.layer_us.items()
    )


def _attention(model: Model, batching: Batching) -> str:
    """`LoadedModel.attention`."""
    if isinstance(model.backbone, StaticTable):
        return "none"
    return {Batching.NATIVE: "varlen", Batching.EQUAL_LENGTH: "library"}.get(batching, batching.value)


def _check_room(layout: Layout, options: EngineOptions, least: int) -> None:
    """Check that a text of one token fits, which takes `least` tokens with the special ones."""
    limits = {"max_batch_tokens": options.max_batch_tokens, "max_seq_length of the model": layout.max_length}
    for key, tokens in limits.items():
        if tokens < least:
            raise InvalidConfig(
                f"{key} is {tokens}, too little for a text and the special tokens: it must be at least {least}"
            )


def _fewer_bits(model: Model, choice: Choice, options: EngineOptions) -> Iterator[str]:
    """The warning that vectors of some texts may be far off in a type of fewer bits, if they may be."""
    if choice.dtype is not torch.float32 and (risk := risk_of_fewer_bits(model)) is not None:
        note = f"{risk} in {name_of(choice.dtype)}: vectors of some texts may be far from those in float32"
        log.warning("%s: %s", options.model_id, note)
        yield note


def _cut(layout: Layout, options: EngineOptions) -> Iterator[str]:
    """The warning that texts are cut to a batch, if they are; raises InvalidConfig if that cannot be intended.

    Lists of documents are not cut: a prompt that is too long is refused by its call.
    """
    few, length = options.max_batch_tokens, layout.max_length
    if few >= length or layout.listwise is not None or not layout.reads_texts:
        return
    if options.cuts_texts is False:
        text = f"max_batch_tokens is {few}, the model reads {length} tokens, and --auto-truncate is false: longer texts"
        raise InvalidConfig(f"{text} could not be served. Set max_batch_tokens to {length}, or leave the flag out")
    if options.cuts_texts is None and few < _FEW_TOKENS:
        text = f"max_batch_tokens is {few}: each text would be cut to {few} tokens, and the model reads {length}"
        raise InvalidConfig(f'{text}. Set it to {length} or more, or allow it: extra_args = ["--auto-truncate"]')
    yield f"{CUT_TEXTS}the {few} tokens of max_batch_tokens; the model reads {length}"


def _limits(options: EngineOptions, model: Model) -> BatchLimits:
    if gpu.is_gpu(torch.device(options.device)):
        beside = max(_MIN_BULK_TOKENS_BESIDE_INTERACTIVE, options.max_batch_tokens // 4)
        beside = min(beside, _MAX_BULK_TOKENS_BESIDE_INTERACTIVE)
        return BatchLimits(options.max_batch_tokens, min(beside, options.max_batch_tokens), options.max_batch_requests)
    affordable = max(_MIN_BATCH_TOKENS, CPU_TEMPORARY_BYTES // (4 * _widths(model)[1]))
    few = _TABLE_BATCH_TOKENS if isinstance(model.backbone, StaticTable) else CPU_BATCH_TOKENS
    tokens = min(options.max_batch_tokens, few, affordable)
    beside = min(tokens, _CPU_BULK_TOKENS_BESIDE_INTERACTIVE)
    return BatchLimits(tokens, beside, options.max_batch_requests, own_threads=model.is_native)


def _serial_tokens(model: Model) -> int:
    """The largest batch to compute with one CPU thread, in tokens; any batch of an embedding table."""
    if isinstance(model.backbone, StaticTable):
        return sys.maxsize
    hidden, widest = _widths(model)
    few = _SERIAL_MULTIPLICATIONS_NATIVE if model.is_native else _SERIAL_MULTIPLICATIONS
    return few // (hidden * (4 * hidden + 2 * widest))


def _widths(model: Model) -> tuple[int, int]:
    """Return the widths of a layer's hidden states and of its widest rows, if the configuration names them."""
    config = model.backbone.config
    hidden = int(getattr(config, "hidden_size", 0) or 768)
    return hidden, int(getattr(config, "intermediate_size", 0) or 4 * hidden)
