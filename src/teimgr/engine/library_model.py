"""Loads a model of the transformers library from its directory, and accounts for every weight in its files.

A model with a weight that is missing, of another shape, or used by no module is refused: its results would be silently
wrong. Only weights of unused heads, and tables that the library computes, may be left over.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine import gpu
from teimgr.engine.attention import put_own_rotary
from teimgr.engine.heads.projections import read_weights
from teimgr.engine.weights.adapters import merge_adapter, put_task_adapters
from teimgr.engine.weights.own import Weights, own_weights, unwrapped
from teimgr.errors import ModelLoadFailed
from teimgr.models.directory import (
    base_model_of,
    broken_file,
    files_below,
    only_in,
    onnx_file,
    other_format,
    weight_files,
)
from teimgr.models.layout import Backbone, Dense, Layout
from teimgr.models.source import file_problem

log = logging.getLogger(__name__)

# Encoder-decoders whose encoder alone is used; AutoModel would load both.
_ENCODERS = {
    "t5": "T5EncoderModel",
    "mt5": "MT5EncoderModel",
    "umt5": "UMT5EncoderModel",
    "t5gemma": "T5GemmaEncoderModel",
}
# Models whose head no Auto class has.
_OWN_CLASSES = {
    "colpali": "ColPaliForRetrieval",
    "colqwen2": "ColQwen2ForRetrieval",
    "colmodernvbert": "ColModernVBertForRetrieval",
}
# Language models that AutoModelForCausalLM lacks.
_CHAT_CLASSES = {"qwen3_vl": "Qwen3VLForConditionalGeneration"}
_AUTO_CLASSES = {
    Backbone.ENCODER: "AutoModel",
    Backbone.MASKED_LM: "AutoModelForMaskedLM",
    Backbone.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    Backbone.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
    Backbone.CAUSAL_LM: "AutoModelForCausalLM",
    Backbone.SEQ2SEQ_LM: "AutoModelForSeq2SeqLM",
}
# Weights in the files that may be unused, by the beginning of their names after the base model's prefix: heads of
# pretraining and of tasks, and the pooler of BERT and others.
_UNUSED_HEADS = (
    *("pooler", "cls", "lm_head", "mlm_head", "embed_out", "predictions", "seq_relationship", "sop_classifier"),
    *("vocab_transform", "vocab_layer_norm", "vocab_projector", "generator_predictions", "generator_lm_head"),
    *("discriminator_predictions", "lm_predictions", "mask_predictions", "lm_loss", "generator", "discriminator"),
    *("classifier", "pre_classifier", "score", "qa_outputs", "classification_head", "sequence_summary", "head"),
    *("entity_predictions", "final_logits_bias", "logits_proj", "answer_class", "start_logits", "end_logits"),
)
_UNUSED_HEAD = re.compile(rf"(?:\w+\.)?(?:{'|'.join(_UNUSED_HEADS)})(?:\.|$)")
# Tables that older versions saved with the weights; now they are computed.
_COMPUTED = re.compile(
    r"(?:^|\.)(?:position_ids|token_type_ids|inv_freq|original_inv_freq|cos_cached|sin_cached|embed_positions\.weights|"
    r"h\.\d+\.attn\.(?:attention\.)?(?:masked_)?bias|(?:encoder|decoder)\.embed_tokens\.weight)$"
)
_NAMED_WEIGHTS = 3
# Model types with a weight for each position.
_POSITION_TABLES = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "electra", "albert", "gpt2")


def load_module(layout: Layout, device: torch.device) -> Any:
    """Load the library's model in float32 on `device`, with the head of `layout.backbone`.

    Raises:
        ModelLoadFailed: the architecture is unknown to transformers, or weights are missing or of another shape.
    """
    from teimgr.engine.own_models import register_own_models

    register_own_models()
    check_weights(layout)
    silence()
    weights, by_task = own_weights(layout)
    try:
        kind, config, options = _class_and_options(layout)
        module, report = _read(layout, kind, config, options, weights)
        if (weights := _unwrapped(layout, report)) is not None:
            module, report = _read(layout, kind, config, options, weights)
    except Exception as error:  # of any type, from the library or the model's own code
        if gpu.is_out_of_memory(error):
            raise
        broken = broken_file(layout.weights_dir)
        why = f"{layout.weights_dir / broken} ({_reason(error)})" if broken else _reason(error)
        raise ModelLoadFailed(f"transformers cannot load {layout.weights_dir}: {why}") from error
    _account_for(report, module, layout)
    if layout.trust_remote_code and kind.__module__.startswith(_OWN_CODE):
        _make_tables(module, kind, config)
    for adapter in layout.adapters:
        merge_adapter(module, adapter, module.base_model_prefix)
    put_own_rotary(module)
    if layout.tasks:
        put_task_adapters(module, layout, by_task)
    return _finished(module, device)


def silence() -> None:
    """Make transformers log errors only, without progress bars."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def _read(
    layout: Layout, kind: Any, config: Any, options: dict[str, Any], weights: Weights | None
) -> tuple[Any, dict[str, Any]]:
    """Return the module from the files, or from `weights`, and the library's report of names that do not fit."""
    module, report = kind.from_pretrained(
        layout.weights_dir if weights is None else None,
        config=config,
        state_dict=weights,
        local_files_only=True,
        use_safetensors=True if layout.safetensors_only else None,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # `_account_for` refuses them, with both shapes
        **options,
    )
    return module, report


