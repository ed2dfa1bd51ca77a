"""Tokens that a tokenizer's other files declare are tokens, as with transformers, whatever tokenizer.json has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.models import CORPUS, build, edit, read, write
from transformers import AutoTokenizer

from teimgr.engine.text.tokenizer_config import contradictions
from teimgr.engine.text.tokenizer_library import load_tokenizer
from teimgr.errors import ModelLoadFailed
from teimgr.models.reading import read_layout

# A new word, one of the vocabulary, one with its flags, and a mark within words.
TEXTS = (*CORPUS, "seven wizards", "foggy fog", " two <mark>  three", "wiz[mark]ards WIZARDS")
_FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
_CONFIG, _OLDER, _ROLES = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"


@pytest.fixture(params=["bert", "roberta"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model with vectors of eight more tokens than its tokenizer has."""
    build(request.param, tmp_path)
    edit(tmp_path / "config.json", vocab_size=read(tmp_path / "config.json")["vocab_size"] + 8)
    return tmp_path


def mask_of(folder: Path) -> dict[str, Any]:
    """The mask of tokenizer.json with a flag that it does not have there, by its id."""
    token = next(t for t in read(folder / "tokenizer.json")["added_tokens"] if "mask" in t["content"].lower())
    return {str(token.pop("id")): {**token, "rstrip": True}}


@pytest.mark.parametrize(
    "files",
    [
        {_CONFIG: {"additional_special_tokens": ["wizards", "fog"]}},
        {_CONFIG: {"extra_special_tokens": [{"__type": "AddedToken", "content": "<mark>", **_FLAGS, "lstrip": True}]}},
        {_CONFIG: {"extra_special_tokens": {"mark_token": "[mark]"}}},
        {_CONFIG: {"pad_token": "[mark]"}},
        {_CONFIG: {"added_tokens_decoder": {"900": {"content": "wizards", **_FLAGS, "special": False}}}},
        {
            _CONFIG: {
                "added_tokens_decoder": {"9": {"content": "wizards", **_FLAGS}, "8": {"content": "zinc", **_FLAGS}}
            }
        },
        {_OLDER: {"wizards": 901, "[mark]": 900}},
        {_OLDER: {"[mark]": 900}, _ROLES: {"additional_special_tokens": ["[mark]", "fog"]}},
    ],
    ids=["list", "flags", "by-role", "pad", "listed", "order", "older", "roles"],
)
def test_a_declared_token_is_one(model: Path, files: dict[str, Any]) -> None:
    for file, content in files.items():
        write(model / file, {**(read(model / file) if file == _CONFIG else {}), **content})
    theirs = AutoTokenizer.from_pretrained(model)
    before = [encoding.ids for encoding in load_tokenizer(read_layout(model)).encode_batch(list(TEXTS))]

    assert before == theirs(list(TEXTS))["input_ids"]
    assert contradictions(read_layout(model), load_tokenizer(read_layout(model))) == ()


def test_flags_of_a_listed_token_count(model: Path) -> None:
    edit(model / _CONFIG, added_tokens_decoder=mask_of(model))
    text = "a {} b".format(next(iter(mask_of(model).values()))["content"])

    ids = load_tokenizer(read_layout(model)).encode(text).ids
    assert ids == AutoTokenizer.from_pretrained(model)(text)["input_ids"]


def test_a_declared_token_without_a_vector_is_a_warning(model: Path) -> None:
    edit(model / _CONFIG, extra_special_tokens=[f"[{at}]" for at in range(9)])
    layout = read_layout(model)

    assert contradictions(layout, load_tokenizer(layout)) == (
        "tokenizer_config.json has the token '[8]', and the model no vector of it: it is read as a word",
    )


def test_what_is_no_token_is_refused_by_name(model: Path) -> None:
    edit(model / _CONFIG, added_tokens_decoder={"9": {"text": "wizards"}})

    with pytest.raises(ModelLoadFailed, match=r"'text': 'wizards'.* where a token should be"):
        load_tokenizer(read_layout(model))
