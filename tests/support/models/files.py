"""The files of models: JSON and lists of modules, texts, and tokenizers trained on them."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as token_models
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

CORPUS = (
    "The quick brown fox jumps over the lazy dog while seven wizards mix a potion of zinc and jade.",
    "An embedding is a point in space: texts that mean the same lie near one another, whatever their words.",
    "Rain fell on the harbour all night; by morning the boats lay in fog, their lamps still lit.",
    "def add(a, b): return a + b  # 1234567890 !?()[]{}<>@&%$",
    "Zürich, Łódź and São Paulo are cities; 东京 and 北京 are too. Καλημέρα κόσμε, привет мир.",
    "How long does a query wait while a bulk job runs? Not longer than one small batch.",
)

# The words of a yes-or-no reranker's template, so that it takes few of a tiny model's tokens.
INSTRUCTIONS = (
    "system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. ",
    'Note that the answer can only be "yes" or "no".',
    "user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: ",
    "<Document>: assistant Find what answers the query",
) * 4

JUDGEMENTS = (
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant. query: document: Relevance:",
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document",
    "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment",
    "(0 for not relevant, 1 for relevant). Given a query A and a passage B, determine whether the passage contains",
    "an answer to the query by providing a prediction of either 'Yes' or 'No'.",
) * 4

# Lengths from one token to past the limit, several of them equal.
TEXTS = (
    "fog",
    "dog",
    "The quick brown fox",
    "An embedding is a point in space: texts that mean the same lie near one another.",
    "Zürich, Łódź and São Paulo are cities; 东京 and 北京 are too.",
    "How long does a query wait while a bulk job runs?",
    "rain " * 30,
    "The lazy dog sleeps while the boats lie in fog and the lamps are still lit. " * 9,
    "a b c",
    "x y z",
)

# Queries and documents: short against long, long against short, both past the limit, equal lengths.
PAIRS = (
    ("fog", "dog"),
    ("Where do the boats lie?", "Rain fell on the harbour all night; by morning the boats lay in fog."),
    ("How long does a query wait while a bulk job runs?", "Not longer than one small batch."),
    ("The quick brown fox", TEXTS[7]),
    (TEXTS[7], "a b c"),
    (TEXTS[6], TEXTS[7]),
    ("a b c", "x y z"),
    ("Zürich", "Zürich, Łódź and São Paulo are cities; 东京 and 北京 are too."),
)


def write(path: Path, content: Any) -> None:
    """Write `content` as JSON, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    write(path, {key: value for key, value in content.items() if value is not None})


def write_modules(folder: Path, *types: str) -> None:
    """modules.json: the first module at the root, the others in `{index}_{name}`; `types` are dotted class names."""
    names = [dotted.rsplit(".", 1)[-1] for dotted in types]
    paths = ["" if index == 0 else f"{index}_{name}" for index, name in enumerate(names)]
    rows = [
        {"idx": index, "name": str(index), "path": path, "type": dotted}
        for index, (path, dotted) in enumerate(zip(paths, types, strict=True))
    ]
    write(folder / "modules.json", rows)


def pad_and_truncate(path: Path) -> None:
    """Put padding and truncation into tokenizer.json, as training leaves them there; an engine must ignore them."""
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": content["added_tokens"][0]["content"],
    }
    write(path, content)


Wrapped = transformers.PreTrainedTokenizerFast

