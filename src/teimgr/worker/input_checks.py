"""Checks of what a request asks for, shared by the dialects: no empty inputs, a model of the right kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teimgr.engine.job import Input as EngineInput
from teimgr.engine.job import MediaFile, are_texts
from teimgr.errors import EmptyInput, WrongModelKind
from teimgr.models.source import shown_id
from teimgr.spec import Kind, LoadedModel
from teimgr.worker import http_inference as http


def need_texts(texts: Sequence[object], field: str) -> None:
    """Raise EmptyInput if texts are missing, or one of them is empty; the engine checks ids."""
    if not texts:
        raise EmptyInput(f"`{field}` cannot be empty")
    _refuse([isinstance(text, str) and not text for text in texts], f"`{field}` cannot have an empty text")


def need_inputs(inputs: Sequence[EngineInput], refusal: str) -> None:
    """Raise EmptyInput with the sentence `refusal` if one of the inputs is empty."""
    if are_texts(inputs) and all(inputs):
        return
    are_empty = [one is None or (not len(one) and not isinstance(one, MediaFile)) for one in inputs]
    _refuse(are_empty, refusal)


def need_no_instruction(model: LoadedModel, instruction: str | None) -> None:
    """Raise BadRequest for an instruction, unless the model reads texts and images in one input."""
    if instruction and not model.fused:
        raise http.BadRequest(400, "instruction: is not supported", "instruction")


def need_special_tokens(inputs: Sequence[EngineInput], add: bool | None) -> None:
    """Raise BadRequest if the request drops the special tokens that the model was trained with; ids are used as they
    are."""
    if add is False and any(isinstance(one, str) for one in inputs):
        message = "add_special_tokens: false is not supported for texts; send token ids"
        raise http.BadRequest(400, message, "add_special_tokens")


def _refuse(are_empty: list[bool], refusal: str) -> None:
    """Raise EmptyInput if an input is empty, with its index if there are several."""
    if True in are_empty:
        error = EmptyInput(refusal)
        if len(are_empty) > 1:
            error.name_input(are_empty.index(True))
        raise error


def need_kind(model: LoadedModel, kinds: Sequence[str], doing: str) -> None:
    """Raise WrongModelKind unless the model is one of `kinds`."""
    if model.kind not in kinds:
        raise WrongModelKind(f"The model '{shown_id(model.model_id)}' is of kind {model.kind} and does not do {doing}")


def ranks_images(model: LoadedModel) -> bool:
    """True if documents, including images, are ranked by the model's vectors."""
    return "image" in model.modalities and model.kind in (Kind.EMBEDDING, Kind.MULTI_VECTOR)


def text_of_parts(parts: list[Any]) -> str | None:
    """Return the text of a content given in parts; None if one of them is not text."""
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type", "text") == "text"]
    whole = [text for text in texts if isinstance(text, str)]
    return "\n".join(whole) if len(whole) == len(parts) else None