def _unwrapped(layout: Layout, report: dict[str, Any]) -> Weights | None:
    """Return the weights without a prefix that all names have, if no name of the files was used; else None."""
    missing, unexpected = report["missing_keys"], set(report["unexpected_keys"])
    if not missing or not unexpected or layout.weight_names is not None or not weight_files(layout.weights_dir):
        return None
    given = read_weights(layout.weights_dir)
    if any(name not in unexpected and not _COMPUTED.search(name) for name in given):
        return None
    return unwrapped(given, missing)


def load_plain_module(layout: Layout, device: torch.device) -> Any | None:
    """Load like `load_module` in a third of its time, or return None if the files are not of plain form: each weight of
    the model in float32, under its own name.

    The library's own loading also renames, converts and ties weights; this one does not. So its results are only used
    for a comparison with results of `load_module`.
    """
    from transformers.initialization import no_init_weights

    from teimgr.engine.own_models import register_own_models

    own_ways = layout.trust_remote_code or layout.adapters or layout.tasks or layout.weight_names is not None
    files = weight_files(layout.weights_dir)
    if own_ways or not files or any(file.suffix != ".safetensors" for file in files):
        return None
    register_own_models()
    try:
        kind, config, options = _class_and_options(layout)
        with no_init_weights():
            module = kind._from_config(config, **options)
        weights, wanted = read_weights(layout.weights_dir), module.state_dict()
        if _unused(weights.keys() - wanted.keys(), module, layout):
            return None
        for name, weight in wanted.items():
            if name not in weights or (weights[name].dtype, weights[name].shape) != (torch.float32, weight.shape):
                return None
        module.load_state_dict({name: weights[name] for name in wanted}, assign=True)
    except Exception as error:  # of any type: `load_module` reports the reason
        log.info("loading the plain module failed, loading by transformers: %s", error)
        return None
    put_own_rotary(module)
    return _finished(module, device)


def _finished(module: Any, device: torch.device) -> Any:
    """Return a module with all its weights, ready to run."""
    if module.config.model_type == "lfm2" and not getattr(module.config, "is_causal", True):
        centre_convolutions(module)
    module.eval().requires_grad_(False)
    return module.to(device)


def _class_and_options(layout: Layout) -> tuple[Any, Any, dict[str, Any]]:
    """Return the class to load, its configuration, and the other options that it is made with."""
    config = _configuration(layout)
    # Unused results of a forward; some models are saved with these enabled.
    config.return_dict, config.output_hidden_states, config.output_attentions = True, False, False
    if layout.backbone is Backbone.ENCODER and config.model_type == "t5gemma":
        config.is_encoder_decoder = False  # its encoder class refuses the whole model's configuration
    kind = _model_class(layout, config)
    attention = "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
    options = _without_pooler(kind) if layout.backbone is Backbone.ENCODER else {}
    return kind, config, {"dtype": torch.float32, "attn_implementation": attention, **options}


_OWN_CODE = "transformers_modules."


def _make_tables(module: Any, kind: Any, config: Any) -> None:
    """Set the values of tables that a model's own `__init__` computes and no file has.

    transformers runs `__init__` on the meta device, and leaves tables that it does not know without values.

    Raises:
        ModelLoadFailed: the model cannot be made outside of the meta device.
    """
    from transformers.initialization import no_init_weights

    try:
        with no_init_weights():
            fresh = kind(config)
    except Exception as error:  # of any type, from the model's own code
        raise ModelLoadFailed(f"its code fails with {type(error).__name__}: {error}") from error
    targets = dict(module.named_modules())
    for name, made in fresh.named_modules():
        if (target := targets.get(name)) is None:
            continue
        for key in made._non_persistent_buffers_set:
            if (table := made._buffers.get(key)) is not None:
                target._buffers[key] = table.clone()
        for key, value in vars(made).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                setattr(target, key, value.clone())


