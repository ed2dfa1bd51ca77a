"""Ids are those of the model's tokenizer, limits are the contract's, and a cut never changes a result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.token_ids import ids
from tests.support.models import edit
from tokenizers import Encoding, Tokenizer

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.job import Pair
from teimgr.engine.text.tokenizer import Prompts, TextTokenizer, TokenizeOptions
from teimgr.errors import EmptyInput, InvalidConfig, InvalidInput, TokenizerFailed
from teimgr.models.layout import LateInteraction
from teimgr.models.reading import read_layout

RIGHT, LEFT, OFF = TokenizeOptions(), TokenizeOptions(left=True), TokenizeOptions(truncate=False)


def test_padding_and_truncation_of_the_file_are_not_obeyed(tokenizer: TextTokenizer) -> None:
    assert len(ids(tokenizer, "hi")) == 3
    assert len(ids(tokenizer, "word " * 200)) == 202


def test_truncation_keeps_either_end_and_the_special_tokens(tokenizer: TextTokenizer) -> None:
    text = "one " * 300 + "two " * 300
    left, right = ids(tokenizer, text, LEFT), ids(tokenizer, text, RIGHT)

    assert len(left) == len(right) == 256
    assert left[0] == right[0] == 101
    assert left[-1] == right[-1] == 102
    assert set(right[1:-1]) != set(left[1:-1])


def test_a_text_as_long_as_the_limit_is_no_error(tokenizer: TextTokenizer) -> None:
    fits, over = tokenizer.encode(["word " * 254, "word " * 255], OFF)

    assert isinstance(fits, Encoded)
    assert isinstance(over, InvalidInput)
    assert over.message == "Input validation error: `inputs` must have less than 256 tokens. Given: 257"


def test_texts_are_checked_before_they_cost_time(tokenizer: TextTokenizer) -> None:
    assert isinstance(tokenizer.check("", RIGHT), EmptyInput)
    assert "null" in str(tokenizer.check(None, RIGHT))
    assert tokenizer.check("x" * 64_000, OFF) is None
    assert tokenizer.check("x" * 64_001, RIGHT) is None
    assert str(tokenizer.check("x" * 64_001, OFF)) == (
        "Input validation error: `inputs` must have less than 64000 characters. Given: 64001"
    )


def panic_at_long_texts(tokenizer: TextTokenizer) -> None:
    """A setting that the library refuses by a panic of Rust, as soon as a text is over the limit."""
    tokenizer._wordpiece = None  # all texts to the library
    tokenizer._library._tokenizer.enable_truncation(3, stride=1)


def test_a_panic_of_the_library_fails_its_text_only(tokenizer: TextTokenizer) -> None:
    panic_at_long_texts(tokenizer)
    good, bad, other = tokenizer.encode(["fog", "fog and rain", "rain"], RIGHT)

    assert isinstance(good, Encoded)
    assert isinstance(other, Encoded)
    assert isinstance(bad, TokenizerFailed)
    assert "stride" in bad.message
    with pytest.raises(TokenizerFailed, match="stride"):
        tokenizer.tokenize("fog and rain", True, "")


def test_a_text_that_fails_only_as_a_whole_fails_alone(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortened text did not fill the limit, so the whole one is tokenized: that can fail too."""
    long = "fog " + " " * 70_000 + "fog"
    bound = tokenizer.max_length * 250
    encode = tokenizer._library.encode

    def refuse(texts: Sequence[str], *rest: Any) -> list[Encoding]:
        if any(len(text) > bound for text in texts):
            raise TokenizerFailed("too long")
        return encode(texts, *rest)

    monkeypatch.setattr(tokenizer._library, "encode", refuse)
    good, bad = tokenizer.encode(["fog", "fog rain" + long], RIGHT)

    assert isinstance(good, Encoded)
    assert isinstance(bad, TokenizerFailed)


def test_offsets_are_bytes_and_special_tokens_have_none(tokenizer: TextTokenizer) -> None:
    text = "héllo 世界 ok"
    tokens = tokenizer.tokenize(text, add_special_tokens=True, prompt="")
    raw = text.encode()

    assert [t.text for t in tokens] == ["[CLS]", "héllo", "世", "界", "ok", "[SEP]"]
    assert [t.special for t in tokens] == [True, False, False, False, False, True]
    assert (tokens[0].start, tokens[0].stop) == (None, None)
    assert [raw[t.start : t.stop].decode() for t in tokens[1:-1]] == ["héllo", "世", "界", "ok"]
    assert len(tokenizer.tokenize(text, add_special_tokens=False, prompt="")) == 4
    assert tokenizer.tokenize("b", True, prompt="a ")[2].start == 2


