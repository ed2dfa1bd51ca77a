"""Models of texts and images, as transformers and sentence-transformers save them: CLIP, SigLIP, ColPali, ColQwen2,
ColModernVBert, Qwen3-VL-Embedding and -Reranker, GME, EmbeddingGemma 2; DINOv2, of images alone; CLAP, of texts and
sounds; what some of them compute; and pictures and sounds.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import soundfile
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.support.models.files import (
    CORPUS,
    _byte_level,
    clip,
    edit,
    pad_and_truncate,
    read,
    siglip,
    write,
    write_modules,
)
from tokenizers import Tokenizer, processors

WIDTH = 24
SIDE = 32
RATE = 48_000
_PART = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_SEEN = {"image_size": SIDE, "patch_size": 16}
_SQUARE = {"height": SIDE, "width": SIDE}
DualLayout = Literal["transformers", "legacy", "sentence-transformers"]


def build_clip(
    folder: Path,
    layout: DualLayout = "transformers",
    *,
    old_end: bool = False,
    own_words: bool = False,
    seed: int = 0,
) -> Path:
    """Write a CLIP to `folder`; `legacy` is the layout with the folder 0_CLIPModel. `old_end`: the text half takes the
    highest id for the end of a text, as in CLIP's first configurations. `own_words`: the tokenizer has the steps of
    CLIP's own; without them it is that of the golden vectors.
    """
    start, end = "<|startoftext|>", "<|endoftext|>"
    tokenizer = clip() if own_words else _byte_level([start], CORPUS)
    if not own_words:
        tokenizer.add_special_tokens([end])
    ids = {token: tokenizer.token_to_id(token) for token in (start, end)}
    if not own_words:
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
    tokenizer = siglip()
    texts = _PART | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 64}
    config = transformers.SiglipConfig(text_config=texts, vision_config=_PART | _SEEN)
    _save(transformers.SiglipModel, config, seed, transformers.SiglipImageProcessorPil(size=_SQUARE), folder)
    _save_tokenizer(tokenizer, folder, 64, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    edit(folder / "tokenizer_config.json", padding_side="right")
    return folder


def build_siglip_of_pieces(folder: Path, **options: Any) -> Any:
    """Write a SigLIP without tokenizer.json, as SiglipTokenizer saves its files; gives that tokenizer. `options` are
    those of SentencePiece's training.
    """
    from sentencepiece import SentencePieceTrainer

    build_siglip(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "vocab_size": 400}
    how = {"model_type": "unigram", "hard_vocab_limit": False, "minloglevel": 2}
    pieces = io.BytesIO()
    SentencePieceTrainer.train(sentence_iterator=iter(CORPUS * 20), model_writer=pieces, **ids | how | options)
    (folder / "spiece.model").write_bytes(pieces.getvalue())
    slow = transformers.SiglipTokenizer(str(folder / "spiece.model"))
    slow.save_pretrained(folder)
    texts = _PART | {"vocab_size": slow.vocab_size, "max_position_embeddings": 64}
    config = transformers.SiglipConfig(text_config=texts, vision_config=_PART | _SEEN)
    _save(transformers.SiglipModel, config, 0, transformers.SiglipImageProcessorPil(size=_SQUARE), folder)
    return slow


def build_siglip2_naflex(folder: Path, *, patches: int = 20, seed: int = 0) -> Path:
    """Write a SigLIP2 NaFlex to `folder`, which reads at most so many patches of an image."""
    pad, end = "<pad>", "<eos>"
    tokenizer = _byte_level([pad, end], CORPUS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    texts = _PART | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 64}
    config = transformers.Siglip2Config(text_config=texts, vision_config=_PART | {"patch_size": 16, "num_patches": 16})
    processor = transformers.Siglip2ImageProcessorPil(max_num_patches=patches, do_convert_rgb=True)
    _save(transformers.Siglip2Model, config, seed, processor, folder)
    _save_tokenizer(tokenizer, folder, 64, eos_token=end, pad_token=pad)
    edit(folder / "tokenizer_config.json", padding_side="right")
    return folder


def build_dinov2(folder: Path, *, registers: int = 0, trained: int = 56, seed: int = 0) -> Path:
    """Write a DINOv2 to `folder`, which reads 42 x 42 pixels and was `trained` on others."""
    config: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"image_size": trained, "patch_size": 14, "mlp_ratio": 2}
    kind: Any = transformers.Dinov2Model
    own: Any = transformers.Dinov2Config(**config)
    if registers:
        kind = transformers.Dinov2WithRegistersModel
        own = transformers.Dinov2WithRegistersConfig(**config, num_register_tokens=registers)
    processor = transformers.BitImageProcessorPil(
        size={"shortest_edge": 48},
        crop_size={"height": 42, "width": 42},
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    )
    _save(kind, own, seed, processor, folder)
    weights, chance = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    scales = {name: torch.rand(one.shape, generator=chance) for name, one in weights.items() if "lambda" in name}
    save_file(weights | scales, folder / "model.safetensors", {"format": "pt"})  # its layers scale, not by 1
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
    texts = _PART | {"head_dim": 16, "num_key_value_heads": 1, "vocab_size": len(tokenizer), "model_type": "gemma"}
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


def _vision_ids(ids: Mapping[str, int]) -> dict[str, int]:
    """The ids of Qwen's tokens of pictures, by the keys of a configuration."""
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{key}_token_id": ids[f"<|{name}|>"] for key, name in names.items()}


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
        **_vision_ids(ids),
    )
    config = transformers.ColQwen2Config(vlm_config=whole, embedding_dim=WIDTH)
    return _save_whole(transformers.ColQwen2ForRetrieval, config, processor, folder, seed)


