"""Models of texts and images, as transformers and sentence-transformers save them: CLIP, SigLIP, ColPali, ColQwen2; and
pictures.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from PIL import Image
from tests.support.models.files import CORPUS, _byte_level, edit, pad_and_truncate, write, write_modules
from tokenizers import Tokenizer, processors

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


def build_colpali(folder: Path, seed: int = 0) -> Path:
    """Write a ColPali to `folder`, whose pictures have 16 patches."""
    tokenizer = _wrapped(_byte_level(["<pad>", "<bos>", "<eos>"], CORPUS), 512, bos_token="<bos>", eos_token="<eos>")
    pictures: Any = transformers.SiglipImageProcessorPil(size=_SQUARE)
    pictures.image_seq_length = 16
    processor: Any = transformers.ColPaliProcessor(pictures, tokenizer)
    seen = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    seen |= {"image_size": 32, "patch_size": 8, "vision_use_head": False, "projection_dim": 32}
    texts = _PART | {"head_dim": 8, "num_key_value_heads": 1, "vocab_size": len(tokenizer), "model_type": "gemma"}
    texts |= {"max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    whole = transformers.PaliGemmaConfig(
        vision_config=seen | {"model_type": "siglip_vision_model"},
        text_config=texts,
        image_token_id=processor.image_token_id,
        projection_dim=32,
        hidden_size=32,
    )
    config = transformers.ColPaliConfig(vlm_config=whole, embedding_dim=WIDTH)
    return _save_whole(transformers.ColPaliForRetrieval, config, processor, folder, seed)


def build_colqwen2(folder: Path, seed: int = 0) -> Path:
    """Write a ColQwen2 to `folder`, whose pictures have 4 to 16 tokens."""
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    library = _byte_level([*names, "<|video_pad|>"], CORPUS)
    ids = {name: library.token_to_id(name) for name in [*names, "<|video_pad|>"]}
    tokenizer = _wrapped(library, 512, "<|endoftext|>", eos_token="<|im_end|>")
    pictures = transformers.Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * 784, "longest_edge": 16 * 784})
    processor = transformers.ColQwen2Processor(pictures, tokenizer)
    seen = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    texts = _PART | {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    texts |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    texts |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    whole = transformers.Qwen2VLConfig(
        vision_config=seen,
        text_config=texts,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    config = transformers.ColQwen2Config(vlm_config=whole, embedding_dim=WIDTH)
    return _save_whole(transformers.ColQwen2ForRetrieval, config, processor, folder, seed)


def _wrapped(library: Tokenizer, longest: int, pad: str = "<pad>", **names: str) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, model_max_length=longest, pad_token=pad, **names
    )


def _save_whole(kind: Any, config: Any, processor: Any, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    kind(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of random pixels."""
    rows = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(rows)


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file."""
    written = io.BytesIO()
    image.save(written, form, **options)
    return written.getvalue()
