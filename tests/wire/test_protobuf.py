"""The byte-level reader agrees with the real protobuf parser."""

import time

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from teimgr.errors import InvalidInput
from teimgr.wire.arrow_limits import MAX_COLUMNS
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2
from teimgr.wire.protobuf import (
    Envelope,
    Target,
    bytes_field,
    read_envelope,
    read_target,
    split_off,
    without_fields,
)


def _shadow() -> type[Message]:
    """A message whose fields 1 and 2 are repeated bytes: it accepts what the outer message is, whatever is inside."""
    file = descriptor_pb2.FileDescriptorProto(name="shadow.proto", package="shadow", syntax="proto3")
    message = file.message_type.add(name="Outer")
    for number in (1, 2):
        message.field.add(name=f"f{number}", number=number, type=12, label=3)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shadow.Outer"))


SHADOW = _shadow()


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


numbers = st.integers(1, 20)
scalars = st.builds(lambda n, v: varint(n << 3) + varint(v), numbers, st.integers(0, 2**64 - 1))
fixed32 = st.builds(lambda n, v: varint(n << 3 | 5) + v, numbers, st.binary(min_size=4, max_size=4))
fixed64 = st.builds(lambda n, v: varint(n << 3 | 1) + v, numbers, st.binary(min_size=8, max_size=8))
lengths = st.builds(field, st.integers(1, 3), st.binary(max_size=200))
groups = st.builds(lambda n, v: varint(n << 3 | 3) + v + varint(n << 3 | 4), numbers, st.one_of(scalars, lengths))
fields = st.lists(st.one_of(scalars, fixed32, fixed64, lengths, groups), max_size=8).map(b"".join)
noise = st.binary(max_size=40)
spoiled = st.builds(lambda a, b, cut: (a + b)[: len(a + b) - cut], fields, noise, st.integers(0, 5))
cheap = settings(max_examples=400, deadline=None, database=None)


@cheap
@given(st.one_of(fields, noise, spoiled))
@example(b"\x0a\x80\x01" + b"x" * 128)
@example(b"\x0a\x00")
@example(b"\x0a\x00\x12\x00")
@example(b"\x0a\x85\x80\x00hello")
@example(b"\x12\x00\x0a\x01x")
def test_parts_are_those_the_real_parser_finds(message: bytes) -> None:
    try:
        real = SHADOW.FromString(message)
    except DecodeError:
        with pytest.raises(InvalidInput, match="Malformed message"):
            read_envelope(message, 2)
        return

    parts = read_envelope(message, 2)

    assert parts.target == (b"".join(real.f1) if real.f1 else None)
    assert parts.inner == (b"".join(real.f2) if real.f2 else None)