def build_colmodernvbert(folder: Path, seed: int = 0) -> Path:
    """Write a ColModernVBert to `folder`, whose pictures have 1 to 16 squares of 64 x 64 pixels, each of 4 tokens."""
    names = ["[CLS]", "[SEP]", "[PAD]", "<|begin_of_text|>", "<image>", "<fake_token_around_image>", "<global-img>"]
    names += ["<end_of_utterance>", *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))]
    library = _byte_level(names, CORPUS, 500)
    ids = {name: library.token_to_id(name) for name in names}
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, ids[name]) for name in ("[CLS]", "[SEP]")]
    )
    tokenizer = _wrapped(library, 512, "[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    pictures: Any = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 256}, max_image_size={"longest_edge": 64}
    )
    processor: Any = transformers.ColModernVBertProcessor(pictures, tokenizer, image_seq_len=4)
    texts = _PART | {"model_type": "modernbert", "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    texts |= {"local_attention": 16, "global_attn_every_n_layers": 2, "pad_token_id": ids["[PAD]"]}
    texts |= dict.fromkeys(("bos_token_id", "cls_token_id"), ids["[CLS]"])
    texts |= dict.fromkeys(("eos_token_id", "sep_token_id"), ids["[SEP]"])
    seen = _PART | {"image_size": 64, "patch_size": 16, "model_type": "siglip_vision_model"}
    whole = transformers.ModernVBertConfig(
        text_config=texts, vision_config=seen, image_token_id=processor.image_token_id, pixel_shuffle_factor=2
    )
    config = transformers.ColModernVBertConfig(vlm_config=whole, embedding_dim=WIDTH)
    return _save_whole(transformers.ColModernVBertForRetrieval, config, processor, folder, seed)


def _wrapped(library: Tokenizer, longest: int, pad: str = "<pad>", **names: str) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, model_max_length=longest, pad_token=pad, **names
    )


