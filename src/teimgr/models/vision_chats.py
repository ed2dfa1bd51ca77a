"""Reads models with texts and images in one chat: Qwen3-VL-Embedding, Qwen3-VL-Reranker and GME; and EmbeddingGemma 2,
whose input is either a text or an image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models import chats
from teimgr.models.dual_encoders import need_pillow, numbers_of, processor_settings, setting_within
from teimgr.models.known_keys import KnownKeys
from teimgr.models.layout import CausalRerank, ChatTexts, DualEncoder, Layout, PatchSteps, ScoringConfig, SoftSteps
from teimgr.models.metadata import VISION_CHATS, ModelMetadata
from teimgr.models.pages import patch_steps
from teimgr.models.scoring import read_activation
from teimgr.spec import Kind

_EMBEDDING, _RERANKER = "qwen3-vl-embedding", "qwen3-vl-reranker"
_IMAGE, _VIDEO = "<|image_pad|>", "<|video_pad|>"
_BLOCK = ("<|vision_start|>", "<|vision_end|>")
# https://github.com/QwenLM/Qwen3-VL-Embedding, src/models: default instructions, pixels per image, tokens per input.
_INSTRUCTION = "Represent the user's input."
_RERANKS = "Given a search query, retrieve relevant candidates that answer the query."
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
_LEAST, _MOST = 4 * 32 * 32, 1800 * 32 * 32
_LONGEST = {Kind.EMBEDDING: 8192, Kind.RERANKER: 10_240}
# https://huggingface.co/Alibaba-NLP/gme-Qwen2-VL-2B-Instruct, modeling_gme_qwen2vl.py: the chat, with positions of a
# text, and the pixels of an image, which Qwen's tools resize before the image processor.
_GME_END = "<|im_end|>\n<|im_start|>assistant\n<|endoftext|>"
_GME = ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n", _GME_END)
_GME_INSTRUCTION = "You are a helpful assistant."
_SQUARE = 28 * 28  # pixels per token
_FIRST_PIXELS = 4 * _SQUARE, 16_384 * _SQUARE
# Pixels of chatting Qwen3-VL models; the authors' code replaces them for vectors and scores.
_OF_ANY = (65_536, 16_777_216)
_SOFT_KEYS = KnownKeys(
    honoured=frozenset(("patch_size", "max_soft_tokens", "pooling_kernel_size", "resample", "rescale_factor")),
    harmless=frozenset(("image_processor_type", "image_seq_length", "image_mean", "image_std", "processor_class"))
    | frozenset(("data_format", "input_data_format", "return_tensors", "size", "default_to_square")),
    only={
        **{"do_normalize": (False, None), "do_resize": (True,)},
        **dict.fromkeys(("do_rescale", "do_convert_rgb"), (True, None)),
    },
)
_SOFT_TOKENS = (70, 140, 280, 560, 1120)  # allowed by the library's processor
# Placeholders for the parts of a chat, of private-use characters.
_SYSTEM, _FIRST, _SECOND = "\ue000system\ue001", "\ue000first\ue001", "\ue000second\ue001"


def is_vision_chat(metadata: ModelMetadata) -> bool:
    """True if the model reads texts and images in one input."""
    return metadata.config["model_type"] in VISION_CHATS


def kind_of_vision_chat(metadata: ModelMetadata) -> Kind:
    """Embedding model or reranker, by its modules or its model card.

    Raises:
        ModelLoadFailed: it is neither, but writes texts.
    """
    if metadata.own.chat_limits is not None or metadata.config["model_type"] == "embedding_gemma2":
        return Kind.EMBEDDING
    if metadata.config["model_type"] == "qwen2_vl":
        raise ModelLoadFailed(
            "the model (qwen2_vl) reads images, which is not served; GME-Qwen2-VL is, by its code: "
            "modeling_gme_qwen2vl in auto_map of config.json"
        )
    if metadata.chain.has("LogitScore"):
        return Kind.RERANKER
    if metadata.chain.modules:
        return Kind.EMBEDDING
    for name, kind in ((_RERANKER, Kind.RERANKER), (_EMBEDDING, Kind.EMBEDDING)):
        if name in f"\n{metadata.card}".partition("\n# ")[2].partition("\n")[0]:
            return kind
    raise ModelLoadFailed(
        f"the model ({metadata.config['model_type']}) writes texts about images, which is not served; "
        "Qwen3-VL-Embedding and Qwen3-VL-Reranker are, by their modules.json or the heading of their model cards"
    )


def read_vision_chat(metadata: ModelMetadata, layout: Layout, pooling: str | None, *, render: bool) -> Layout:
    """The layout of a model of texts and images in one input; `layout` has the pooling where modules.json has one.

    Without `render` no chat template is run.

    Raises:
        InvalidConfig: `pooling` is not that of the last token.
        ModelLoadFailed: its files describe what is not served, or Pillow is missing.
    """
    need_pillow()
    if pooling not in (None, "last-token", "last_token", "lasttoken"):
        raise InvalidConfig(f"pooling = {pooling!r} is not for this model, whose vector is that of the last token")
    if layout.kind is Kind.EMBEDDING and (layout.poolings not in ((), ("last_token",)) or layout.projections):
        raise ModelLoadFailed(f"other modules than the pooling of the last token are not served here: {metadata.chain}")
    limits = metadata.own.chat_limits
    texts = _texts(metadata, layout, render=render) if limits is None else _gme_texts(metadata)
    steps, notes = _steps(metadata) if limits is None else (_gme_steps(metadata, *limits[:2]), ())
    longest = _LONGEST[layout.kind] if limits is None else limits[2]
    side = steps.unit
    while side * side < steps.least:
        side += steps.unit
    found = replace(
        layout,
        dual=DualEncoder(0, side, side, steps),
        chat=texts,
        type_ids=False,
        notes=(*layout.notes, *notes),
        max_length=min(layout.max_length, longest) if not metadata.chain.modules else layout.max_length,
    )
    if layout.kind is Kind.EMBEDDING:
        return replace(found, poolings=("last_token",))
    return replace(found, scoring=_scoring(metadata), prompts={}, default_prompt_name=None)


def read_embedding_gemma2(metadata: ModelMetadata, layout: Layout, pooling: str | None) -> Layout:
    """The layout of EmbeddingGemma 2: a text behind its prompt, or an image, between the tokens that frame any input.

    Raises:
        InvalidConfig: `pooling` is not the mean.
        ModelLoadFailed: its files describe what is not served, or Pillow is missing.
    """
    need_pillow()
    if pooling not in (None, "mean"):
        raise InvalidConfig(f"pooling = {pooling!r} is not for this model, whose vector is the mean of its tokens'")
    given, tokens = processor_settings(metadata.transformer_dir), metadata.tokens
    named = str(given.get("image_processor_type")).removesuffix("Fast").removesuffix("Pil")
    of_calls = (metadata.settings.get("processing_kwargs") or {}).get("image")
    if layout.poolings != ("mean",) or layout.projections or named != "Gemma4ImageProcessor" or of_calls:
        raise ModelLoadFailed(
            f"EmbeddingGemma 2 is served with the mean of its tokens and Gemma4ImageProcessor, not with {named} and "
            f"{metadata.chain}" + (f", processing_kwargs.image = {str(of_calls)[:80]}" if of_calls else "")
        )
    if unknown := _SOFT_KEYS.warnings("preprocessor_config.json", given):
        raise ModelLoadFailed(unknown[0])
    most, patch = given.get("max_soft_tokens", 280), setting_within(given, "patch_size", 16, (1, 256))
    image = [str(tokens.config.get(f"{role}_token") or "") for role in ("boi", "eoi", "image")]
    if most not in _SOFT_TOKENS or not all(image):
        raise ModelLoadFailed(f"the files have max_soft_tokens = {str(most)[:80]} and the tokens {image} of an image")
    unit = patch * setting_within(given, "pooling_kernel_size", 3, (1, 16))
    resample = setting_within(given, "resample", 3, (0, 5))
    numbers = numbers_of(given | {"do_normalize": False}, (), ())
    steps = SoftSteps(resample=resample, **numbers, unit=unit, patch=patch, least=1, most=most * unit**2)
    before, behind = tokens.frame()
    reserved = tuple(one for one in (image[2], "<|video|>", "<|audio|>") if tokens.id(one) is not None)
    texts = ChatTexts((before, "", behind), (image[0], image[1]), image[2], "", reserved, False, False, False)
    side = math.isqrt(most) * unit
    return replace(layout, dual=DualEncoder(0, side, side, steps), chat=texts, type_ids=False)


def _scoring(metadata: ModelMetadata) -> ScoringConfig:
    given: dict[str, Any] = {}
    if metadata.chain.modules:
        before, module, behind = metadata.chain.split_at("LogitScore")
        given = module.config()
        if len(before) != 1 or behind or given.get("module_input_name", "causal_logits") != "causal_logits":
            raise ModelLoadFailed(f"a reranker of this kind should end in its LogitScore, and is: {metadata.chain}")
    yes = given.get("true_token_id", metadata.tokens.id("yes"))
    no = given.get("false_token_id") if given else metadata.tokens.id("no")
    if isinstance(yes, bool) or not isinstance(yes, int) or not isinstance(no, int):
        raise ModelLoadFailed(f"the scores are those of two tokens, and the files have the ids {yes!r} and {no!r}")
    return ScoringConfig(("LABEL_0",), read_activation(metadata, 1), CausalRerank(yes, no))


def _texts(metadata: ModelMetadata, layout: Layout, *, render: bool) -> ChatTexts:
    is_reranker = layout.kind is Kind.RERANKER
    default = metadata.prompts.get(str(metadata.saved.get("default_prompt_name")), "")
    before, behind = metadata.tokens.frame()
    found: tuple[str, ...]
    if is_reranker and not metadata.chain.modules:
        head = f"<|im_start|>system\n{_JUDGE}<|im_end|>\n<|im_start|>user\n<Instruct>: "
        found, block = (head, "<Query>:", "\n<Document>:", "<|im_end|>\n<|im_start|>assistant\n"), _BLOCK
    elif render:
        found, block, own = _rendered(metadata, is_reranker)
        default = default or own
    else:
        found, block = ("",) * (4 if is_reranker else 3), _BLOCK
    return ChatTexts(
        pieces=(before + found[0], *found[1:-1], found[-1] + behind),
        image=block,
        image_token=_IMAGE,
        instruction=default or (_RERANKS if is_reranker else _INSTRUCTION),
        reserved=(_IMAGE, _VIDEO),
    )


def _gme_texts(metadata: ModelMetadata) -> ChatTexts:
    default = metadata.prompts.get(str(metadata.saved.get("default_prompt_name")), "") or _GME_INSTRUCTION
    return ChatTexts(_GME, _BLOCK, _IMAGE, default, (_IMAGE, _VIDEO), ends_instructions=False, has_grid=False)


def _gme_steps(metadata: ModelMetadata, least: int, most: int) -> PatchSteps:
    given = processor_settings(metadata.transformer_dir)
    bounds = {"min_pixels": least * _SQUARE, "max_pixels": most * _SQUARE}
    return replace(patch_steps(given | bounds, "GME"), first=_FIRST_PIXELS)


def _rendered(metadata: ModelMetadata, is_reranker: bool) -> tuple[tuple[str, ...], tuple[str, str], str]:
    """The pieces of the chat, what goes around an image, and the template's own instruction."""
    template, options = chats.read_template(metadata)
    options = {"add_generation_prompt": True} | options

    marks = (_SYSTEM, _FIRST, *((_SECOND,) if is_reranker else ()))

    def shown(texts: Sequence[str] = marks, *, with_system: bool = True, image: bool = False) -> str:
        roles = ("query", "document") if is_reranker else ("user",)
        messages = [_message("system", texts[0])] if with_system else []
        messages += [_message(role, text, image=image) for role, text in zip(roles, texts[1:], strict=True)]
        return chats.rendered(metadata, template, messages, options)

    pieces = _split(shown(), marks)
    if chats.strips_texts(shown, pieces):
        raise ModelLoadFailed("the chat template strips white space from texts, which is not served")
    with_image = _split(shown(image=True), marks)
    block = with_image[1].removeprefix(pieces[1])
    expected = (pieces[0], *(f"{piece}{block}" for piece in pieces[1:-1]), pieces[-1])
    around = block.split(_IMAGE)
    if len(around) != 2 or with_image != expected or not with_image[1].startswith(pieces[1]):
        raise ModelLoadFailed(f"the chat template has no place for an image before a text: it gives {block[:80]!r}")
    alone = shown(with_system=False)
    first, rest = alone.removeprefix(pieces[0]), pieces[1] + _FIRST
    own = first.partition(rest)[0] if alone.startswith(pieces[0]) and rest in first else ""
    return pieces, (around[0], around[1]), own


