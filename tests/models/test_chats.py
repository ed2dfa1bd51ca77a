"""Chat templates of rerankers: rendered as transformers renders them, and refused where a text cannot be put in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from teimgr.engine.job import Output, Pair
from teimgr.errors import ModelLoadFailed
from teimgr.models.reading import read_layout
from tests.engine.conftest import Served, serve  # noqa: F401  a fixture
from tests.fidelity import references
from tests.support.models import build_yes_no_reranker, edit, read, write

_PAIRS = (Pair("fog", "dog"), Pair("\n Where? \t", " the boats\u00a0\n\n"), Pair("a", 'it "is" <b> \\n {query}'))


def _chat(content: str) -> str:
    """A template that shows each message by `content`."""
    return "{% for message in messages %}<|im_start|>{{ message.role }}\n" + content + "<|im_end|>\n{% endfor %}"


_PLAIN = _chat("{{ message.content }}")


@pytest.mark.parametrize(
    "template",
    [
        _chat("{{ message.content | trim }}"),
        _chat("{{ message.content.strip() }}"),
        "{% if tools is not none or documents is not none %}Tools {% endif %}" + _PLAIN,
        "{% if tools is defined and raise_exception is defined %}Library {% endif %}" + _PLAIN,
        "{{ {'word': 'é <b> &'} | tojson }}" + _PLAIN,
    ],
    ids=["trim", "strip", "no tools", "names", "json"],
)
def test_scores_are_those_of_the_librarys_rendering(
    template: str,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    path = build_yes_no_reranker(tmp_path, layout="saved")
    (path / "chat_template.jinja").write_text(template)

    job = serve(path).embed(_PAIRS, outputs=frozenset({Output.SCORES}), raw_scores=True)

    assert job.errors == {}
    np.testing.assert_allclose(job.scores, references.scores(path, _PAIRS), atol=2e-5)


@pytest.mark.parametrize("classifier", [False, True])
def test_a_tokenizer_that_cuts_the_beginning_cuts_the_templates_too(
    classifier: bool,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    path = build_yes_no_reranker(tmp_path, layout="classifier" if classifier else "saved", max_length=60)
    edit(path / "tokenizer_config.json", truncation_side="left")
    pairs = (*_PAIRS, Pair("fog " * 30, "dog"), Pair("dog", "The boats lie in fog. " * 9))

    job = serve(path).embed(pairs, outputs=frozenset({Output.SCORES}), raw_scores=True)

    np.testing.assert_allclose(job.scores, references.scores(path, pairs), atol=2e-5)


def test_a_template_of_processors_of_images_is_none_of_a_tokenizer(
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    path = build_yes_no_reranker(tmp_path, layout="saved")
    edit(path / "tokenizer_config.json", chat_template=(path / "chat_template.jinja").read_text())
    (path / "chat_template.jinja").unlink()
    write(path / "chat_template.json", {"chat_template": _PLAIN})

    job = serve(path).embed(_PAIRS, outputs=frozenset({Output.SCORES}), raw_scores=True)

    np.testing.assert_allclose(job.scores, references.scores(path, _PAIRS), atol=2e-5)


@pytest.mark.parametrize(
    "content",
    [
        "{{ message.content | capitalize }}",
        "{{ message.content.lstrip('\\n') }}",
        "{{ message.content[:100] }}",
        "{{ message.content | e }}",
        "{{ message.content | tojson }}",
        "{{ message.content | default('nothing', true) }}",
        "{% if message.content | length > 200 %}Long: {% endif %}{{ message.content }}",
        "{{ message.content.split() | join(' ') }}",
    ],
)
def test_a_template_that_changes_texts_is_refused(content: str, tmp_path: Path) -> None:
    path = build_yes_no_reranker(tmp_path, layout="saved")
    (path / "chat_template.jinja").write_text(_chat(content))

    with pytest.raises(ModelLoadFailed, match="changes its input texts"):
        read_layout(path)


def test_a_template_with_the_date_of_the_day_is_refused(tmp_path: Path) -> None:
    path = build_yes_no_reranker(tmp_path, layout="saved")
    (path / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + _PLAIN)

    with pytest.raises(ModelLoadFailed, match="the current date"):
        read_layout(path)


def test_what_a_template_refuses_itself_is_the_reason(tmp_path: Path) -> None:
    path = build_yes_no_reranker(tmp_path, layout="saved")
    (path / "chat_template.jinja").write_text("{{ raise_exception('only user and assistant') }}")

    with pytest.raises(ModelLoadFailed, match="only user and assistant"):
        read_layout(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_length", 64),
        ("continue_final_message", True),
        ("truncation", False),
        ("restore_suffix", False),
        ("sanitize_control_tokens", True),
    ],
)
def test_arguments_of_the_call_among_those_of_the_template_are_refused(key: str, value: object, tmp_path: Path) -> None:
    path = build_yes_no_reranker(tmp_path, layout="saved")
    settings = path / "sentence_bert_config.json"
    write(settings, read(settings) | {"processing_kwargs": {"chat_template": {key: value}}})

    with pytest.raises(ModelLoadFailed, match=f"processing_kwargs.chat_template .* has {key} = {value}"):
        read_layout(path)
