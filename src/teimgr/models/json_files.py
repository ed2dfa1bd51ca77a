"""The JSON files of a model directory: config.json for the library, special tokens, token types, positions, lengths."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import read_object
from teimgr.models.known_keys import declared_keys, setting

# Tokenizer classes and model types with token types if tokenizer_config.json lacks model_input_names: those of
# transformers whose class has token_type_ids. Several model types use BertTokenizer.
_TYPED_CLASSES = {
    *("Bert", "Canine", "ConvBert", "DPRQuestionEncoder", "Deberta", "DebertaV2", "Electra", "FNet", "Funnel"),
    *("LayoutLM", "LayoutLMv2", "Lxmert", "MarkupLM", "MobileBert", "RetriBert", "SqueezeBert", "Tapas"),
}
_TYPED_MODELS = {
    *("bert", "bros", "canine", "convbert", "deberta", "deberta-v2", "electra", "ernie", "fnet", "jina_bert"),
    *("layoutlm", "layoutlmv2", "lxmert", "markuplm", "megatron-bert", "mobilebert", "nezha", "nomic_bert"),
    *("qdqbert", "squeezebert", "tapas", "visual_bert"),
}


# The truncation settings in tokenizer.json.
_CUTS_LEFT = re.compile(r'"truncation"\s*:\s*\{[^{}]*"direction"\s*:\s*"Left"')
_CUTS_AT = re.compile(r'"truncation"\s*:\s*\{[^{}]*"max_length"\s*:\s*(\d+)')
_HEAD_CHARACTERS = 4096


class TokenFiles:
    """tokenizer.json and tokenizer_config.json of a directory; the former is read on demand."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = read_object(folder / "tokenizer_config.json") or {}

    def id(self, token: str) -> int | None:
        return self._vocabulary.get(token)

    def special(self, role: str) -> int | None:
        """Return the id of a special token by its role, such as "mask_token"."""
        text = self.text(role)
        return self.id(text) if text else None

    def text(self, role: str) -> str:
        """Return the text of a special token by its role; "" if it has none."""
        token = self.config.get(role) or self._special_map.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        return text if isinstance(text, str) else ""

    def frame(self) -> tuple[str, str]:
        """Return the special tokens before and after a text by the template of tokenizer.json; "" without one."""
        own = self._file.get("post_processor") or {}
        steps = own.get("processors") or [own]
        parts: list[dict[str, Any]] = next(
            (step["single"] for step in steps if step.get("type") == "TemplateProcessing"), []
        )
        tokens = [str((part.get("SpecialToken") or {}).get("id", "")) for part in parts]
        at = tokens.index("") if "" in tokens else len(tokens)  # where the text is
        return "".join(tokens[:at]), "".join(tokens[at:])

    def words(self, words: list[str]) -> tuple[int, ...]:
        """Return the ids of the words that are a single token; the unknown token's id only for its own name."""
        unknown, name = self.special("unk_token"), self.text("unk_token")
        found = (self.id(word) for word in words if word == name or self.id(word) != unknown)
        return tuple(sorted({id for id in found if id is not None}))

    def has_types(self, model: dict[str, Any]) -> bool:
        """True if a pair's second text has token type 1, by the tokenizer and by config.json (`model`)."""
        return int(setting(model, "type_vocab_size") or 0) >= 2 and self._gives_types(model)

    def check_types(self, model: dict[str, Any]) -> None:
        """Raise ModelLoadFailed if the library takes the tokenizer's token types for words.

        It adds the vector of the word 0 to every token then, as of a GPT-2 with BERT's tokenizer.
        """
        if model.get("model_type") in _TYPES_AS_WORDS and self._gives_types(model):
            raise ModelLoadFailed(
                f"the tokenizer gives token types, and a {model['model_type']} model of the library adds the vectors "
                "of words by them, which is not served: without token_type_ids in model_input_names of "
                "tokenizer_config.json it is"
            )

    def _gives_types(self, model: dict[str, Any]) -> bool:
        names = self.config.get("model_input_names")
        if names is not None:
            return "token_type_ids" in names
        own = str(self.config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
        return own in _TYPED_CLASSES if own else model["model_type"] in _TYPED_MODELS

    @property
    def drops_spaces(self) -> bool:
        """True if a space before a text has no effect, as in BERT's vocabulary."""
        return (self._file.get("model") or {}).get("type") == "WordPiece"

    @property
    def cuts_left(self) -> bool:
        """True if too long texts lose their beginning by tokenizer.json, whose settings the library takes where
        tokenizer_config.json has no side. They stand at its beginning.
        """
        return _CUTS_LEFT.search(self._head) is not None

    @property
    def cuts_at(self) -> int | None:
        """The tokens of a text by tokenizer.json, which an embedding table of the library goes by; None for no end."""
        found = _CUTS_AT.search(self._head)
        return None if found is None else checked_length(int(found[1]), "tokenizer.json")

    @cached_property
    def _head(self) -> str:
        try:
            with (self._folder / "tokenizer.json").open(encoding="utf-8", errors="replace") as file:
                return file.read(_HEAD_CHARACTERS)
        except OSError:  # readers that need the file raise the error
            return ""

    @cached_property
    def _file(self) -> dict[str, Any]:
        content = read_object(self._folder / "tokenizer.json")
        if content is None:
            raise ModelLoadFailed("the model has no tokenizer.json")
        return content

    @cached_property
    def _special_map(self) -> dict[str, Any]:
        return read_object(self._folder / "special_tokens_map.json") or {}

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        entries = (self._file.get("model") or {}).get("vocab") or {}
        if isinstance(entries, list):  # Unigram: [token, score] by id
            entries = {entry[0]: index for index, entry in enumerate(entries)}
        added = {str(token["content"]): int(token["id"]) for token in self._file.get("added_tokens") or ()}
        return {**entries, **added}


_TYPES_AS_WORDS = {"codegen", "ctrl", "flaubert", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "xlm"}
ENDLESS = 1_000_000
# Model types whose position ids start after the padding token's id.
OFFSET_TYPES = {
    *("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "roberta-prelayernorm", "xmod", "data2vec-text"),
    *("mpnet", "longformer", "luke", "ibert", "lilt", "markuplm", "layoutlmv3", "clap_text_model"),
}
# Model types with `max_position_embeddings` and neither a table of positions nor rotary ones: sines of any position, or
# no positions at all.
_ENDLESS_TYPES = {"xglm", "rwkv", "nemotron_h", "jamba", "kimi_linear"}
_SETTINGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def read_settings(folder: Path) -> dict[str, Any]:
    """sentence_bert_config.json or an older file of its kind; {} if it is missing."""
    return next((content for name in _SETTINGS if (content := read_object(folder / name)) is not None), {})


def position_offset(config: dict[str, Any]) -> int:
    """Return the first position id of a text.

    Raises:
        ModelLoadFailed: positions begin behind the padding token's id, and config.json has no token's id there.
    """
    if config["model_type"] == "mpnet":  # independent of its padding token
        return 2
    if config["model_type"] not in OFFSET_TYPES and not _is_absolute_esm(config):
        return 0
    padding = setting(config, "pad_token_id")
    if padding is None:
        raise ModelLoadFailed(
            f"config.json has no pad_token_id, after which the positions of a {config['model_type']} model begin"
        )
    if not 0 <= int(padding) < int(setting(config, "vocab_size")):
        raise ModelLoadFailed(
            f"config.json has pad_token_id = {padding}, which is not a token's id, and after which the positions of a "
            f"{config['model_type']} model begin"
        )
    return int(padding) + 1


def max_length(config: dict[str, Any], settings: dict[str, Any], tokenizer: dict[str, Any]) -> int:
    """The limit of sentence-transformers' settings, else the smaller of the tokenizer's and of the number of positions.

    A table of positions is the limit in any case. Positions that are computed (rotary, relative) have no end: there the
    settings' own limit holds, as in sentence-transformers.

    Raises:
        ModelLoadFailed: no file has a limit, or one is not a positive number.
    """
    kwargs = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}
    limits = (_length_of_calls(settings), kwargs.get("model_max_length"), settings.get("max_seq_length"))
    own = [given for given in limits if given is not None]
    if own:
        limit = min(checked_length(own[0], "sentence_bert_config.json"), position_rows(config))
    else:
        given = tokenizer.get("model_max_length", tokenizer.get("max_len"))  # the key before 2020
        limit = min(_positions(config), ENDLESS if given is None else checked_length(given, "tokenizer_config.json"))
    if limit >= ENDLESS:
        raise ModelLoadFailed("neither sentence_bert_config.json nor config.json nor the tokenizer has a length limit")
    return limit


def position_rows(config: dict[str, Any]) -> int:
    """Return the tokens for which there are positions in a table; `ENDLESS` if positions are computed."""
    return _positions(config) if _has_position_table(config) else ENDLESS


def _positions(config: dict[str, Any]) -> int:
    """Return the tokens for which config.json names positions; `ENDLESS` without a number."""
    positions = setting(config, "max_seq_len" if config["model_type"] == "mpt" else "max_position_embeddings")
    return int(positions) - position_offset(config) if positions and positions > 0 else ENDLESS


def _length_of_calls(settings: dict[str, Any]) -> Any:
    """`max_length` that sentence-transformers gives the tokenizer with each text; None for none."""
    processing = settings.get("processing_kwargs") or {}
    given = [(processing.get(part) or {}).get("max_length") for part in ("text", "common")]
    found = [one for one in given if one is not None]
    if found[1:] and found[0] != found[1]:
        raise ModelLoadFailed(
            f"processing_kwargs of sentence_bert_config.json has max_length = {found[0]!r} for text and {found[1]!r} "
            "in common, which contradict"
        )
    return found[0] if found else None


def checked_length(given: Any, file: str) -> int:
    """Return a length limit of `file`, at most `ENDLESS`. Raises ModelLoadFailed unless it is whole and above 0."""
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not is_number or not given >= 1 or (given < ENDLESS and given != int(given)):
        raise ModelLoadFailed(f"{file} has the length limit {given!r}, which should be a whole number above 0")
    return int(min(given, ENDLESS))


def _is_absolute_esm(config: dict[str, Any]) -> bool:
    """True for ESM-1b's kind, whose positions are RoBERTa's; those of ESM-2 are rotary."""
    return bool(config["model_type"] == "esm" and setting(config, "position_embedding_type") == "absolute")


def _has_position_table(config: dict[str, Any]) -> bool:
    """True if each position has a row of weights, so that no position is beyond the last row."""
    if config.get("position_embedding_type") == "alibi":
        return False
    if config["model_type"] in ("deberta", "deberta-v2"):
        return bool(setting(config, "position_biased_input"))
    if config["model_type"] in _ENDLESS_TYPES:
        return False
    if _is_absolute_esm(config):
        return True
    declared = declared_keys(str(config["model_type"]))
    names = config.keys() if declared is None else declared.names
    return not {"rope_parameters", "rope_theta"} & names


Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServedConfig:
    """A config.json as the library must read it. `is_changed` if it differs from the file. `notes` are for the log.

    `weight_names` is the naming scheme of the weights if it is not the library's (`engine/weights/own.py`). `tasks` has
    the number of the LoRA weights, from 1, by the name of a prompt; `prompts` are these prompts. Texts without a name
    use `default_task`, 0 for none. `adapters` are the folders of such weights if they are PEFT's. `pooling` is that of
    the model's own code. `instruction_end` ends an instruction, a prompt or the beginning of a text, whose tokens are
    not pooled. `chat_limits` of GME are the minimum and maximum tokens of an image, and the maximum of an input.
    """

    config: Config
    is_changed: bool = False
    notes: tuple[str, ...] = ()
    weight_names: str | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    task_scale: float = 1.0
    default_task: int = 0
    adapters: tuple[str, ...] = ()
    pooling: str | None = None
    instruction_end: str | None = None
    chat_limits: tuple[int, int, int] | None = None


def check_heads(config: Config) -> None:
    """Raise if the heads, by the library's names of sizes, do not divide the width."""
    heads, width = count(config, "num_attention_heads", 12), count(config, "hidden_size", 768)
    if width % heads:
        raise ModelLoadFailed(f"config.json has a width of {width}, which its {heads} heads of attention do not divide")


def flag(config: Config, key: str, default: bool) -> bool:
    found = config.get(key, default)
    if not isinstance(found, bool):
        raise ModelLoadFailed(f"config.json has {key} = {found!r}, which should be true or false")
    return found


def refuse_unless(config: Config, **expected: Any) -> None:
    for key, value in expected.items():
        if config.get(key, value) not in (value, None):
            raise ModelLoadFailed(f"config.json has {key} = {config[key]!r}; for this model only {value!r} is served")


def number(values: Config, key: str) -> float:
    found = values.get(key)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not (math.isfinite(found) and found > 0):
        raise ModelLoadFailed(f"config.json has {key} = {found!r}, which should be a positive number")
    return float(found)


def count(config: Config, key: str, default: int) -> int:
    found = config.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ModelLoadFailed(f"config.json has {key} = {found!r}, which should be a positive number")
    return found


def classes_of(configuration: str, modelling: str, prefix: str, *heads: str) -> frozenset[str]:
    """`file.Class` of a configuration, of the bare model, and of its heads."""
    return frozenset(
        {
            f"{configuration}.{prefix}Config",
            f"{modelling}.{prefix}Model",
            *(f"{modelling}.{prefix}{head}" for head in heads),
        }
    )


HEADS = (
    *("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
    *("ForMultipleChoice", "ForCausalLM"),
)
