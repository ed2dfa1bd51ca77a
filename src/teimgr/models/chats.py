"""Chat templates: the Jinja programs in a model's files that turn messages into one text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import read_object
from teimgr.models.metadata import SENSES, ModelMetadata

Message = Mapping[str, Any]
# Errors raised by a template's expressions, or by its file if that is not UTF-8.
_RAISED_BY_TEMPLATES = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError),
    *(RecursionError, TypeError, ValueError),
)
_MAX_NAME = 100
# Arguments of the tokenizing call that may be among those of the template, with the values that are served.
_OF_THE_CALL: dict[str, tuple[Any, ...]] = {
    "continue_final_message": (False, None),
    "max_length": (None,),
    "restore_suffix": (True, None),  # truncation keeps the suffix, as here
    "sanitize_control_tokens": (False, None),
    "tokenize": (True,),
    "truncation": (True, "longest_first"),
}
PROBES = (" \n\u00a0A b\t ", "\n\"'<&>\\{{ x }}</think>\n\nÉ%\n", "word " * 500)
"""Texts that show how a template changes its inputs."""


def read_template(metadata: ModelMetadata) -> tuple[str, dict[str, Any]]:
    """Return the template that sentence_bert_config.json chooses, or the model's own, and its further arguments.

    Raises:
        ModelLoadFailed: the model has no template.
    """
    options = dict((metadata.settings.get("processing_kwargs") or {}).get("chat_template") or {})
    for key, served in _OF_THE_CALL.items():
        if key in options and (given := options.pop(key)) not in served:
            raise ModelLoadFailed(
                f"processing_kwargs.chat_template of sentence_bert_config.json has {key} = {str(given)[:_MAX_NAME]}, "
                "which is not served"
            )
    named = options.pop("chat_template", None)
    if named is not None:
        return _additional(metadata, str(named)), options
    file = metadata.transformer_dir / "chat_template.jinja"
    if file.is_file():
        return _text_of(file), options
    # Processors of images read this file; tokenizers do not.
    has_processor = metadata.config["model_type"] in SENSES
    alone = (read_object(metadata.transformer_dir / "chat_template.json") or {}) if has_processor else {}
    template = alone.get("chat_template") or metadata.tokens.config.get("chat_template")
    if not isinstance(template, str):
        raise ModelLoadFailed("the model has no chat template to put its inputs into")
    return template, options


def _additional(metadata: ModelMetadata, name: str) -> str:
    """Return a template by name, from the folder of additional templates."""
    file = metadata.transformer_dir / "additional_chat_templates" / f"{name}.jinja"
    if len(name) > _MAX_NAME or not name.replace("_", "").replace("-", "").isalnum() or not file.is_file():
        raise ModelLoadFailed(
            f"sentence_bert_config.json names the chat template {name[:_MAX_NAME]!r}, and there is no such file in "
            "additional_chat_templates"
        )
    return _text_of(file)


def _text_of(file: Any) -> str:
    try:
        return str(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ModelLoadFailed(f"the chat template {file.name} is not UTF-8: {error}") from error


def rendered(metadata: ModelMetadata, template: str, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    """The text of messages, with what transformers has in a template; raises ModelLoadFailed: the template fails."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> str:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: refuse("it shows the current date, so results would change")
    special = {
        role: str(token.get("content", "") if isinstance(token, dict) else token or "")
        for role, token in metadata.tokens.config.items()
        if role.endswith("_token")
    }
    try:
        given = {"tools": None, "documents": None} | special | dict(options)
        return environment.from_string(template).render(messages=messages, **given)
    except (TemplateError, *_RAISED_BY_TEMPLATES) as error:
        raise ModelLoadFailed(f"the chat template cannot be used for the model's inputs: {error}") from error


def _json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """JSON as transformers' filter writes it; Jinja's own escapes what has a meaning in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def strips_texts(shown: Callable[[Sequence[str]], str], pieces: Sequence[str], probes: Sequence[str] = PROBES) -> bool:
    """Whether a template takes white space from both ends of the texts that it shows between `pieces`; `shown` renders
    it with texts.

    Raises:
        ModelLoadFailed: it changes them in another way, or its own words by them.
    """
    places = len(pieces) - 1
    rows = [[probes[(first + place) % len(probes)] for place in range(places)] for first in range(len(probes))]
    found = [shown(row) for row in rows]
    for change in (str, str.strip):
        whole = [
            "".join([pieces[0], *(change(text) + piece for text, piece in zip(row, pieces[1:], strict=True))])
            for row in rows
        ]
        if found == whole:
            return change is str.strip
    raise ModelLoadFailed("the chat template changes its input texts, or its words depend on them: not served")