def test_decoding_is_the_way_back(tokenizer: TextTokenizer) -> None:
    encoded = ids(tokenizer, "what is deep learning?")

    assert tokenizer.decode(encoded, skip_special_tokens=True) == "what is deep learning?"
    assert tokenizer.decode(encoded, skip_special_tokens=False).startswith("[CLS]")
    with pytest.raises(EmptyInput, match="input_ids"):
        tokenizer.decode([], skip_special_tokens=True)
    with pytest.raises(TokenizerFailed):
        tokenizer.decode([-1], skip_special_tokens=True)


def test_lower_casing_of_the_old_files_is_obeyed(model_dir: Callable[..., Path]) -> None:
    path = model_dir("roberta", seed=1)
    assert ids(TextTokenizer(read_layout(path), 96), "FOX") != ids(TextTokenizer(read_layout(path), 96), "fox")

    edit(path / "sentence_bert_config.json", do_lower_case=True)
    assert ids(TextTokenizer(read_layout(path), 96), "FOX") == ids(TextTokenizer(read_layout(path), 96), "fox")


def test_prompts_are_found_by_name_and_by_default(model_dir: Callable[..., Path]) -> None:
    layout = read_layout(model_dir("bert", prompts={"q": "ask: ", "d": "say: "}, default_prompt_name="d"))

    assert Prompts(layout).text(None) == "say: "
    assert Prompts(layout, default_name="q").text(None) == "ask: "
    assert Prompts(layout, default_text="free: ").text(None) == "free: "
    assert Prompts(layout, default_text="free: ").text("q") == "ask: "
    with pytest.raises(InvalidConfig, match='Available prompts: \\["q", "d"\\]'):
        Prompts(layout, default_name="x")
    with pytest.raises(InvalidInput, match="`default-prompt-name` is set to `x` but it was not found"):
        Prompts(layout).text("x")


def test_a_model_without_prompts_says_so(minilm: Path) -> None:
    with pytest.raises(InvalidInput, match="no prompts were found in the Sentence Transformers configuration"):
        Prompts(read_layout(minilm)).text("query")


def test_an_older_model_with_a_vocabulary_only_is_converted(
    minilm: Path, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    for name in ("config.json", "vocab.txt", "tokenizer_config.json", "sentence_bert_config.json", "1_Pooling"):
        (tmp_path / name).symlink_to(minilm / name)
    text = "An Ünusual text, with 世界 and [brackets]."

    assert ids(TextTokenizer(read_layout(tmp_path), 256), text) == ids(tokenizer, text)


WORDS = ["fog", "rain", "lamps", "Zürich", "东京", "jumps", "over", "and", "a,", "b!", "(c)", "harbour"]
texts_of_words = st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join)


@pytest.fixture(scope="module")
def pair_readers(model_dir: Callable[..., Path]) -> dict[str, tuple[Path, Any]]:
    """Directories and the tokenizers of transformers for them."""
    from transformers import AutoTokenizer

    paths = {family: model_dir(family) for family in ("bert", "roberta", "xlm_roberta")}
    return {family: (path, AutoTokenizer.from_pretrained(path)) for family, path in paths.items()}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(["bert", "roberta", "xlm_roberta"]),
    pairs=st.lists(st.tuples(texts_of_words, texts_of_words).filter(any), min_size=1, max_size=4),
    limit=st.integers(6, 40),
    left=st.booleans(),
)
def test_pairs_are_those_of_transformers(
    family: str,
    pairs: list[tuple[str, str]],
    limit: int,
    left: bool,
    pair_readers: dict[str, tuple[Path, Any]],
) -> None:
    path, theirs = pair_readers[family]
    theirs.truncation_side = "left" if left else "right"
    tokenizer = TextTokenizer(replace(read_layout(path), type_ids=True), limit)
    ours = tokenizer.encode([Pair(*pair) for pair in pairs], TokenizeOptions(left=left))

    halves = [list(half) for half in zip(*pairs, strict=True)]
    expected = theirs(*halves, truncation="longest_first", max_length=limit, return_token_type_ids=True)
    for i, encoded in enumerate(ours):
        assert isinstance(encoded, Encoded)
        assert encoded.type_ids is not None
        assert encoded.ids.tolist() == expected["input_ids"][i]
        assert encoded.type_ids.tolist() == expected["token_type_ids"][i]