def check_weights(layout: Layout) -> None:
    """Raise ModelLoadFailed if the library would find no file of weights."""
    folder = layout.weights_dir
    if files := weight_files(folder):
        if (lacking := next((file for file in files if not file.is_file()), None)) is not None:
            problem = file_problem(lacking) or "is missing, and an index of shards names it"
            raise ModelLoadFailed(f"{lacking} {problem}")
        _check_volume(layout, files)
        return
    if (graph := onnx_file(folder)) is not None:
        _check_volume(layout, graph.parent.glob(f"{graph.name}*"))
        return
    if layout.config.get("transformers_weights"):
        return
    form = other_format(path.relative_to(folder).as_posix() for path in files_below(folder, depth=1))
    if form is not None:
        raise ModelLoadFailed(f"{folder} has weights {only_in(form, base_model_of(layout.root))}")
    raise ModelLoadFailed(f"{folder} has no weights: neither model.safetensors nor pytorch_model.bin, nor their shards")


def _check_volume(layout: Layout, files: Iterable[Path]) -> None:
    """Raise ModelLoadFailed if config.json makes one matrix larger than all weights in the files.

    The library would allocate memory for it before it compares their shapes. A weight has half a byte or more.
    """
    sizes = {file.name: file.stat().st_size for file in files if file.is_file()}
    size_bytes = sum(sizes.values())
    for config, where in ((layout.config, ""), (layout.config.get("text_config"), "text_config.")):
        for key, rows, columns in _matrices(config) if isinstance(config, dict) else ():
            if rows * columns <= 2 * size_bytes:
                continue
            if broken := broken_file(layout.weights_dir):
                raise ModelLoadFailed(f"{layout.weights_dir / broken}")
            raise ModelLoadFailed(
                f"config.json makes a weight of {rows:,} × {columns:,} ({where}{key}), and all files of weights have "
                f"{size_bytes:,} bytes, first {min(sizes, default='none')}: the download is incomplete, or config.json "
                "belongs to another model"
            )