# Trained on the paragraph once: the trainer breaks ties at random, so that each run would cut words differently.
_PIECES = Path(__file__).with_name("word_pieces.txt")
_BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
_QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def word_piece(typed: bool = True, unused: int = 0) -> Callable[[], Wrapped]:
    """BERT's, lower-casing; `typed` as tokenizers of models with two token types are, `unused` as [unused0], …"""

    def make() -> Wrapped:
        # [unused0] and its like are ordinary entries of BERT's vocabulary: text never becomes one of them.
        entries = [*_BERT, *(f"[unused{index}]" for index in range(unused)), *_PIECES.read_text().splitlines()]
        vocabulary = {entry: index for index, entry in enumerate(entries)}
        tokenizer = Tokenizer(token_models.WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.add_special_tokens(_BERT)
        _frame(tokenizer, "[CLS]", "[SEP]", "[SEP]")
        return _wrapped(tokenizer, _BERT, typed)

    return make


def byte_level(framed: bool) -> Callable[[], Wrapped]:
    """Byte-level BPE; `framed` as RoBERTa has it, else only an end token as Qwen's embedding models have it."""

    def make() -> Wrapped:
        tokenizer = _byte_level(_ROBERTA, CORPUS)
        _frame(tokenizer, "<s>" if framed else None, "</s>", "</s> </s>" if framed else "</s>", typed=False)
        return _wrapped(tokenizer, ["<pad>", "<unk>", "<s>", "</s>", "<mask>"])

    return make


def qwen() -> Wrapped:
    """As `byte_level(framed=False)`, with the words that transformers' Qwen2Tokenizer makes regardless of the file."""
    wrapped = byte_level(framed=False)()
    _cut_as_qwen(wrapped.backend_tokenizer)
    return wrapped


def _cut_as_qwen(tokenizer: Tokenizer) -> None:
    words = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def chat() -> Wrapped:
    """Qwen's: no frame at all, the marks of its chat format, and the words "yes" and "no" as tokens."""
    tokenizer = _byte_level(_QWEN, (*CORPUS, *["yes", "no"] * 40, *INSTRUCTIONS), 600)
    tokenizer.add_tokens(["<think>", "</think>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>", model_max_length=512
    )


def judging(begins: bool) -> Wrapped:
    """As `chat`, with the word "Yes"; `begins` as Gemma's, which has a token before every text."""
    words = (*CORPUS, *["Yes", "yes"] * 40, *JUDGEMENTS)
    tokenizer = _byte_level(["<bos>", *_QWEN] if begins else _QWEN, words, 700)
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    else:
        _cut_as_qwen(tokenizer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        bos_token="<bos>" if begins else None,
        model_max_length=512,
    )


def unigram(begin: str | None, specials: list[str] | None = None) -> Callable[[], Wrapped]:
    """SentencePiece's kind; `begin` is the token before a text, `specials` are start, padding, end, unknown, mask."""

    def make() -> Wrapped:
        start, pad, end, unknown, mask = names = specials or _ROBERTA
        tokenizer = Tokenizer(token_models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=names, unk_token=unknown)
        tokenizer.train_from_iterator(CORPUS, trainer)
        double = f"{end} {end}" if begin == "<s>" else end
        _frame(tokenizer, begin, end, double, typed=begin == "[CLS]")
        return _wrapped(tokenizer, [pad, unknown, start, end, mask], typed=begin == "[CLS]")

    return make


def clip() -> Tokenizer:
    """Byte-level BPE with the steps of transformers' CLIPTokenizer, whose words never have spaces."""
    start, end, last = "<|startoftext|>", "<|endoftext|>", "</w>"
    tokenizer: Tokenizer = transformers.CLIPTokenizer().backend_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, end_of_word_suffix=last)
    tokenizer.train_from_iterator(CORPUS, trainer)
    merges = [(first, second) for first, second in json.loads(tokenizer.to_str())["model"]["merges"]]
    # Any byte may end a word, and a training knows those of its texts alone.
    entries = [*alphabet, *(byte + last for byte in alphabet), *(first + second for first, second in merges)]
    vocabulary = {entry: index for index, entry in enumerate(dict.fromkeys([*entries, start, end]))}
    made: Tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=merges).backend_tokenizer
    return made


def siglip() -> Tokenizer:
    """Unigram with what SiglipTokenizer does to a text first: lower case, no punctuation, single spaces."""
    tokenizer = Tokenizer(token_models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(Regex(f"[{re.escape(string.punctuation)}]"), ""),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    _frame(tokenizer, None, "</s>", "</s>", typed=False)
    return tokenizer


def with_marks(tokenizer: Wrapped, *marks: str) -> Wrapped:
    """`tokenizer` with `marks` (PyLate's "[Q] " and "[D] ") as tokens of its own."""
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return tokenizer


def _byte_level(specials: list[str], corpus: tuple[str, ...], size: int = 400) -> Tokenizer:
    tokenizer = Tokenizer(token_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _frame(tokenizer: Tokenizer, begin: str | None, end: str, between: str, typed: bool = True) -> None:
    """One text is `begin` A `end`, a pair `begin` A `between` B `end`, whose B has token type 1 where `typed`."""
    first = [begin] if begin else []
    second = ":1" if typed else ""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*first, "$A", end]),
        pair=" ".join([*first, "$A", between, f"$B{second}", f"{end}{second}"]),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (*first, end)],
    )


def _wrapped(tokenizer: Tokenizer, names: list[str], typed: bool = False) -> Wrapped:
    pad, unknown, start, end, mask = names
    types: dict[str, Any] = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if typed else {}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unknown,
        cls_token=start,
        sep_token=end,
        mask_token=mask,
        model_max_length=512,
        **types,
    )
