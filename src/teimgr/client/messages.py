"""Requests as serialized messages, and the one reply that is worth reading by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, get_type_hints

import numpy as np
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from teimgr.client.values import Vectors
from teimgr.config.schema import said
from teimgr.errors import ValidationError
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2
from teimgr.pb.teimgr.v1 import arrow_pb2

_EMBEDDINGS_TAG = 0x0A  # field 1 of tei.v1.EmbedResponse, length-delimited: packed floats


class Where(TypedDict, total=False):
    """Which instance answers: one of the two. A `model` goes to any running instance of it."""

    instance: str
    model: str


class HowText(Where, total=False):
    """What is done with each text; `truncate` is true unless given."""

    truncate: bool
    truncation_left: bool
    prompt_name: str


class How(HowText, total=False):
    """As `HowText`, and: `normalize` is true unless given, `dimensions` is the model's."""

    normalize: bool
    dimensions: int


class HowScores(Where, total=False):
    """What is done with each text or pair; `truncate` is true unless given, `raw_scores` gives logits."""

    truncate: bool
    truncation_left: bool
    raw_scores: bool


class HowArrow(How, total=False):
    """As `How`, and: zeros without running the model, half-precision replies, LZ4 replies."""

    noop: bool
    float16: bool
    lz4_reply: bool


class HowInfer(How, total=False):
    """As `How`, and what `teimgr.v1.Arrow` knows besides.

    `outputs` are of dense, sparse, multi_vector, tokens and scores; `input` is text, pair or ids where the names of the
    columns shall not decide; `keys` are columns to hand back. `dense_type` and `token_type` are float32, float16, int8,
    uint8, binary or ubinary.
    """

    outputs: Sequence[str]
    input: str
    keys: Sequence[str]
    raw_scores: bool
    dense_type: str
    token_type: str
    lz4_reply: bool


WHERE: Mapping[str, type] = get_type_hints(Where)
HOW_TEXT: Mapping[str, type] = get_type_hints(HowText)
HOW_SCORES: Mapping[str, type] = get_type_hints(HowScores)
HOW_INFER: Mapping[str, type] = get_type_hints(HowInfer)
HOW: Mapping[str, type] = get_type_hints(How)
HOW_ARROW: Mapping[str, type] = get_type_hints(HowArrow)


def target(where: Where) -> mux_pb2.Target:
    """The routing of a call.

    Raises:
        ValidationError: not exactly one of `instance` and `model` is given.
    """
    instance, model = where.get("instance"), where.get("model")
    if (instance is None) == (model is None):
        raise ValidationError("give exactly one of `instance` and `model`")
    return mux_pb2.Target(instance_name=instance) if model is None else mux_pb2.Target(model_id=model)


def embed_request(text: str, how: How) -> bytes:
    """`tei_multiplexer.v1.EmbedRequest` for one text."""
    inner = tei_pb2.EmbedRequest(
        inputs=text,
        truncate=how.get("truncate", True),
        normalize=how.get("normalize", True),
        truncation_direction=direction(how),
        prompt_name=how.get("prompt_name"),
        dimensions=how.get("dimensions"),
    )
    return mux_pb2.EmbedRequest(target=target(how), request=inner).SerializeToString()


def arrow_request(ipc: bytes, how: HowArrow) -> bytes:
    """`tei_multiplexer.v1.EmbedArrowRequest` for one IPC stream of texts."""
    return mux_pb2.EmbedArrowRequest(
        target=target(how),
        arrow_ipc=ipc,
        truncate=how.get("truncate", True),
        normalize=how.get("normalize", True),
        noop=how.get("noop", False),
        truncation_direction=direction(how),
        prompt_name=how.get("prompt_name"),
        dimensions=how.get("dimensions"),
        compression=mux_pb2.ARROW_COMPRESSION_LZ4 if how.get("lz4_reply") else mux_pb2.ARROW_COMPRESSION_NONE,
        output_dtype=mux_pb2.OUTPUT_DTYPE_F16 if how.get("float16") else mux_pb2.OUTPUT_DTYPE_UNSPECIFIED,
    ).SerializeToString()


def infer_request(ipc: bytes, how: HowInfer) -> bytes:
    """`teimgr.v1.ArrowRequest` for one IPC stream.

    Raises:
        ValidationError: a word that says no output, input or type.
    """
    outputs = how.get("outputs") or ()
    return arrow_pb2.ArrowRequest(
        target=target(how),
        arrow_ipc=ipc,
        outputs=[_word(f"outputs[{at}]", "OUTPUT_", word, arrow_pb2.Output) for at, word in enumerate(outputs)],
        input=_word("input", "INPUT_", how.get("input"), arrow_pb2.Input),
        key_columns=how.get("keys") or (),
        truncate=how.get("truncate", True),
        truncation_direction=direction(how),
        prompt_name=how.get("prompt_name"),
        normalize=how.get("normalize", True),
        dimensions=how.get("dimensions"),
        raw_scores=how.get("raw_scores", False),
        dense_type=_word("dense_type", "ELEMENT_TYPE_", how.get("dense_type"), arrow_pb2.ElementType),
        token_type=_word("token_type", "ELEMENT_TYPE_", how.get("token_type"), arrow_pb2.ElementType),
        compression=mux_pb2.ARROW_COMPRESSION_LZ4 if how.get("lz4_reply") else mux_pb2.ARROW_COMPRESSION_NONE,
    ).SerializeToString()


def vector(reply: bytes) -> Vectors:
    """The vector of a `tei.v1.EmbedResponse`, float32 [dim], read-only, without a copy where it leads the message."""
    if reply[:1] == bytes((_EMBEDDINGS_TAG,)):
        length, start = _varint(reply, 1)
        return np.frombuffer(reply, "<f4", length // 4, start)
    return np.array(tei_pb2.EmbedResponse.FromString(reply).embeddings, np.float32)


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7


def direction(how: HowText | HowScores) -> tei_pb2.TruncationDirection:
    """Which end of a text is cut."""
    left = how.get("truncation_left", False)
    return tei_pb2.TRUNCATION_DIRECTION_LEFT if left else tei_pb2.TRUNCATION_DIRECTION_RIGHT


def _word(name: str, prefix: str, word: str | None, enum: EnumTypeWrapper) -> str:
    """The name of an enum's value that a word means; without one, of the unspecified value."""
    unspecified, *names = (key for key, _ in enum.items())
    if word is None:
        return unspecified
    if (full := f"{prefix}{word.upper()}") not in names:
        choices = ", ".join(key.removeprefix(prefix).lower() for key in names)
        raise ValidationError(f"{name} must be one of {choices}, not {said(word)}")
    return full