def _matrices(config: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Return the rows and columns of the largest matrices, 0 if the family has none, each with the setting that decides
    it."""
    hidden = int(config.get("hidden_size") or config.get("d_model") or config.get("dim") or 0)
    narrow = min(hidden, int(config.get("embedding_size") or hidden))
    heads = int(config.get("num_attention_heads") or config.get("num_heads") or 0)
    yield "vocab_size", int(config.get("vocab_size") or 0), narrow
    yield "intermediate_size", int(config.get("intermediate_size") or config.get("d_ff") or 0), hidden
    yield "hidden_size", hidden, hidden
    yield "head_dim", int(config.get("head_dim") or config.get("d_kv") or 0) * heads, hidden
    ratio, side, patch = config.get("mlp_ratio"), config.get("image_size"), config.get("patch_size")
    if isinstance(ratio, (int, float)):
        yield "mlp_ratio", int(hidden * ratio), hidden
    if isinstance(side, int) and isinstance(patch, int) and patch > 0:
        yield "image_size", (side // patch) ** 2, hidden
    if config.get("model_type") in _POSITION_TABLES:
        yield "max_position_embeddings", int(config.get("max_position_embeddings") or 0), narrow


def _reason(error: Exception) -> str:
    """Return the library's own message, or the name of a Python exception without one."""
    if isinstance(error, (OSError, ValueError, RuntimeError, ImportError)) and str(error):
        return str(error)
    return f"its code fails with {type(error).__name__}: {error}"


def _configuration(layout: Layout) -> Any:
    """Return the configuration from config.json, or from the file that replaces it."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if layout.config_is_changed:
        return CONFIG_MAPPING[layout.config["model_type"]].from_dict(dict(layout.config))
    trust = layout.trust_remote_code  # not None, by which transformers would prompt on the terminal
    return AutoConfig.from_pretrained(
        layout.weights_dir, local_files_only=True, trust_remote_code=trust, code_revision=layout.code_revision
    )


def _account_for(report: dict[str, Any], module: Any, layout: Layout) -> None:
    """Raise ModelLoadFailed if a weight is missing, of another shape, or not used by the model."""
    if missing := sorted(report["missing_keys"]):
        others = (
            f"; the files have others, first {min(unexpected)}" if (unexpected := report["unexpected_keys"]) else ""
        )
        raise ModelLoadFailed(f"{len(missing)} weights are missing from the files, first {missing[0]}{others}")
    if differing := sorted(report["mismatched_keys"], key=str):
        name, given, expected = differing[0][0], *(tuple(shape) for shape in differing[0][1:3])
        others = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise ModelLoadFailed(f"the weight {name} is {given} in the files, and config.json makes it {expected}{others}")
    if unused := _unused(report["unexpected_keys"], module, layout):
        more = len(unused) - _NAMED_WEIGHTS
        names = ", ".join(unused[:_NAMED_WEIGHTS]) + (f" and {more} more" if more > 0 else "")
        raise ModelLoadFailed(
            f"the files have weights that a {layout.config['model_type']} model of the library does not use: {names}; "
            "so its vectors would differ from its authors'"
        )


def _unused(names: Iterable[str], module: Any, layout: Layout) -> list[str]:
    """Return the weights that neither the model, nor a head that was not requested, nor another module of ours uses."""
    projections = layout.projections if layout.late is None else layout.late.projections
    shared = tuple(f"{one.name}." for one in projections if isinstance(one, Dense) and one.path == layout.weights_dir)
    decoder = layout.backbone is Backbone.ENCODER and module.config.model_type in _ENCODERS
    left = []
    for name in sorted(names):
        own = name.removeprefix(f"{module.base_model_prefix}.") if module.base_model_prefix else name
        if _COMPUTED.search(name) or _UNUSED_HEAD.match(own) or _UNUSED_HEAD.match(name):
            continue
        if name.startswith(shared) or (decoder and own.startswith(("decoder.", "lm_head."))):
            continue  # our own layers, such as Stanford's projection, or an unused decoder
        if layout.backbone is Backbone.ENCODER and name.startswith("decoder.") and not hasattr(module, "decoder"):
            continue  # ModernBERT's masked-LM head
        left.append(name)
    return left


def _model_class(layout: Layout, config: Any) -> Any:
    """Return the class to load: the model's own code if that is trusted, else the library's."""
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    name = _AUTO_CLASSES[layout.backbone]
    own = (getattr(config, "auto_map", None) or {}).get(name)
    if layout.trust_remote_code and own is not None:
        revision = layout.code_revision
        return get_class_from_dynamic_module(
            own, str(layout.weights_dir), local_files_only=True, code_revision=revision
        )
    if layout.backbone is Backbone.ENCODER and (known := (_ENCODERS | _OWN_CLASSES).get(config.model_type)):
        return getattr(transformers, known)
    if layout.backbone is Backbone.CAUSAL_LM and (known := _CHAT_CLASSES.get(config.model_type)):
        return getattr(transformers, known)
    mapping = getattr(transformers, name)._model_mapping
    if type(config) not in mapping:
        raise ValueError(f"a {config.model_type} model has no {layout.backbone.value} form")
    kind = mapping[type(config)]
    return kind[0] if isinstance(kind, (tuple, list)) else kind


def _without_pooler(kind: Any) -> dict[str, bool]:
    """Return the option to leave out BERT's pooler, which embeddings do not use and many checkpoints lack."""
    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind.__init__).parameters else {}


class CentredShortConv(nn.Module):
    """C · conv(B · x) as in LFM2's own layer, with the kernel centred on the token and zeros around a text.

    One text, or several of equal length without padding: [texts, T, H].
    """

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.in_proj, self.conv, self.out_proj = causal.in_proj, causal.conv, causal.out_proj

    def forward(self, hidden_states: Tensor, **_options: Any) -> Tensor:
        b, c, x = self.in_proj(hidden_states).transpose(-1, -2).chunk(3, dim=-2)
        kernel = self.conv.weight
        mixed = functional.conv1d(b * x, kernel, self.conv.bias, padding=kernel.shape[-1] // 2, groups=kernel.shape[0])
        out: Tensor = self.out_proj((c * mixed).transpose(-1, -2).contiguous())
        return out


def centre_convolutions(module: nn.Module) -> None:
    """Replace every short convolution of an LFM2 by `CentredShortConv`."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "Lfm2ShortConv":
                setattr(parent, name, CentredShortConv(child))
