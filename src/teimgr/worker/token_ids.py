"""Token ids in requests, by `token_inputs`: used as the model's, refused, or decoded to texts by tiktoken.

Clients of OpenAI may send ids of OpenAI's tokenizer. Ids do not show their tokenizer: every vocabulary has tokens with
the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from teimgr.engine.job import Input
from teimgr.errors import InvalidConfig, InvalidInput
from teimgr.spec import TOKEN_INPUTS, WorkerSpec

ACCEPT, REFUSE, TIKTOKEN = TOKEN_INPUTS


def check(spec: WorkerSpec) -> None:
    """Load what `token_inputs` needs; may fetch the encoding from the network.

    Raises:
        InvalidConfig: tiktoken is not installed, or does not have the encoding.
    """
    if spec.token_inputs == TIKTOKEN:
        _encoding(spec.token_encoding)


def has_ids(inputs: Sequence[Input]) -> bool:
    return any(isinstance(one, np.ndarray) for one in inputs)


def read(inputs: Sequence[Input], spec: WorkerSpec) -> list[Input]:
    """Return the inputs with ids (int32 [tokens]) decoded to texts; bytes cut at the edge of a chunk become U+FFFD.

    Blocks for as long as decoding takes.

    Raises:
        InvalidInput: the instance refuses ids, or the encoding lacks one of them; with the input's index.
    """
    found: list[Input] = []
    for place, one in enumerate(inputs):
        if isinstance(one, np.ndarray) and len(one):
            try:
                one = _text(one.view(np.uint32).tolist(), spec)
            except InvalidInput as error:
                if len(inputs) > 1:
                    error.name_input(place)
                raise
        found.append(one)
    return found


def _text(ids: list[int], spec: WorkerSpec) -> str:
    if spec.token_inputs == REFUSE:
        raise InvalidInput(
            f"Input validation error: token ids are refused here (token_inputs of instance '{spec.name}'): send texts"
        )
    try:
        text: str = _encoding(spec.token_encoding).decode(ids)
    except (KeyError, OverflowError) as error:
        raise InvalidInput(
            f"Input validation error: `inputs` has a token id that {spec.token_encoding} does not have: {error}"
        ) from error
    return text


@cache
def _encoding(name: str) -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise InvalidConfig('token_inputs = "tiktoken": install teimgr with the extra `tiktoken`') from error
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # of any type: from the registry, the network or the cache
        reason = str(error).partition("\n")[0]
        raise InvalidConfig(f"token_encoding: tiktoken cannot load {name!r}: {reason}") from error
