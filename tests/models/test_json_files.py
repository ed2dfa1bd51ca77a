"""JSON files of a model: lengths, positions, broken files."""

from __future__ import annotations

from pathlib import Path

import pytest

from teimgr.errors import ModelLoadFailed
from teimgr.models.json_files import TokenFiles, max_length, position_offset
from teimgr.models.reading import read_layout
from tests.support.models import build, edit, read, write


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return build("bert", tmp_path / "model")


def test_the_length_limit_never_exceeds_the_positions(bert: Path) -> None:
    edit(bert / "sentence_bert_config.json", max_seq_length=4000)
    assert read_layout(bert).max_length == 128

    edit(bert / "config.json", model_type="roberta", pad_token_id=1)
    assert read_layout(bert).max_length == 126


def test_without_a_saved_length_the_tokenizer_and_the_positions_decide(bert: Path) -> None:
    (bert / "sentence_bert_config.json").unlink()
    assert read_layout(bert).max_length == 128

    edit(bert / "tokenizer_config.json", model_max_length=77)
    assert read_layout(bert).max_length == 77

    config = read(bert / "tokenizer_config.json")
    del config["model_max_length"]
    write(bert / "tokenizer_config.json", config | {"max_len": 33})  # its name before 2020
    assert read_layout(bert).max_length == 33


def test_a_size_that_config_json_leaves_out_is_that_of_its_class_by_its_own_name(tmp_path: Path) -> None:
    """GPT-2 calls its positions n_positions, of which there are 1,024; RoBERTa's padding token is 1."""
    assert max_length({"model_type": "gpt2"}, {}, {}) == 1024
    assert max_length({"model_type": "gpt2", "n_positions": 256}, {}, {}) == 256
    assert position_offset({"model_type": "roberta"}) == 2
    assert max_length({"model_type": "roberta"}, {}, {}) == 510


@pytest.mark.parametrize("model_type", ["longformer", "luke", "ibert", "lilt", "markuplm", "layoutlmv3", "esm"])
def test_positions_behind_the_padding_token_are_not_a_texts(model_type: str) -> None:
    """sentence-transformers takes all of them, and fails for a text of as many tokens."""
    config = {"model_type": model_type, "max_position_embeddings": 130, "pad_token_id": 1}
    config |= {"vocab_size": 300, "position_embedding_type": "absolute"}

    assert position_offset(config) == 2
    assert max_length(config, {}, {"model_max_length": 512}) == 128
    assert max_length(config, {"max_seq_length": 200}, {}) == 128


@pytest.mark.parametrize("model_type", ["xglm", "rwkv", "nemotron_h", "jamba", "kimi_linear", "esm", "qwen3"])
def test_a_length_beyond_positions_without_a_table_counts(model_type: str) -> None:
    config = {"model_type": model_type, "max_position_embeddings": 128, "position_embedding_type": "rotary"}

    assert max_length(config, {"max_seq_length": 200}, {}) == 200
    assert max_length(config, {}, {"model_max_length": 512}) == 128


def test_alibi_of_mpt_ends_at_its_own_number() -> None:
    assert max_length({"model_type": "mpt", "max_seq_len": 64}, {"max_seq_length": 200}, {}) == 64


def test_mpnet_has_two_positions_less_than_its_table(tmp_path: Path) -> None:
    path = build("mpnet", tmp_path)
    (path / "sentence_bert_config.json").unlink()

    assert (read_layout(path).max_length, read_layout(path).position_offset) == (128, 2)


def test_broken_json_names_the_file(bert: Path) -> None:
    (bert / "config.json").write_text("{")

    with pytest.raises(ModelLoadFailed, match=r"config\.json is not valid JSON"):
        read_layout(bert)


@pytest.mark.parametrize("family", ["gpt2", "gptj"])
def test_token_types_that_the_library_takes_for_words_refuse_the_model(tmp_path: Path, family: str) -> None:
    """uer/gpt2-chinese-*: BERT's tokenizer gives types, and GPT-2 adds the vector of the word 0 by them."""
    path = build(family, tmp_path)
    edit(path / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    assert read_layout(path).poolings

    edit(path / "tokenizer_config.json", model_input_names=None, tokenizer_class="BertTokenizer")
    with pytest.raises(ModelLoadFailed, match=f"gives token types, and a {family} model of the library adds"):
        read_layout(path)


@pytest.mark.parametrize("model_type", ["squeezebert", "ernie", "megatron-bert", "layoutlm", "bert"])
def test_a_pairs_second_text_has_its_type_where_the_librarys_class_gives_one(bert: Path, model_type: str) -> None:
    """BertTokenizer is the class of more models than BERT, and type_vocab_size has a default."""
    config, given = read(bert / "config.json"), read(bert / "tokenizer_config.json")
    del config["type_vocab_size"]
    given.pop("model_input_names", None)
    given.pop("tokenizer_class", None)
    write(bert / "config.json", config | {"model_type": model_type})
    write(bert / "tokenizer_config.json", given)
    assert TokenFiles(bert).has_types(read(bert / "config.json"))

    write(bert / "tokenizer_config.json", given | {"tokenizer_class": "SqueezeBertTokenizer"})
    assert TokenFiles(bert).has_types(read(bert / "config.json"))
    edit(bert / "config.json", type_vocab_size=1)
    assert not TokenFiles(bert).has_types(read(bert / "config.json"))
