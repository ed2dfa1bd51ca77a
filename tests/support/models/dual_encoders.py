"""Models of texts and images, as transformers and sentence-transformers save them: CLIP, SigLIP; and pictures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from PIL import Image
from tests.support.models.files import CORPUS, _byte_level, edit, pad_and_truncate, write, write_modules
from tokenizers import processors

WIDTH = 24
SIDE = 32
_PART = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_SEEN = {"image_size": SIDE, "patch_size": 16}
_SQUARE = {"height": SIDE, "width": SIDE}
DualLayout = Literal["transformers", "legacy", "sentence-transformers"]


def build_clip(folder: Path, layout: DualLayout = "transformers", *, old_end: bool = False, seed: int = 0) -> Path:
    """Write a CLIP to `folder`; `legacy` is the layout with the folder 0_CLIPModel. `old_end`: the text half takes the
    highest id for the end of a text, as in CLIP's first configurations.
    """
    start, end = "<|startoftext|>", "<|endoftext|>"
    tokenizer = _byte_level([start], CORPUS)
    tokenizer.add_special_tokens([end])
    ids = {token: tokenizer.token_to_id(token) for token in (start, end)}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=list(ids.items())
    )
    vocabulary = tokenizer.get_vocab_size()
    named = {"bos_token_id": ids[start], "eos_token_id": 2 if old_end else ids[end], "pad_token_id": ids[end]}
    texts = _PART | named | {"vocab_size": vocabulary, "max_position_embeddings": 77}
    config = transformers.CLIPConfig(text_config=texts, vision_config=_PART | _SEEN, projection_dim=WIDTH)
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=_SQUARE)
    home = folder / "0_CLIPModel" if layout == "legacy" else folder
    _save(transformers.CLIPModel, config, seed, processor, home)
    _save_tokenizer(tokenizer, home, 77, bos_token=start, eos_token=end, unk_token=end, pad_token=end)
    if layout == "legacy":
        row = {"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}
        write(folder / "modules.json", [row])
    elif layout == "sentence-transformers":
        write_modules(folder, "sentence_transformers.base.modules.transformer.Transformer")
        methods = {
            name: {"method": f"get_{name}_features", "method_output_name": "pooler_output"}
            for name in ("text", "image")
        }
        settings = {"transformer_task": "feature-extraction", "modality_config": methods}
        write(folder / "sentence_bert_config.json", settings | {"module_output_name": "sentence_embedding"})
    return folder


def build_siglip(folder: Path, *, seed: int = 0) -> Path:
    """Write a SigLIP to `folder`, whose texts are padded to 64 tokens."""
    pad, end = "<pad>", "</s>"
    tokenizer = _byte_level([pad, end], CORPUS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    texts = _PART | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 64}
    config = transformers.SiglipConfig(text_config=texts, vision_config=_PART | _SEEN)
    _save(transformers.SiglipModel, config, seed, transformers.SiglipImageProcessorPil(size=_SQUARE), folder)
    _save_tokenizer(tokenizer, folder, 64, eos_token=end, pad_token=pad)
    edit(folder / "tokenizer_config.json", padding_side="right")
    return folder


def _save(kind: Any, config: Any, seed: int, processor: Any, folder: Path) -> None:
    torch.manual_seed(seed)
    kind(config).save_pretrained(folder)
    processor.save_pretrained(folder)


def _save_tokenizer(tokenizer: Any, folder: Path, longest: int, **names: Any) -> None:
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **names)
    wrapped.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of random pixels."""
    rows = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(rows)


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file."""
    written = io.BytesIO()
    image.save(written, form, **options)
    return written.getvalue()
