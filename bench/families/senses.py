"""Models of texts and images: both are asked in the same jobs, and compared with transformers."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tests.fidelity.figures import Matrix
from tests.support.models.dual_encoders import (
    ChatLibrary,
    Gemma2Library,
    GmeLibrary,
    build_clip,
    build_colmodernvbert,
    build_colpali,
    build_colqwen2,
    build_dinov2,
    build_embedding_gemma2,
    build_gme,
    build_qwen3_vl_embedding,
    build_qwen3_vl_reranker,
    build_siglip,
    build_siglip2_naflex,
    build_siglip_of_pieces,
    file_of,
    noise,
)

from bench.families import files
from bench.families.row import TRANSFORMERS, Row
from teimgr.engine.engine import Engine
from teimgr.engine.job import Content, ContentPair, Input, Output, Pair
from teimgr.spec import Kind


def picture_files() -> list[bytes]:
    """Files of pictures: wide and high ones, with transparency, grey, and as photographs are saved."""
    alpha = noise(50, 40, 3)
    alpha.putalpha(noise(50, 40, 4).convert("L"))
    return [
        file_of(noise(40, 50)),
        file_of(noise(300, 21, 1), "JPEG"),
        file_of(noise(64, 64, 2), "WEBP"),
        file_of(noise(5, 90, 5).convert("L")),
        file_of(noise(33, 31, 6).convert("P"), "GIF"),
        file_of(alpha),
    ]


def library(folder: Path, inputs: Sequence[Any]) -> list[Matrix]:
    """The vectors of transformers, one input at a time: images through its processor with Pillow, SigLIP's texts padded
    and without a mask, SigLIP2 NaFlex's lower-cased too.
    """
    from transformers import AutoImageProcessor, AutoModel, PreTrainedTokenizerFast, SiglipTokenizer

    home = folder / "0_CLIPModel" if (folder / "0_CLIPModel").is_dir() else folder
    model: Any = AutoModel.from_pretrained(home, dtype=torch.float32).eval()
    kind: Any = SiglipTokenizer if (home / "spiece.model").is_file() else PreTrainedTokenizerFast
    tokenizer = kind.from_pretrained(home)
    processor: Any = AutoImageProcessor.from_pretrained(home, backend="pil")
    how: dict[str, Any] = {"truncation": True, "max_length": tokenizer.model_max_length, "return_tensors": "pt"}
    how["padding"] = "max_length" if model.config.model_type.startswith("siglip") else False
    is_lowered = model.config.model_type == "siglip2"
    found = []
    with torch.inference_mode():
        for one in inputs:
            if isinstance(one, bytes):
                image = Image.open(io.BytesIO(one))
                vector = model.get_image_features(**processor(images=[image], return_tensors="pt"))
            else:
                vector = model.get_text_features(
                    input_ids=tokenizer(one.lower() if is_lowered else one, **how)["input_ids"]
                )
            found.append(vector.pooler_output.numpy())
    return found


def image_library(folder: Path, inputs: Sequence[Any]) -> list[Matrix]:
    """The first token's last hidden state behind the last normalisation, by transformers, one image at a time."""
    from transformers import AutoImageProcessor, AutoModel

    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
    with torch.inference_mode():
        images = [processor(images=[Image.open(io.BytesIO(one))], return_tensors="pt") for one in inputs]
        return [model(**one).last_hidden_state[:, 0].numpy() for one in images]


def _image_row(key: str, hub: str, registers: int) -> Row:
    make = files.built(partial(build_dinov2, registers=registers))
    common: dict[str, Any] = {"by": TRANSFORMERS, "reference": image_library, "asked": {"normalize": False}}
    return Row(key, "DINOv2", hub, make, note="images alone", only_images=True, **common)


_SHORT_ENOUGH = 100
"""Tokens of a model that reads pages: the library cuts no text, so probes are within what it computes."""


