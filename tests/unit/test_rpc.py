"""The RPC table says of every method what the contract says."""

import pytest

from teimgr.wire.frames import Flag, Method
from teimgr.wire.rpc import BY_PATH, RPCS, SERVICE, Payload, Rpc, Shape


def rpc(name: str) -> Rpc:
    return BY_PATH[f"/tei_multiplexer.v1.TeiMultiplexer/{name}"]


def test_every_method_of_the_service_has_a_row() -> None:
    assert [each.name for each in RPCS] == [method.name for method in SERVICE.methods]
    assert len(RPCS) == 20


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("Embed", "Missing embed request"),
        ("EmbedStream", "Missing embed request"),
        ("EmbedSparse", "Missing embed_sparse request"),
        ("EmbedAll", "Missing embed_all request"),
        ("Predict", "Missing predict request"),
        ("PredictPair", "Missing predict_pair request"),
        ("Rerank", "Missing rerank request"),
        ("Tokenize", "Missing tokenize request"),
        ("Decode", "Missing decode request"),
    ],
)
def test_a_missing_inner_request_is_named_as_the_contract_names_it(name: str, missing: str) -> None:
    assert rpc(name).missing == missing


def test_shapes_are_those_of_the_proto() -> None:
    shapes = {each.name: each.shape for each in RPCS}

    assert shapes.pop("RerankStream") is Shape.CLIENT_STREAM
    assert all(shape is (Shape.BIDI if name.endswith("Stream") else Shape.UNARY) for name, shape in shapes.items())


def test_every_method_but_the_client_stream_has_a_frame() -> None:
    assert [each.name for each in RPCS if each.method is None] == ["RerankStream"]
    assert rpc("EmbedAllStream").method is Method.EMBED_ALL
    assert rpc("TokenizeStream").method is Method.TOKENIZE
    assert rpc("EmbedArrowStream").method is rpc("EmbedArrow").method is Method.EMBED_ARROW
    assert rpc("EmbedSparseArrow").method is Method.EMBED_SPARSE_ARROW


def test_arrow_messages_travel_whole_and_in_bulk() -> None:
    arrow = {each.name for each in RPCS if each.payload is Payload.WHOLE}

    assert arrow == {"EmbedArrow", "EmbedArrowStream", "EmbedSparseArrow"}
    assert all(each.lane == Flag.BULK | Flag.WAIT for each in RPCS if each.name in arrow)
    assert all(each.lane == Flag.NONE for each in RPCS if each.name not in arrow)


def test_only_single_calls_have_the_configured_timeout() -> None:
    limited = {each.name for each in RPCS if each.limited}

    assert limited == {
        "Info", "Embed", "EmbedSparse", "EmbedAll", "Predict", "PredictPair", "Rerank", "Tokenize", "Decode",
    }  # fmt: skip


def test_compute_headers_are_told_by_the_methods_that_compute() -> None:
    assert {each.name for each in RPCS if each.tells_compute and each.shape is Shape.UNARY} == {
        "Embed", "EmbedSparse", "EmbedAll", "Predict", "PredictPair", "Rerank",
    }  # fmt: skip
