"""What comes with a model's tokenizer and would stop a worker is refused by name."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.token_ids import ids
from tests.support.models import CORPUS, TEXTS, build, edit, write
from tests.support.models.dual_encoders import build_siglip_of_pieces
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.images.inputs import DualTokenizer
from teimgr.engine.text.boundaries import _WORD_PATTERNS, breaks_at_spaces
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.engine.text.tokenizer_library import check_patterns, load_tokenizer
from teimgr.errors import ModelLoadFailed, TokenizerFailed
from teimgr.models.layout import Layout
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


@pytest.mark.parametrize("family", ["bert", "modernbert"])
@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.json"])
def test_an_id_far_beyond_the_tokens_is_refused_in_little_time(
    family: str, file: str, tmp_path: Path, model_dir: Callable[..., Path]
) -> None:
    """The library writes a vocabulary in a loop over all ids below the largest, some 20 s of processor time."""
    folder = _with_id(model_dir(family), tmp_path, 2**32 - 1)
    if file == "vocab.json":
        write(folder / file, json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
        (folder / "tokenizer.json").unlink()
    layout = read_layout(folder)
    began = time.process_time()

    with pytest.raises(ModelLoadFailed, match=f"{file} has the token id 4294967295, with [0-9]+ tokens"):
        load_tokenizer(layout)
    assert time.process_time() - began < 2


def test_ids_up_to_the_models_rows_are_read(tmp_path: Path, model_dir: Callable[..., Path]) -> None:
    """With a gap below them, as of tokens added up to the end of a padded table."""
    folder = _with_id(model_dir("bert"), tmp_path, 1_999_999)
    edit(folder / "config.json", vocab_size=2_000_000)

    assert 1_999_999 in ids(TextTokenizer(read_layout(folder), 64), "qqq", TokenizeOptions())


def _with_id(model: Path, tmp_path: Path, id: int) -> Path:
    given = json.loads((model / "tokenizer.json").read_text())["model"]
    return _changed(model, tmp_path, {"model": {**given, "vocab": {**given["vocab"], "qqq": id}}})


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


ODD = ("Ａｂｃ ①  ﬁne", "x\u00a0y\tz", " leading and trailing ", "🙂 unknown 東", "e\u0301")
XLM = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}


def trained(folder: Path, name: str, family: str, tokenizer: str, **options: Any) -> Any:
    """Write a model's small files with a SentencePiece model for a tokenizer; gives the processor."""
    spm = pytest.importorskip("sentencepiece", reason="the extra `sentencepiece` is not installed")
    buffer = io.BytesIO()
    defaults = {"vocab_size": 400, "model_type": "unigram", "hard_vocab_limit": False, "minloglevel": 2}
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_writer=buffer, **(defaults | XLM | options)
    )
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(buffer.getvalue())
    write(folder / "tokenizer_config.json", {"tokenizer_class": tokenizer, "model_max_length": 512})
    config = {"model_type": family, "vocab_size": 1000, "max_position_embeddings": 514, "pad_token_id": 1}
    write(folder / "config.json", config)
    return spm.SentencePieceProcessor(model_proto=buffer.getvalue())


def layout_of(folder: Path) -> Layout:
    return read_layout(folder, "mean")


def ids_of(folder: Path) -> list[list[int]]:
    encoded = TextTokenizer(layout_of(folder), 512).encode([*TEXTS, *ODD], TokenizeOptions())
    return [each.ids.tolist() for each in encoded]  # type: ignore[union-attr]


def test_xlm_roberta_has_the_ids_of_fairseq(tmp_path: Path) -> None:
    """SentencePiece's ids behind four of fairseq's; unknown characters are its third."""
    pieces = trained(tmp_path, "sentencepiece.bpe.model", "xlm-roberta", "XLMRobertaTokenizer")
    expected = [[0, *(id + 1 if id else 3 for id in pieces.encode(text)), 2] for text in (*TEXTS, *ODD)]

    assert ids_of(tmp_path) == expected


def test_deberta_normalizes_as_its_sentencepiece_model_says(tmp_path: Path) -> None:
    """microsoft/deberta-v3-*: transformers' own conversion leaves its compatibility forms out."""
    pieces = trained(
        tmp_path, "spm.model", "deberta-v2", "DebertaV2Tokenizer", control_symbols=["[CLS]", "[SEP]"], pad_id=-1
    )
    found = ids_of(tmp_path)
    size = pieces.get_piece_size()

    assert [[id for id in ids[1:-1] if id < size] for ids in found] == [pieces.encode(text) for text in (*TEXTS, *ODD)]


def test_t5_ends_every_text(tmp_path: Path) -> None:
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    pieces = trained(tmp_path, "spiece.model", "t5", "T5Tokenizer", **ids)

    assert ids_of(tmp_path) == [[*pieces.encode(text), 1] for text in (*TEXTS, *ODD)]


