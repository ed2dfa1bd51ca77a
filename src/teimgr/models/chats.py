"""Chat templates: the Jinja programs in a model's files that make one text of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import read_object
from teimgr.models.metadata import ModelMetadata

Message = Mapping[str, Any]
# By its expressions, and by the file itself where it is not UTF-8.
_RAISED_BY_TEMPLATES = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError),
    *(RecursionError, TypeError, ValueError),
)
_MAX_NAME = 100


def read_template(metadata: ModelMetadata) -> tuple[str, dict[str, Any]]:
    """The template that sentence_bert_config.json chooses, or the model's own, and what it is rendered with besides.

    Raises:
        ModelLoadFailed: there is no template.
    """
    options = dict((metadata.settings.get("processing_kwargs") or {}).get("chat_template") or {})
    options.pop("restore_suffix", None)  # sentence-transformers' own: the end stays where a text is cut, as here
    named = options.pop("chat_template", None)
    if named is not None:
        return _additional(metadata, str(named)), options
    file = metadata.transformer_dir / "chat_template.jinja"
    if file.is_file():
        return _text_of(file), options
    alone = read_object(metadata.transformer_dir / "chat_template.json") or {}
    template = alone.get("chat_template") or metadata.tokens.config.get("chat_template")
    if not isinstance(template, str):
        raise ModelLoadFailed("the model has no chat template to put its inputs into")
    return template, options


def _additional(metadata: ModelMetadata, name: str) -> str:
    """A template by name, in the folder of those beside the model's own."""
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
    """The text of messages; raises ModelLoadFailed: the template fails."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    special = {
        role: str(token.get("content", "") if isinstance(token, dict) else token or "")
        for role, token in metadata.tokens.config.items()
        if role.endswith("_token")
    }
    try:
        return environment.from_string(template).render(messages=messages, **{**special, **options})
    except (TemplateError, *_RAISED_BY_TEMPLATES) as error:
        raise ModelLoadFailed(f"the chat template cannot be used for the model's inputs: {error}") from error