def test_a_pair_is_checked_as_a_whole(tokenizer: TextTokenizer) -> None:
    assert isinstance(tokenizer.check(Pair("", ""), RIGHT), EmptyInput)
    assert tokenizer.check(Pair("fog", ""), RIGHT) is None
    assert tokenizer.check(Pair("x" * 32_000, "x" * 32_000), OFF) is None
    assert "Given: 64001" in str(tokenizer.check(Pair("x" * 32_000, "x" * 32_001), OFF))
    (over,) = tokenizer.encode([Pair("word " * 127, "word " * 127)], OFF)
    assert isinstance(over, InvalidInput)
    assert over.message == "Input validation error: `inputs` must have less than 256 tokens. Given: 257"


def test_a_prompt_goes_before_a_text_and_before_the_first_of_a_pair(tokenizer: TextTokenizer) -> None:
    asked = TokenizeOptions(prompt="ask: ")

    assert ids(tokenizer, "fog", asked) == ids(tokenizer, "ask: fog")
    assert ids(tokenizer, Pair("fog", "rain"), asked) == ids(tokenizer, Pair("ask: fog", "rain"))


def test_ids_are_taken_as_they_are(tokenizer: TextTokenizer) -> None:
    given = np.array([101, *range(2000, 2300), 102], dtype=np.int32)

    assert ids(tokenizer, given[:5]) == given[:5].tolist()
    assert ids(tokenizer, given) == given[:256].tolist()
    assert ids(tokenizer, given, LEFT) == given[-256:].tolist()
    empty, long, strange, negative = tokenizer.encode(
        [given[:0], given, np.array([101, 30522], dtype=np.int32), np.array([-1], dtype=np.int32)], OFF
    )
    assert isinstance(empty, EmptyInput)
    assert "less than 256 tokens. Given: 302" in str(long)
    assert "the token id 30522, which is not in the vocabulary of 30522" in str(strange)
    assert "the token id 4294967295" in str(negative)


def test_a_text_with_a_token_that_has_no_weights_fails_alone(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(model_dir("bert"), path)
    plain = Tokenizer.from_file(str(path / "tokenizer.json"))
    size = plain.get_vocab_size()
    plain.add_tokens(["<added>"])
    plain.save(str(path / "tokenizer.json"))

    good, bad = TextTokenizer(read_layout(path), 96).encode(["fog", "fog <added>"], RIGHT)
    assert isinstance(good, Encoded)
    assert f"the token id {size}, which is not in the vocabulary of {size}" in str(bad)


@pytest.mark.parametrize("by_library", [True, False])
def test_ids_with_gaps_are_compared_with_the_rows_of_weights(
    by_library: bool, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer of no more tokens than there are weights may still have larger ids."""
    path = tmp_path / "model"
    shutil.copytree(model_dir("bert"), path)
    file = path / "tokenizer.json"
    spec = json.loads(file.read_text())
    size = len(spec["model"]["vocab"])
    spec["model"]["vocab"]["fog"] = 40_000
    file.write_text(json.dumps(spec))
    assert Tokenizer.from_file(str(file)).get_vocab_size() == size
    if by_library:
        monkeypatch.setattr("teimgr.engine.text.tokenizer.wordpiece", lambda *_: None)

    tokenizer = TextTokenizer(read_layout(path), 96)

    for texts in (["rain", "fog"], ["fog"]):
        *good, bad = tokenizer.encode(texts, RIGHT)
        assert all(isinstance(one, Encoded) for one in good)
        assert f"the token id 40000, which is not in the vocabulary of {size}" in str(bad)


def test_ids_with_a_prompt_are_read_as_their_text(tokenizer: TextTokenizer) -> None:
    given = np.array(ids(tokenizer, "the harbour"), dtype=np.int32)

    assert ids(tokenizer, given, TokenizeOptions(prompt="ask: ")) == ids(tokenizer, "ask: the harbour")


def test_a_bad_input_among_good_ones_fails_alone(tokenizer: TextTokenizer) -> None:
    results = tokenizer.encode(["fog", None, Pair("", ""), np.array([101, 102], dtype=np.int32), "rain"], RIGHT)

    assert [type(result).__name__ for result in results] == [
        "Encoded",
        "InvalidInput",
        "EmptyInput",
        "Encoded",
        "Encoded",
    ]


LATE = LateInteraction(
    projections=(),
    query_length=8,
    document_length=12,
    expand_queries=True,
    expansion_token_id=103,
    query_prefix_ids=(1,),
    document_prefix_ids=(2,),
)


def test_queries_are_filled_and_documents_are_not(minilm: Path) -> None:
    tokenizer = TextTokenizer(replace(read_layout(minilm), late=LATE), 256)
    query, long_query, document, long_document = (
        result
        for inputs, reading in (
            (["fog", "fog " * 30], TokenizeOptions(query=True)),
            (["fog", "fog " * 30], TokenizeOptions()),
        )
        for result in tokenizer.encode(inputs, reading)
    )
    fog = tokenizer.tokenize("fog", False, "")[0].id

    assert isinstance(query, Encoded)
    assert query.ids.tolist() == [101, 1, fog, 102, 103, 103, 103, 103]
    assert (query.keys, query.query) == (4, True)
    assert isinstance(long_query, Encoded)
    assert long_query.ids.tolist() == [101, 1, *[fog] * 5, 102]
    assert long_query.keys is None
    assert isinstance(document, Encoded)
    assert document.ids.tolist() == [101, 2, fog, 102]
    assert (document.keys, document.query) == (None, False)
    assert isinstance(long_document, Encoded)
    assert long_document.ids.tolist() == [101, 2, *[fog] * 9, 102]


def test_the_limit_of_a_role_counts_its_prefix(minilm: Path) -> None:
    tokenizer = TextTokenizer(replace(read_layout(minilm), late=LATE), 256)
    fits, over = tokenizer.encode(["fog " * 5, "fog " * 6], TokenizeOptions(truncate=False, query=True))

    assert isinstance(fits, Encoded)
    assert str(over) == "Input validation error: `inputs` must have less than 8 tokens. Given: 9"


def test_a_filling_that_is_attended_to_needs_no_keys(minilm: Path) -> None:
    tokenizer = TextTokenizer(replace(read_layout(minilm), late=replace(LATE, attend_to_expansion=True)), 256)
    (query,) = tokenizer.encode(["fog"], TokenizeOptions(query=True))

    assert isinstance(query, Encoded)
    assert (len(query.ids), query.keys) == (8, None)


def test_a_text_that_is_tokenized_in_parts_has_the_tokens_of_the_whole(
    model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "fog over Zürich, 京 and *rain* in the harbour\n" * 40
    for family in ("bert", "roberta", "xlm_roberta", "qwen2"):
        tokenizer = TextTokenizer(read_layout(model_dir(family)), 512)
        whole = [tokenizer.tokenize(text, specials, "") for specials in (True, False)]
        with monkeypatch.context() as patch:
            patch.setattr("teimgr.engine.text.tokenizer._SPANS_AT_ONCE", 7)
            assert [tokenizer.tokenize(text, specials, "") for specials in (True, False)] == whole
        with monkeypatch.context() as patch:
            patch.setattr("teimgr.engine.text.tokenizer.MAX_CHARACTERS", 100)
            assert [tokenizer.tokenize(text, specials, "") for specials in (True, False)] == whole
            with pytest.raises(InvalidInput, match="must have a space within 100 characters"):
                tokenizer.tokenize("\U0001f600" * 300, True, "")


@pytest.mark.parametrize("text", [". " * 150_000, "." * 262_144])
def test_a_long_text_is_tokenized_in_steps(model_dir: Callable[..., Path], text: str) -> None:
    tokenizer = TextTokenizer(read_layout(model_dir("bert")), 8192)
    steps, count = tokenizer.tokenized(text, True, ""), 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            spans = end.value
            break
        count += 1
    assert len(spans) == text.count(".") + 2
    assert (spans[0].text, spans[1].start, spans[-2].stop, spans[-1].text) == ("[CLS]", 0, len(text.rstrip()), "[SEP]")
    assert count >= len(spans) // 16_384


def test_too_many_ids_to_decode_are_refused(tokenizer: TextTokenizer) -> None:
    assert tokenizer.decode([7592] * 64_000, True)
    with pytest.raises(InvalidInput, match=r"`input_ids` must have at most 64000 ids\. Given: 64001"):
        tokenizer.decode([7592] * 64_001, True)