AWKWARD = (
    *(
        "",
        "!",
        "  leading, and trailing ",
        "ΟΔΥΣΣΕΥΣ ΣΑΣ' Σ",
        "ΑΣ'Α",
        "ʰΣ A\u0345Σ",
        "İstanbul ǅ ẞ ß",
        "▁a▁b ▁ c",
        " ▁ ",
    ),
    *(
        "a\u00a0b\tc\x1cd\x85e\u3000f",
        "\ufeffbom",
        "a\u200bb\x00c",
        "x_y=z; #include <a.h>",
        "don't rock'n'roll",
        "<UNK>",
    ),
    *(
        "東京は日本の首都です。",
        "مَرْحَبًا फ़िल्म שָׁלוֹם Việt",
        "👨‍👩‍👧 👍🏽 ❤️ 🇩🇪",
        "½ ② ﬁne e\u0301 — «x»",
        "rain, " * 200,
        "é " * 2000,
    ),
)


def siglip_of_pieces(folder: Path, **options: Any) -> Any:
    pytest.importorskip("sentencepiece", reason="the extra `sentencepiece` is not installed")
    return build_siglip_of_pieces(folder, **options)


def test_siglip_has_the_ids_of_its_slow_tokenizer(tmp_path: Path) -> None:
    slow = siglip_of_pieces(tmp_path)
    texts = [text for text in (*TEXTS, *ODD, *AWKWARD) if text]
    expected = slow(texts, padding="max_length", truncation=True, max_length=64)["input_ids"]
    tokenizer = DualTokenizer(read_layout(tmp_path), 64)
    found = tokenizer.encode(texts, TokenizeOptions())

    assert [each.ids.tolist() for each in found] == expected  # type: ignore[union-attr]
    assert breaks_at_spaces(tokenizer.library)  # so long texts are cut before


@pytest.mark.parametrize(
    ("text", "refusal"), [("a </s> b", "the token </s>"), (f"{'é' * 1023}²\u0301", "a character with marks")]
)
def test_a_text_that_siglips_slow_tokenizer_reads_otherwise_is_refused(text: str, refusal: str, tmp_path: Path) -> None:
    """The tokenizers library drops the accent of a superscript; behind a special token no word begins."""
    slow = siglip_of_pieces(tmp_path)
    tokenizer = DualTokenizer(read_layout(tmp_path), 64)
    failed, read = tokenizer.encode([text, "a photo"], TokenizeOptions())

    assert tokenizer.library.encode(text).ids != slow(text)["input_ids"]
    assert isinstance(failed, TokenizerFailed)
    assert refusal in failed.message
    assert "add a tokenizer.json" in failed.message
    assert isinstance(read, Encoded)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"model_type": "bpe"}, "not a model of kind Unigram"),
        ({"remove_extra_whitespaces": False}, "SiglipTokenizer does"),
    ],
)
def test_a_siglip_of_other_pieces_is_refused(options: dict[str, Any], refusal: str, tmp_path: Path) -> None:
    siglip_of_pieces(tmp_path, **options)

    with pytest.raises(ModelLoadFailed, match=refusal):
        DualTokenizer(read_layout(tmp_path), 64)


def test_a_tokenizer_that_cuts_otherwise_is_refused(tmp_path: Path) -> None:
    """A model of whole words, which are never cut: transformers takes it for one of pieces."""
    trained(tmp_path, "spiece.model", "t5", "T5Tokenizer", model_type="word", pad_id=3)

    with pytest.raises(ModelLoadFailed, match=r"spiece.model cuts .* in other places than SentencePiece"):
        TextTokenizer(layout_of(tmp_path), 512)


def test_without_the_extra_the_hint_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spiece.model").write_bytes(b"\x0a\x00")
    write(tmp_path / "config.json", {"model_type": "t5", "n_positions": 512})
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "model_max_length": 512})
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)

    with pytest.raises(ModelLoadFailed, match="install teimgr with the extra `sentencepiece`"):
        TextTokenizer(layout_of(tmp_path), 512)


OWN = """
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        end = ("[MASK]", self.convert_tokens_to_ids("[MASK]"))
        self._tokenizer.post_processor = processors.TemplateProcessing(single="$A [MASK]", special_tokens=[end])
"""
LOUD = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    def _encode_plus(self, text, *args, **kwargs):
        return super()._encode_plus(f"{text}!", *args, **kwargs)
"""


@pytest.mark.parametrize(("code", "refusal"), [(OWN, None), (LOUD, "OwnTokenizer, does more than its fast form")])
def test_the_tokenizers_own_code_counts_where_it_is_trusted(
    code: str, refusal: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer.json beside it is what the code begins with, not what it makes of it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = build("bert", tmp_path / "model")
    (path / "own_tokenizer.py").write_text(code)
    edit(
        path / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]},
    )
    with pytest.raises(ModelLoadFailed, match=r"own_tokenizer\.OwnTokenizer"):
        read_layout(path)
    layout = read_layout(path, trust_remote_code=True)
    if refusal is not None:
        with pytest.raises(ModelLoadFailed, match=refusal):
            TextTokenizer(layout, 96)
        return
    (each,) = TextTokenizer(layout, 96).encode(["fog"], TokenizeOptions())
    plain = TextTokenizer(replace(layout, own_tokenizer=False), 96).encode(["fog"], TokenizeOptions())[0]

    assert each.ids.tolist() == [*plain.ids[1:-1].tolist(), 4]  # type: ignore[union-attr]