def _save_whole(kind: Any, config: Any, processor: Any, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    kind(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


INSTRUCTION = "Represent the user's input."
LEAST, MOST = 4 * 32 * 32, 16 * 32 * 32
_NAMES = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<|video_pad|>", "yes", "no"),
)
# Of the same results as Qwen3-VL's own for messages of texts and images.
_CONTENT = (
    "{%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}"
)
CHAT = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    + _CONTENT
    + "{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
CANDIDATES = "Given a search query, retrieve relevant candidates that answer the query."
RERANK = (
    "{{ '<|im_start|>system\\n" + JUDGE + "<|im_end|>\\n<|im_start|>user\\n<Instruct>: ' }}"
    "{%- set told = messages | selectattr('role', 'equalto', 'system') | list %}"
    "{%- if told %}{%- for message in told %}"
    + _CONTENT
    + "{%- endfor %}{%- else %}{{ '"
    + CANDIDATES
    + "' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'query' %}{{ '<Query>:' }}" + _CONTENT + "{%- endif %}"
    "{%- if message.role == 'document' %}{{ '\\n<Document>:' }}" + _CONTENT + "{%- endif %}{%- endfor %}"
    "{{ '<|im_end|>\\n' }}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
_PACKAGE = "sentence_transformers"


def build_qwen3_vl_embedding(
    folder: Path, seed: int = 0, *, modules: bool = True, ends: bool = False, prompts: dict[str, str] | None = None
) -> Path:
    """Write a Qwen3-VL-Embedding to `folder`, whose images have 4 to 16 tokens.

    Without `modules` it is as its authors saved it, with a model card; with `ends` the tokenizer ends each text by a
    token.
    """
    _save_chat(folder, seed, ends=ends)
    (folder / "chat_template.jinja").write_text(CHAT)
    if not modules:
        (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Qwen3-VL-Embedding-2B\n")
        return folder
    write_modules(
        folder,
        f"{_PACKAGE}.base.modules.transformer.Transformer",
        f"{_PACKAGE}.sentence_transformer.modules.pooling.Pooling",
        f"{_PACKAGE}.sentence_transformer.modules.normalize.Normalize",
    )
    write(folder / "1_Pooling" / "config.json", {"embedding_dimension": 32, "pooling_mode": "lasttoken"})
    write(folder / "2_Normalize" / "config.json", {})
    _settings(folder, "last_hidden_state", "token_embeddings", {"add_generation_prompt": True})
    saved = {
        "prompts": prompts or {"default": INSTRUCTION},
        "default_prompt_name": next(iter(prompts or {"default": 0})),
    }
    write(folder / "config_sentence_transformers.json", {"model_type": "SentenceTransformer", **saved})
    return folder


def build_qwen3_vl_reranker(folder: Path, seed: int = 0, *, modules: bool = True, longest: int = 512) -> Path:
    """Write a Qwen3-VL-Reranker to `folder`; without `modules` it is as its authors saved it, with a model card."""
    ids = _save_chat(folder, seed, longest=longest)
    (folder / "chat_template.jinja").write_text(CHAT)
    if not modules:
        (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Qwen3-VL-Reranker-2B\n")
        return folder
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "reranker.jinja").write_text(RERANK)
    write_modules(
        folder,
        f"{_PACKAGE}.base.modules.transformer.Transformer",
        f"{_PACKAGE}.cross_encoder.modules.logit_score.LogitScore",
    )
    tokens = {"true_token_id": ids["yes"], "false_token_id": ids["no"], "module_input_name": "causal_logits"}
    write(folder / "1_LogitScore" / "config.json", tokens)
    chat = {"chat_template": "reranker", "add_generation_prompt": True}
    _settings(folder, "logits", "causal_logits", chat, task="any-to-any")
    saved = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Sigmoid"}
    write(folder / "config_sentence_transformers.json", saved)
    return folder


def _settings(folder: Path, output: str, named: str, chat: dict[str, Any], *, task: str = "feature-extraction") -> None:
    how = {"method": "forward", "method_output_name": output}
    modalities: dict[str, Any] = dict.fromkeys(("text", "image", "video"), how)
    modalities["message"] = how | {"format": "structured"}
    settings = {"transformer_task": task, "modality_config": modalities, "module_output_name": named}
    write(folder / "sentence_bert_config.json", settings | {"processing_kwargs": {"chat_template": chat}})


def _save_chat(folder: Path, seed: int, *, ends: bool = False, longest: int = 512) -> dict[str, int]:
    library = _byte_level(list(_NAMES), CORPUS)
    ids = {name: library.token_to_id(name) for name in _NAMES}
    if ends:
        end = _NAMES[0]
        library.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, ids[end])])
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, model_max_length=longest, pad_token=_NAMES[0], eos_token="<|im_end|>"
    )
    seen = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    seen |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64, "patch_size": 16}
    texts = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    texts |= {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": longest}
    texts |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    config = transformers.Qwen3VLConfig(
        vision_config=seen,
        text_config=texts,
        **_vision_ids(ids),
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pictures: Any = transformers.Qwen2VLImageProcessorPil(
        patch_size=16,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": LEAST, "longest_edge": MOST},
    )
    pictures.save_pretrained(folder)
    edit(folder / "preprocessor_config.json", image_processor_type="Qwen2VLImageProcessorFast")
    return ids


def build_gme(folder: Path, seed: int = 0, *, modules: bool = True) -> Path:
    """Write a GME to `folder` as its authors' files are, whose images have 4 to 16 tokens."""
    library = _byte_level(list(_NAMES), CORPUS)
    tokenizer = _wrapped(library, 512, _NAMES[0], eos_token="<|im_end|>")
    texts = _PART | {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    ids |= _vision_ids({name: library.token_to_id(name) for name in _NAMES})
    seen = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    scaled = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    config = texts | ids | scaled | {"vision_config": seen, "tie_word_embeddings": True}
    torch.manual_seed(seed)
    model = transformers.Qwen2VLForConditionalGeneration(transformers.Qwen2VLConfig.from_dict(dict(config)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformers.Qwen2VLImageProcessorPil().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")  # in the names of the hub's file, of transformers 4
    olds = (name.replace("model.visual.", "visual.").replace("model.language_model.", "model.") for name in weights)
    save_file(dict(zip(olds, weights.values(), strict=True)), folder / "model.safetensors", {"format": "pt"})
    own = {"AutoModel": "modeling_gme_qwen2vl.GmeQwen2VL", "AutoConfig": "modeling_gme_qwen2vl.GmeQwen2VLConfig"}
    limits = {"min_image_tokens": 4, "max_image_tokens": 16, "max_length": 400}
    named = {"model_type": "qwen2_vl", "architectures": ["GmeQwen2VL"], "auto_map": own}
    write(folder / "config.json", config | limits | named)
    if modules:
        package = f"{_PACKAGE}.models"
        write_modules(folder, "custom_st.MultiModalTransformer", f"{package}.Pooling", f"{package}.Normalize")
        pooling = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
        write(folder / "1_Pooling" / "config.json", pooling)
        write(folder / "2_Normalize" / "config.json", {})
        write(folder / "sentence_bert_config.json", {"max_seq_length": 512, "do_lower_case": False})
    return folder


def build_embedding_gemma2(folder: Path, seed: int = 0) -> Path:
    """Write an EmbeddingGemma 2 to `folder`, whose images have at most 70 tokens of 8 x 8 pixels."""
    names = ["<pad>", "<eos>", "<bos>", "<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio|>"]
    library = _byte_level(names, CORPUS)
    ids = {name: library.token_to_id(name) for name in names}
    library.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[(name, ids[name]) for name in ("<bos>", "<eos>")]
    )
    tokenizer = _wrapped(library, 512, bos_token="<bos>", eos_token="<eos>")
    heads = {
        "num_attention_heads": 4,
        "head_dim": 8,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    texts = heads | {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "max_position_embeddings": 512}
    texts |= {"global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 8, "sliding_window_pattern": 2}
    texts |= {"hidden_size_per_layer_input": 16, "embedding_dim": WIDTH, "pad_token_id": 0}
    seen = heads | {"num_key_value_heads": 4, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 160}
    named = {f"{kind}_token_id": ids[f"<|{kind}|>"] for kind in ("image", "video", "audio")}
    config = transformers.EmbeddingGemma2Config(
        text_config=texts, vision_config=seen | {"model_type": "gemma4_vision"}, **named
    )
    pictures: Any = transformers.Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    _save(transformers.EmbeddingGemma2Model, config, seed, pictures, folder)
    tokenizer.save_pretrained(folder)
    edit(folder / "tokenizer_config.json", image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>")
    parts = ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling")
    write_modules(folder, *(f"{_PACKAGE}.{part}" for part in parts), f"{_PACKAGE}.base.modules.normalize.Normalize")
    write(folder / "1_Pooling" / "config.json", {"embedding_dimension": WIDTH, "pooling_mode": "mean"})
    write(folder / "2_Normalize" / "config.json", {})
    _settings(folder, "last_hidden_state", "token_embeddings", {})
    saved = {"model_type": "SentenceTransformer", "prompts": {"SearchQuery": "task: search result | query: "}}
    write(folder / "config_sentence_transformers.json", saved)
    return folder


def shown(text: str, images: int) -> str:
    """A text behind images as it stands in a chat, before the tokens of these are repeated."""
    return "<|vision_start|><|image_pad|><|vision_end|>" * images + text


class ChatLibrary:
    """Qwen3-VL by transformers' image processor with Pillow, its tokenizer and its forward, one input at a time, in the
    chat of its authors' code.
    """

    kind = "Qwen3VLModel"
    told = INSTRUCTION
    end = ""
    has_full_stop = True

    def __init__(self, folder: Path, kind: str = "", **pixels: int) -> None:
        self.model: Any = getattr(transformers, kind or self.kind).from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self._processor: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **pixels)

    def inputs(self, text: str, files: Sequence[bytes], told: str = "") -> dict[str, torch.Tensor]:
        head = f"<|im_start|>system\n{told or self.told}<|im_end|>\n<|im_start|>user\n"
        return self.of(f"{head}{shown(text, len(files))}<|im_end|>\n<|im_start|>assistant\n{self.end}", files)

    def of(self, chat: str, files: Sequence[bytes]) -> dict[str, torch.Tensor]:
        seen: dict[str, Any] = {}
        if files:
            seen = dict(self._processor(images=[self.opened(one) for one in files], return_tensors="pt"))
            for grid in seen["image_grid_thw"]:
                chat = chat.replace("<|image_pad|>", "<|part|>" * (int(grid.prod()) // 4), 1)
        ids = self.tokenizer(chat.replace("<|part|>", "<|image_pad|>"), return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "mm_token_type_ids": (ids == self.model.config.image_token_id).int(), **seen}

    def opened(self, data: bytes) -> Image.Image:
        return Image.open(io.BytesIO(data))

    def hidden(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**given).last_hidden_state

    def pooled(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[0, -1]

    @torch.inference_mode()
    def vector(self, text: str, files: Sequence[bytes] = (), told: str = "") -> Any:
        found = self.pooled(self.hidden(self.inputs(text, files, told)))
        return torch.nn.functional.normalize(found, dim=-1).numpy()

    @torch.inference_mode()
    def score(self, query: Any, document: Any, told: str = CANDIDATES) -> float:
        """The probability of yes against no, of two sides of a text and files each."""
        texts = [shown(text, len(files)) for text, files in (query, document)]
        chat = (
            f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n<Instruct>: {told}<Query>:{texts[0]}\n"
            f"<Document>:{texts[1]}<|im_end|>\n<|im_start|>assistant\n"
        )
        logits = self.model(**self.of(chat, [*query[1], *document[1]])).logits[0, -1]
        yes, no = (self.tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
        return float(torch.sigmoid(logits[yes] - logits[no]))


class GmeLibrary(ChatLibrary):
    """GME: tokens of images have the positions of a text, and images are resized twice."""

    kind = "Qwen2VLModel"
    told = "You are a helpful assistant."
    end = "<|endoftext|>"
    has_full_stop = False

    def __init__(self, folder: Path) -> None:
        found = read(folder / "config.json")
        super().__init__(folder, **{f"{end}_pixels": found[f"{end}_image_tokens"] * 28 * 28 for end in ("min", "max")})

    def hidden(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        embedded = self.model.get_input_embeddings()(given["input_ids"])
        if "pixel_values" in given:
            seen = self.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"]).pooler_output
            embedded[given["mm_token_type_ids"] == 1] = seen
        return self.model.language_model(inputs_embeds=embedded).last_hidden_state

    def opened(self, data: bytes) -> Image.Image:
        """As Qwen's tools read it before the processor does; on white."""
        return _fetched(super().opened(data).convert("RGBA"))


class Gemma2Library(ChatLibrary):
    """EmbeddingGemma 2: the mean of all tokens of a text, behind its prompt, or of an image."""

    kind = "EmbeddingGemma2Model"

    def inputs(self, text: str, files: Sequence[bytes], told: str = "") -> dict[str, torch.Tensor]:
        seen = dict(self._processor(images=[self.opened(files[0])], return_tensors="pt")) if files else {}
        tokens = int(seen.pop("num_soft_tokens_per_image", [0])[0])
        image = f"<|image>{'<|image|>' * tokens}<image|>" if files else ""
        return {"input_ids": self.tokenizer(told + text + image, return_tensors="pt")["input_ids"], **seen}

    def pooled(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[0].mean(dim=0)


def _fetched(image: Image.Image) -> Image.Image:
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    sides, pixels = [max(28, round(side / 28) * 28) for side in image.size], math.prod(image.size)
    for bound, cut in ((4 * 28 * 28, math.ceil), (16_384 * 28 * 28, math.floor)):
        if (math.prod(sides) < bound) == (cut is math.ceil) and math.prod(sides) != bound:
            scale = math.sqrt(bound / pixels) if cut is math.ceil else 1 / math.sqrt(pixels / bound)
            sides = [cut(side * scale / 28) * 28 for side in image.size]
    return image.resize((sides[0], sides[1]))


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of random pixels."""
    rows = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(rows)


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file."""
    written = io.BytesIO()
    image.save(written, form, **options)
    return written.getvalue()


def build_clap(folder: Path, *, fuses: bool = False, seed: int = 0) -> Path:
    """Write a CLAP to `folder`, which reads windows of two seconds."""
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = _byte_level(names, CORPUS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    )
    ids = {name: tokenizer.token_to_id(name) for name in names}
    texts = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    texts |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 100}
    texts |= {"pad_token_id": ids["<pad>"], "bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"]}
    sounds: dict[str, Any] = {"hidden_size": 32, "patch_embeds_hidden_size": 16, "depths": [1, 1]}
    sounds |= {"num_attention_heads": [2, 2], "spec_size": 256, "window_size": 8, "enable_fusion": fuses}
    sounds |= {"fusion_type": "aff_2d" if fuses else None}
    config = transformers.ClapConfig(text_config=texts, audio_config=sounds, projection_dim=WIDTH)
    torch.manual_seed(seed)
    model: Any = transformers.ClapModel(config)
    with torch.no_grad():  # the library's own statistics are those of no sound
        model.audio_model.audio_encoder.batch_norm.running_mean.fill_(-30.0)
        model.audio_model.audio_encoder.batch_norm.running_var.fill_(200.0)
    model.save_pretrained(folder)
    extractor: Any = transformers.ClapFeatureExtractor(
        max_length_s=2, frequency_min=50, truncation="fusion" if fuses else "rand_trunc"
    )
    extractor.save_pretrained(folder)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=90, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    wrapped.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    return folder


def sound(seconds: float, seed: int = 0, rate: int = RATE, channels: int = 1) -> np.ndarray:
    """A rising tone over noise, float32 [samples] or [samples, channels]."""
    at = np.arange(int(seconds * rate))[:, None] / rate
    noise = np.random.default_rng(seed).standard_normal((len(at), channels))
    found = 0.4 * np.sin(2 * np.pi * (200 + 100 * seed + 300 * at) * at) + 0.1 * noise
    return np.squeeze(found.astype(np.float32), 1) if channels == 1 else found.astype(np.float32)


def sound_file(samples: np.ndarray, form: str = "WAV", subtype: str | None = "FLOAT", rate: int = RATE) -> bytes:
    """The bytes of a sound file."""
    written = io.BytesIO()
    soundfile.write(written, samples, rate, format=form, subtype=subtype)
    return written.getvalue()


def pdf_of(*pages: tuple[float, float, str], trailer: str = "") -> bytes:
    """A PDF with a page for each of these: its width and height in points, and what is drawn, in PDF's own words."""
    kids = " ".join(f"{3 + 2 * at} 0 R" for at in range(len(pages)))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>"]
    for at, (width, height, drawn) in enumerate(pages):
        shown = f"/MediaBox [0 0 {width} {height}] /Contents {4 + 2 * at} 0 R"
        objects.append(f"<< /Type /Page /Parent 2 0 R {shown} /Resources << >> >>")
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    written, places = b"%PDF-1.7\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(written))
        written += f"{number} 0 obj\n{content}\nendobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    head = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    ends = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R {trailer} >>\nstartxref\n{len(written)}\n%%EOF\n"
    return written + (head + ends).encode()