def page_library(folder: Path, inputs: Sequence[Any]) -> list[Matrix]:
    """The vectors of each token of a query or of a page image, by transformers and its processor, one at a time."""
    import transformers

    names = {name.lower(): name for name in ("ColPali", "ColQwen2", "ColModernVBert")}
    name = names[transformers.AutoConfig.from_pretrained(folder).model_type]
    model: Any = getattr(transformers, f"{name}ForRetrieval").from_pretrained(folder, dtype=torch.float32).eval()
    processor: Any = getattr(transformers, f"{name}Processor").from_pretrained(folder)
    found = []
    with torch.inference_mode():
        for one in inputs:
            if isinstance(one, bytes):
                image = Image.open(io.BytesIO(one))
                if "A" in image.getbands():  # of which ColModernVBert's processor would show the hidden colours
                    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
                read = processor.process_images(images=[image])
            else:
                read = processor.process_queries(text=[one])
            found.append(model(**read).embeddings[0].numpy())
    return found


def _page_row(key: str, family: str, hub: str, build: Callable[[Path], Path]) -> Row:
    return Row(
        key,
        family,
        hub,
        files.built(build),
        Kind.MULTI_VECTOR,
        by=TRANSFORMERS,
        reference=page_library,
        output=Output.MULTI_VECTOR,
        longest=_SHORT_ENOUGH,
        note="queries and page images, a vector for each token",
        has_images=True,
    )


@dataclass(frozen=True, slots=True)
class Together:
    """A text with files of images as one input."""

    text: str
    files: tuple[bytes, ...] = ()


class Sides(NamedTuple):
    """A query and a document with files of images."""

    query: Together
    document: Together


def taken(engine: Engine, one: Any) -> Input:
    """An input of the catalogue as an engine takes it."""
    if isinstance(one, bytes):
        return engine.picture(one)
    if isinstance(one, Together):
        return Content(one.text, tuple(map(engine.picture, one.files)))
    if isinstance(one, Sides):
        return ContentPair(*(Content(side.text, tuple(map(engine.picture, side.files))) for side in one))
    given: Input = one
    return given


def _together(one: Any) -> Together:
    if isinstance(one, Together):
        return one
    return Together("", (one,)) if isinstance(one, bytes) else Together(one)


_LONGEST_PAIR = 1024
"""Tokens of a reranker of chats: the library cuts no pair, and the longest of the probes has some 560."""


def chat_vectors(library: type[ChatLibrary], folder: Path, inputs: Sequence[Any]) -> list[Matrix]:
    """The vectors, in the chat of the authors' code, one input at a time."""
    found = library(folder)
    return [found.vector(one.text, one.files)[None] for one in map(_together, inputs)]


def chat_scores(folder: Path, inputs: Sequence[Any]) -> list[Matrix]:
    """The probability of yes against no, in the chat of the authors' code, one pair at a time."""
    library = ChatLibrary(folder, "Qwen3VLForConditionalGeneration")
    sides = [map(_together, one) if isinstance(one, Pair) else one for one in inputs]
    return [np.array([library.score(*((side.text, side.files) for side in both))]) for both in sides]


