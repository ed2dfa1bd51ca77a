"""What comes with a model's tokenizer and would stop a worker is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.token_ids import ids
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.text import tokenizer as tokenizer_module
from teimgr.engine.text.boundaries import _WORD_PATTERNS
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.engine.text.tokenizer_library import check_patterns, load_tokenizer
from teimgr.errors import ModelLoadFailed, TokenizerFailed
from teimgr.models.reading import read_layout

# Of GPT-4o, BLOOM, CLIP, DeepSeek, and groups of letters with their marks.
_OF_MODELS = [
    *(pattern["Regex"] for pattern in _WORD_PATTERNS),
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?:\p{L}\p{M}*)+",
    r"\s+$",
    " {2,}",
]
_EXPONENTIAL = [r"(a+)+$", r"(a+)+c", r"(\w+\s?)+$", r"(\w*)*x", "(a|aa)+$", r"([^\s]+\.?)+@"]


@pytest.mark.parametrize("pattern", _OF_MODELS)
def test_patterns_of_known_models_are_taken(pattern: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(pattern), " ")])

    check_patterns(tokenizer)


@pytest.mark.parametrize("pattern", _EXPONENTIAL)
@pytest.mark.parametrize("step", ["pre_tokenizer", "normalizer"])
def test_a_pattern_that_takes_exponential_time_is_refused_at_the_load(
    step: str, pattern: str, tmp_path: Path, model_dir: Callable[..., Path]
) -> None:
    """`a` 22 times and `b`, again and again, took 70 ms each time: a text of 256 Ki characters a quarter of an hour."""
    other = {"behavior": "Isolated", "invert": False} if step == "pre_tokenizer" else {"content": " "}
    kind = {"type": "Split" if other.get("behavior") else "Replace", "pattern": {"Regex": pattern}, **other}
    folder = _changed(model_dir("bert"), tmp_path, {step: kind})

    with pytest.raises(ModelLoadFailed, match="takes exponential time") as refusal:
        load_tokenizer(read_layout(folder))
    assert repr(pattern) in refusal.value.message


def test_an_id_of_more_than_31_bits_fails_its_text_alone(
    tmp_path: Path, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the native form, which declines such a vocabulary: the library writes its JSON in a loop over all ids
    below the largest, some 20 s of processor time."""
    monkeypatch.setattr(tokenizer_module, "wordpiece", lambda tokenizer, specials: None)
    bert = model_dir("bert")
    model = json.loads((bert / "tokenizer.json").read_text())["model"]
    folder = _changed(bert, tmp_path, {"model": {**model, "vocab": {**model["vocab"], "qqq": 2**31}}})
    tokenizer = TextTokenizer(read_layout(folder), 64)

    far, near = tokenizer.encode(["qqq", "fog"], TokenizeOptions())
    (alone,) = tokenizer.encode(["qqq"], TokenizeOptions())

    for one in (far, alone):
        assert isinstance(one, TokenizerFailed)
        assert "a token id of more than 31 bits" in one.message
    assert isinstance(near, Encoded)


def test_a_prompt_may_have_no_tokens(tmp_path: Path, model_dir: Callable[..., Path]) -> None:
    """Pooling then leaves out none."""
    strip = {"type": "Strip", "strip_left": True, "strip_right": True}
    folder = _changed(model_dir("modernbert"), tmp_path, {"normalizer": strip, "post_processor": None})
    tokenizer = TextTokenizer(replace(read_layout(folder), include_prompt=False), 64)

    assert tokenizer.prompt_len("  ") == 0
    assert ids(tokenizer, "fog", TokenizeOptions(prompt="  ")) == ids(tokenizer, "fog", TokenizeOptions())


def _changed(model: Path, tmp_path: Path, changes: dict[str, Any]) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder
