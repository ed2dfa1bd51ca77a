"""A language model as reranker: two logits behind the last token, and no others are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.engine.plain_models import CPU, OFFSETS, PAD, layout_of, logits_of, random_texts, run, save_headed

from teimgr.engine.backbone import Batching, WholeModel
from teimgr.engine.batching.batch import Encoded
from teimgr.engine.heads.scoring import activate, check_activation
from teimgr.engine.job import Output
from teimgr.engine.model import Model, load_model
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import Backbone, CausalRerank, ScoringConfig
from teimgr.spec import Kind

CAUSAL = transformers.AutoModelForCausalLM


def load(folder: Path, yes: int, no: int | None) -> Model:
    scoring = ScoringConfig(("score",), "sigmoid", CausalRerank(yes, no))
    return load_model(layout_of(folder, Backbone.CAUSAL_LM, Kind.RERANKER, scoring=scoring), CPU)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_score_is_the_difference_of_two_logits(family: str, tied: bool, tmp_path: Path) -> None:
    theirs = save_headed(family, CAUSAL, tmp_path, tie_word_embeddings=tied)
    model, texts = load(tmp_path, 9, 40), random_texts()
    model.backbone.use(Batching.BY_RUN)

    assert model.widths == {Output.SCORES: 1}
    for text, score in zip(texts, run(model, texts, Output.SCORES), strict=True):
        logits = logits_of(theirs, text)[-1]
        np.testing.assert_allclose(score, [logits[9] - logits[40]], atol=1e-5)


def test_without_a_false_token_the_score_is_one_logit(tmp_path: Path) -> None:
    theirs = save_headed("qwen3", CAUSAL, tmp_path)
    texts = random_texts()

    for text, score in zip(texts, run(load(tmp_path, 9, None), texts, Output.SCORES), strict=True):
        np.testing.assert_allclose(score, [logits_of(theirs, text)[-1, 9]], atol=1e-5)


def test_what_the_model_does_to_its_logits_is_done_to_two(tmp_path: Path) -> None:
    """Gemma 2 caps them."""
    config = transformers.Gemma2Config(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        final_logit_softcapping=2.0,
    )
    theirs = transformers.Gemma2ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    texts = random_texts()

    for text, score in zip(texts, run(load(tmp_path, 9, 40), texts, Output.SCORES), strict=True):
        logits = logits_of(theirs, text)[-1]
        np.testing.assert_allclose(score, [logits[9] - logits[40]], atol=1e-5)


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    save_headed("qwen3", CAUSAL, tmp_path)

    with pytest.raises(ModelLoadFailed, match="no output for the tokens"):
        load(tmp_path, 9, 120)


PACKED = (
    "albert",
    "bert",
    "camembert",
    "distilbert",
    "electra",
    "eurobert",
    "gte",
    "jina_v3",
    "llama",
    "mistral",
    "modernbert",
    "nomic_bert",
    "qwen2",
    "qwen3",
    "roberta",
    "xlm_roberta",
)
BY_EQUAL_LENGTH = ("deberta_v2", "mpnet", "t5")
SEQUENCE = transformers.AutoModelForSequenceClassification


def load_classifier(folder: Path, family: str = "") -> Model:
    offset = OFFSETS.get(family, 0)
    return load_model(layout_of(folder, Backbone.SEQUENCE_CLASSIFICATION, Kind.CLASSIFIER, position_offset=offset), CPU)


@pytest.mark.parametrize("family", [*PACKED, *BY_EQUAL_LENGTH])
def test_logits_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    theirs = save_headed(family, SEQUENCE, tmp_path, num_labels=3)
    model, texts = load_classifier(tmp_path, family), random_texts()
    model.backbone.use(Batching.BY_RUN if family in PACKED else Batching.EQUAL_LENGTH)

    assert model.outputs == {Output.SCORES}
    assert model.widths == {Output.SCORES: 3}
    assert isinstance(model.backbone, WholeModel) == (family == "t5")
    for text, ours in zip(texts, run(model, texts, Output.SCORES), strict=True):
        np.testing.assert_allclose(ours, logits_of(theirs, text), atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_modernbert_pools_for_its_head_as_its_configuration_says(pooling: str, tmp_path: Path) -> None:
    theirs = save_headed("modernbert", SEQUENCE, tmp_path, num_labels=2, classifier_pooling=pooling)
    model, texts = load_classifier(tmp_path), random_texts()
    model.backbone.use(Batching.BY_RUN)

    for text, ours in zip(texts, run(model, texts, Output.SCORES), strict=True):
        np.testing.assert_allclose(ours, logits_of(theirs, text), atol=1e-5)


@pytest.mark.parametrize("pad", [PAD, None])
def test_a_decoder_reads_the_token_that_the_library_takes_for_the_last(pad: int | None, tmp_path: Path) -> None:
    """It skips what looks like padding at the end, and nothing where the model names no padding token."""
    theirs = save_headed("qwen3", SEQUENCE, tmp_path, num_labels=1, pad_token_id=pad)
    model, texts = load_classifier(tmp_path), random_texts()
    for text in texts[:2]:
        text[-2:] = PAD  # the second is nothing else
    model.backbone.use(Batching.BY_RUN)

    for text, ours in zip(texts, run(model, texts, Output.SCORES), strict=True):
        np.testing.assert_allclose(ours, logits_of(theirs, text), atol=1e-5)


def test_the_plain_forward_is_the_library_with_types_and_keys(tmp_path: Path) -> None:
    theirs = save_headed("bert", SEQUENCE, tmp_path, num_labels=2)
    model = load_classifier(tmp_path)
    (text,) = random_texts([8])
    types = np.array([0, 0, 0, 1, 1, 1, 1, 1], dtype=np.uint8)
    encoded = Encoded(text, types, keys=6)
    with torch.inference_mode():
        truth = theirs(
            input_ids=torch.from_numpy(text.astype(np.int64))[None],
            token_type_ids=torch.from_numpy(types.astype(np.int64))[None],
            attention_mask=torch.tensor([[1] * 6 + [0] * 2]),
        ).logits

    np.testing.assert_allclose(model.run_reference(encoded)[Output.SCORES].values, truth, atol=1e-6)
    batch = [encoded, Encoded(text), encoded]  # in one run with a text that has neither
    for ours, wanted in zip(run(model, batch, Output.SCORES), (truth, logits_of(theirs, text), truth), strict=True):
        np.testing.assert_allclose(ours, wanted.reshape(-1), atol=1e-5)


@pytest.mark.parametrize("family", ["albert", "bert", "deberta_v2", "modernbert", "qwen3"])
def test_sixteen_bits_stay_close(family: str, tmp_path: Path) -> None:
    theirs = save_headed(family, SEQUENCE, tmp_path, num_labels=3)
    model, texts = load_classifier(tmp_path), random_texts()
    model.backbone.convert(torch.bfloat16)
    ours = np.array(run(model, texts, Output.SCORES))
    truth = np.array([logits_of(theirs, text).numpy() for text in texts])

    assert ours.dtype == np.float32
    assert np.abs(ours - truth).max() < 0.05 * np.abs(truth).max()


def test_a_model_without_its_head_is_refused(tmp_path: Path) -> None:
    transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, vocab_size=120)).save_pretrained(tmp_path)

    with pytest.raises(ModelLoadFailed, match=r"2 weights are missing.*classifier"):
        load_classifier(tmp_path)


def test_an_architecture_without_such_a_head_is_refused(tmp_path: Path) -> None:
    save_headed("gemma3", transformers.AutoModel, tmp_path)

    with pytest.raises(ModelLoadFailed, match="gemma3_text model has no masked-lm form"):
        load_model(layout_of(tmp_path, Backbone.MASKED_LM, Kind.SPARSE), CPU)


LOGITS = np.array([[-800.0, 0.5, 3.0], [80.0, 90.0, -90.0]], dtype=np.float32)


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("sigmoid", torch.sigmoid),
        ("torch.nn.modules.activation.Sigmoid", torch.sigmoid),
        ("softmax", lambda logits: logits.softmax(-1)),
        ("torch.nn.modules.activation.Softmax", lambda logits: logits.softmax(-1)),
        ("identity", lambda logits: logits),
        ("torch.nn.modules.linear.Identity", lambda logits: logits),
        ("torch.nn.modules.activation.Tanh", torch.tanh),
    ],
)
def test_an_activation_is_torchs_own_and_never_overflows(name: str, truth: object) -> None:
    assert callable(truth)
    with np.errstate(over="raise", invalid="raise"):
        scores = activate(LOGITS, name)

    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, truth(torch.from_numpy(LOGITS)), atol=1e-7)


@pytest.mark.parametrize("name", ["os.system", "torch.nn.Sequential2", "torch.nn.Linear", "swish"])
def test_what_is_no_activation_of_torchs_is_refused(name: str) -> None:
    with pytest.raises(ModelLoadFailed, match="is not served"):
        activate(LOGITS, name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("torch.nn.Nope", "is not served"),
        ("torch.nn.modules.activation.GLU", "is not served: it gives another number of scores"),
        ("torch.nn.modules.activation.Softmax2d", "does not take 4 scores"),
        ("torch.nn.modules.activation.RReLU", "or others each time"),
        ("torch.nn.modules.dropout.Dropout", "or others each time"),
    ],
)
def test_an_activation_that_gives_no_scores_is_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(ModelLoadFailed, match=reason):
        check_activation(name, 4)


@pytest.mark.parametrize(
    "module", [torch.nn.PReLU(), torch.nn.Hardsigmoid(), torch.nn.LogSoftmax(dim=1), torch.nn.Tanh()], ids=repr
)
def test_activations_of_torch_are_those_of_scores(module: torch.nn.Module) -> None:
    logits, dotted = (
        np.array([[-1.5, 0.25, 2.0]], dtype=np.float32),
        f"{type(module).__module__}.{type(module).__name__}",
    )
    check_activation(dotted, 3)

    theirs = module(torch.from_numpy(logits)).detach().numpy()
    np.testing.assert_allclose(activate(logits, dotted), theirs, atol=1e-6)