def _chat_rows() -> Iterator[Row]:
    files_of_all = picture_files()
    both = [Together(f"a caption of {place}", (one,)) for place, one in enumerate(files_of_all)]
    both.append(Together("two of them", tuple(files_of_all[:2])))
    note = "texts, images, and both in one input"
    common: dict[str, Any] = {"by": TRANSFORMERS, "longest": _SHORT_ENOUGH, "note": note}
    asked: dict[str, Any]
    qwen, gme = "Qwen/Qwen3-VL-Embedding-2B, -8B", "Alibaba-NLP/gme-Qwen2-VL-2B-Instruct, -7B-Instruct"
    for key, family, named, build, library in (
        ("qwen3-vl-embedding", "Qwen3-VL", qwen, build_qwen3_vl_embedding, ChatLibrary),
        ("gme", "GME", gme, build_gme, GmeLibrary),
    ):
        asked = {"reference": partial(chat_vectors, library), "has_images": True, "also": both}
        for suffix, modules in (("", True), ("-bare", False)):
            hub = named + ("" if modules else " (without modules.json)")
            yield Row(f"{key}{suffix}", family, hub, files.built(partial(build, modules=modules)), **common, **asked)
    asked |= {"reference": partial(chat_vectors, Gemma2Library), "also": ()}
    common["note"] = "texts and images, each alone"
    make = files.built(build_embedding_gemma2)
    yield Row("embeddinggemma2", "EmbeddingGemma2", "google/embeddinggemma-2", make, **common, **asked)
    sides = [Sides(Together("what is a fox?"), one) for one in both]
    sides += [Sides(one, Together("The quick brown fox")) for one in both]
    sides.append(Sides(Together("", tuple(files_of_all[:1])), Together("", tuple(files_of_all[1:2]))))
    common["note"] = "queries and documents with texts, images, and both"
    for suffix, modules in (("", True), ("-bare", False)):
        hub = "Qwen/Qwen3-VL-Reranker-2B, -8B" + ("" if modules else " (without modules.json)")
        make = files.built(partial(build_qwen3_vl_reranker, modules=modules, longest=_LONGEST_PAIR))
        asked = {"kind": Kind.RERANKER, "reference": chat_scores, "output": Output.SCORES}
        asked |= {"takes_pairs": True, "also": sides}
        yield Row(f"rerank-qwen3-vl{suffix}", "Qwen3-VL", hub, make, **common, **asked)


def _row(key: str, family: str, hub: str, build: Callable[..., Any], longest: int, note: str = "") -> Row:
    def make(folder: Path) -> None:
        build(folder)

    common: dict[str, Any] = {"by": TRANSFORMERS, "reference": library, "asked": {"normalize": False}}
    return Row(key, family, hub, make, longest=longest, has_images=True, note=note, **common)


def _rows() -> Iterator[Row]:
    clip = "openai/clip-vit-base-patch32, clip-vit-large-patch14, laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    yield _row("clip", "CLIP", clip, build_clip, 77)
    old = "openai/clip-vit-base-patch16 (eos_token_id 2 in its config.json)"
    yield _row("clip-old-end", "CLIP", old, partial(build_clip, old_end=True), 77)
    legacy = "sentence-transformers/clip-ViT-B-32, clip-ViT-L-14 (0_CLIPModel)"
    yield _row("clip-sentence-transformers", "CLIP", legacy, partial(build_clip, layout="legacy"), 77)
    saved = "CLIP saved by sentence-transformers 6"
    yield _row("clip-saved-now", "CLIP", saved, partial(build_clip, layout="sentence-transformers"), 77)
    siglip = "google/siglip-base-patch16-224, siglip-so400m-patch14-384, siglip2-base-patch16-224 (fixed size)"
    yield _row("siglip", "SigLIP", siglip, build_siglip, 64)
    pieces = "SigLIP with spiece.model alone"
    yield _row("siglip-pieces", "SigLIP", pieces, build_siglip_of_pieces, 64, "the extra sentencepiece")
    flexible = "google/siglip2-base-patch16-naflex, siglip2-so400m-patch16-naflex"
    yield _row("siglip2-naflex", "SigLIP2", flexible, build_siglip2_naflex, 64)
    yield _image_row("dinov2", "facebook/dinov2-small, -base, -large, -giant", 0)
    yield _image_row("dinov2-registers", "facebook/dinov2-with-registers-small, -base, -large, -giant", 4)
    yield _page_row("colpali", "ColPali", "vidore/colpali-v1.2-hf, colpali-v1.3-hf", build_colpali)
    yield _page_row("colqwen2", "ColQwen2", "vidore/colqwen2-v1.0-hf", build_colqwen2)
    yield _page_row("colmodernvbert", "ColModernVBert", "ModernVBERT/colmodernvbert-merged", build_colmodernvbert)
    yield from _chat_rows()


ROWS = tuple(_rows())