def _message(role: str, text: str, *, image: bool = False) -> Mapping[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image", "image": "image"}] if image else []
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}


def _split(text: str, marks: Sequence[str]) -> tuple[str, ...]:
    """What is around the marks, each of which is there once and in this order."""
    pieces = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            raise ModelLoadFailed("the chat template does not show the instruction and then each text once")
        pieces.append(before)
    return (*pieces, text)


def _steps(metadata: ModelMetadata) -> tuple[PatchSteps, tuple[str, ...]]:
    """What is done to an image, with the pixels of the files, and notes for the log."""
    given = dict(processor_settings(metadata.transformer_dir))
    of_calls = (metadata.settings.get("processing_kwargs") or {}).get("image") or {}
    if unknown := sorted(of_calls.keys() - {"min_pixels", "max_pixels", "size"}):
        raise ModelLoadFailed(f"processing_kwargs.image of sentence_bert_config.json has {unknown[0]}, not served")
    if "size" in of_calls:
        given = {name: value for name, value in given.items() if name not in ("min_pixels", "max_pixels")}
    steps = patch_steps(given | of_calls, "Qwen3-VL")
    if (steps.least, steps.most) != _OF_ANY or of_calls:
        return steps, ()
    note = f"images have {_LEAST} to {_MOST} pixels, as in its authors' code; the files have those of any Qwen3-VL"
    return replace(steps, least=_LEAST, most=_MOST), (note,)