@cheap
@given(
    st.one_of(fields, noise, st.text(max_size=20).map(lambda t: mux_pb2.Target(instance_name=t).SerializeToString()))
)
@example(b"\x0a\x01a\x12\x01b")
@example(b"\x0a\x01\xff")
@example(b"\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
def test_target_is_the_one_the_real_parser_reads(raw: bytes) -> None:
    try:
        real = mux_pb2.Target.FromString(raw)
    except DecodeError:
        with pytest.raises(InvalidInput, match="Malformed message"):
            read_target(raw)
        return

    kind = real.WhichOneof("routing")

    assert read_target(raw) == (Target() if kind is None else Target(**{kind: getattr(real, kind)}))


texts = st.text(max_size=50)
requests = st.builds(
    lambda name, text, truncate: mux_pb2.EmbedRequest(
        target=mux_pb2.Target(instance_name=name), request=tei_pb2.EmbedRequest(inputs=text, truncate=truncate)
    ),
    texts,
    texts,
    st.booleans(),
)


@cheap
@given(requests, requests)
def test_repeated_submessages_merge_as_proto3_says(first: mux_pb2.EmbedRequest, second: mux_pb2.EmbedRequest) -> None:
    message = first.SerializeToString() + second.SerializeToString()
    merged = mux_pb2.EmbedRequest.FromString(message)

    parts = read_envelope(message, 2)

    assert parts.target is not None
    assert parts.inner is not None
    assert read_target(parts.target).instance_name == merged.target.instance_name
    assert tei_pb2.EmbedRequest.FromString(bytes(parts.inner)) == merged.request


@pytest.mark.parametrize("size", [0, 1, 127, 128, 20_000, 300_000])
def test_inner_of_any_size_is_found_on_the_usual_path(size: int) -> None:
    inner = tei_pb2.EmbedRequest(inputs="x" * size)
    message = mux_pb2.EmbedRequest(target=mux_pb2.Target(instance_name="a"), request=inner).SerializeToString()

    assert read_envelope(message, 2).inner == inner.SerializeToString()


def test_message_without_such_a_field_has_no_inner() -> None:
    message = mux_pb2.InfoRequest(target=mux_pb2.Target(model_id="m")).SerializeToString()

    assert read_envelope(message, 0) == (b"\x12\x01m", None)


@cheap
@given(fields)
def test_dropping_fields_leaves_the_others_in_order(message: bytes) -> None:
    left = SHADOW.FromString(without_fields(message, 2))
    whole = SHADOW.FromString(message)

    assert list(left.f1) == list(whole.f1)
    assert list(left.f2) == []


@cheap
@given(fields, st.integers(1, 4))
def test_splitting_a_field_off_gives_the_rest_and_its_last_value(message: bytes, number: int) -> None:
    assert split_off(message, number) == (without_fields(message, number), bytes_field(message, number))


def test_parts_that_would_be_copied_whole_are_refused() -> None:
    """No encoder writes a field twice; to join two parts of 20 MB holds the mux for 50 ms."""
    half = mux_pb2.EmbedRequest(request=tei_pb2.EmbedRequest(inputs="a" * 600_000)).SerializeToString()

    for join in (lambda: read_envelope(half * 2, 2), lambda: without_fields(half + b"\x28\x01" + half, 5)):
        with pytest.raises(
            InvalidInput, match="repeats a field 2 times, with more than 1048576 bytes in total: send each field once"
        ):
            join()


def test_options_of_the_first_arrow_request_merge_into_a_later_one() -> None:
    first = mux_pb2.EmbedArrowRequest(arrow_ipc=b"first", truncate=True, prompt_name="query", dimensions=8)
    later = mux_pb2.EmbedArrowRequest(arrow_ipc=b"later")

    merged = without_fields(first.SerializeToString(), 1, 2) + later.SerializeToString()

    assert mux_pb2.EmbedArrowRequest.FromString(merged) == mux_pb2.EmbedArrowRequest(
        arrow_ipc=b"later", truncate=True, prompt_name="query", dimensions=8
    )


def test_groups_nested_without_end_are_refused_without_recursing_without_end() -> None:
    with pytest.raises(InvalidInput, match="Malformed"):
        read_envelope(b"\x1b" * 10_000, 2)


@given(st.lists(st.tuples(st.integers(1, 3), st.binary(max_size=300)), max_size=5))
def test_a_field_of_bytes_is_its_last_value_as_protobuf_has_it(fields: list[tuple[int, bytes]]) -> None:
    message = b"".join(field(number, content) for number, content in fields)

    assert bytes_field(message, 1) == mux_pb2.EmbedArrowResponse.FromString(message).arrow_ipc


@pytest.mark.parametrize("message", [b"\x0a\x05ab", b"\x0a", b"\x00", b"\x0f"])
def test_a_field_of_bytes_in_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(InvalidInput, match="Malformed message"):
        bytes_field(message, 1)


MANY = 20_000_000
"""Fields in a message of 40 MB, the default limit."""


@pytest.mark.parametrize(
    "message",
    [
        b"\x78\0" * MANY,
        b"\x0a\x00" + b"\x78\0" * MANY,
        b"\x7b" + b"\x08\0" * MANY + b"\x7c",
        (b"\x7b" + b"\x08\0" * 30 + b"\x7c") * 200,
    ],
    ids=["fields", "behind the target", "in a group", "in groups"],
)
def test_fields_are_counted_and_too_many_refused_at_once(message: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidInput, match="more than 128 fields"):
        read_envelope(message, 2)
    with pytest.raises(InvalidInput, match="more than 1152 fields"):
        read_envelope(message, 2, has_table=True)
    with pytest.raises(InvalidInput, match="more than 1152 fields"):
        without_fields(message, 1)
    with pytest.raises(InvalidInput, match="more than 4096 fields"):
        bytes_field(message, 1)
    assert time.monotonic() - began < 2, "20 million take Python half a minute"


@pytest.mark.parametrize(("most", "has_table"), [(128, False), (1152, True)])
def test_as_many_fields_as_allowed_are_read(most: int, has_table: bool) -> None:
    message = b"\x0a\x03\x0a\x01a" + b"\x78\0" * (most - 2) + b"\x12\x01b"
    assert read_envelope(message, 2, has_table=has_table) == Envelope(b"\x0a\x01a", b"b")


def test_an_arrow_request_may_name_as_many_columns_as_a_table_may_have() -> None:
    names = [f"column {number}" for number in range(MAX_COLUMNS)]
    request = arrow_pb2.ArrowRequest(target=mux_pb2.Target(instance_name="a"), arrow_ipc=b"table", key_columns=names)
    assert read_envelope(request.SerializeToString(), 2, has_table=True).inner == b"table"


def test_a_target_has_few_fields() -> None:
    with pytest.raises(InvalidInput, match="more than 128 fields"):
        read_target(b"\x0a\x01a" + b"\x78\0" * 128)


def test_a_target_is_bounded() -> None:
    with pytest.raises(InvalidInput, match="`target` has 262147 bytes"):
        read_target(b"\x0a\xff\xff\x0f" + bytes(2**18 - 1))
