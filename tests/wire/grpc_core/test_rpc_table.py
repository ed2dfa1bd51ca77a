"""The RPC table has every method as the contract has it."""

import pytest

from teimgr.wire.frames import Flag, Method
from teimgr.wire.grpc_core.rpc_table import BY_PATH, RPCS, SERVICE, SERVICES, PayloadSource, Rpc, Shape

MUX = "tei_multiplexer.v1.TeiMultiplexer"
TEI = ("tei.v1.Info", "tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank", "tei.v1.Tokenize")
ARROW = "teimgr.v1.Arrow"


def rpc(name: str, service: str = MUX) -> Rpc:
    return BY_PATH[f"/{service}/{name}"]


def rows(*services: str) -> list[Rpc]:
    return [each for each in RPCS if each.service in services]


@pytest.mark.clause("M1.4-services")
def test_every_method_of_every_service_has_a_row() -> None:
    assert (*TEI, MUX, ARROW) == SERVICES
    assert [each.name for each in rows(MUX)] == [method.name for method in SERVICE.methods]
    assert (len(rows(MUX)), len(rows(*TEI)), len(rows(ARROW))) == (20, 17, 2)


def test_a_method_of_tei_asks_the_same_of_a_worker_as_its_namesake_of_the_multiplexer() -> None:
    for each in rows(*TEI):
        twin = rpc(each.name)
        same = ("name", "shape", "method", "lane", "limited", "reports_compute")
        assert [getattr(each, name) for name in same] == [getattr(twin, name) for name in same]
        assert each.payload is PayloadSource.WHOLE
        assert not each.has_target
        assert twin.has_target


def test_teimgr_s_own_arrow_calls_are_batches_with_a_target() -> None:
    unary, stream = rows(ARROW)

    assert (unary.name, unary.shape, stream.name, stream.shape) == ("Infer", Shape.UNARY, "InferStream", Shape.BIDI)
    for each in (unary, stream):
        assert each.method is Method.INFER_ARROW
        assert each.has_target
        assert (each.arrow_field, each.payload, each.lane) == (2, PayloadSource.WHOLE, Flag.BULK | Flag.WAIT)


@pytest.mark.clause("M1.5-missing-request")
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


@pytest.mark.clause("M1.2-methods")
def test_shapes_are_those_of_the_proto() -> None:
    shapes = {each.name: each.shape for each in rows(MUX)}

    assert shapes.pop("RerankStream") is Shape.CLIENT_STREAM
    assert all(shape is (Shape.BIDI if name.endswith("Stream") else Shape.UNARY) for name, shape in shapes.items())


def test_every_method_has_a_frame() -> None:
    assert [each.path for each in RPCS if each.method is None] == []
    assert rpc("RerankStream").method is Method.RERANK_STREAM
    assert rpc("EmbedAllStream").method is Method.EMBED_ALL
    assert rpc("TokenizeStream").method is Method.TOKENIZE
    assert rpc("EmbedArrowStream").method is rpc("EmbedArrow").method is Method.EMBED_ARROW
    assert rpc("EmbedSparseArrow").method is Method.EMBED_SPARSE_ARROW


def test_arrow_messages_travel_whole_and_in_bulk_and_a_rerank_waits_for_room() -> None:
    arrow = {each.name for each in rows(MUX) if each.arrow_field}

    assert arrow == {"EmbedArrow", "EmbedArrowStream", "EmbedSparseArrow"}
    assert all(each.payload is PayloadSource.WHOLE for each in rows(MUX) if each.name in arrow)
    assert {each.name: each.lane for each in rows(MUX) if each.lane} == {
        **dict.fromkeys(arrow, Flag.BULK | Flag.WAIT),
        "Rerank": Flag.WAIT,
        "RerankStream": Flag.WAIT,
    }


@pytest.mark.clause("M1.6-timeout", "M8-timeout-zero")
def test_only_single_calls_have_the_configured_timeout() -> None:
    limited = {each.name for each in rows(MUX) if each.limited}

    assert limited == {
        "Info", "Embed", "EmbedSparse", "EmbedAll", "Predict", "PredictPair", "Rerank", "Tokenize", "Decode",
    }  # fmt: skip


@pytest.mark.clause("M1.6-cost-metadata")
def test_compute_headers_are_told_by_the_methods_that_compute() -> None:
    assert {each.name for each in rows(MUX) if each.reports_compute} == {
        "Embed", "EmbedSparse", "EmbedAll", "Predict", "PredictPair", "Rerank", "RerankStream",
    }  # fmt: skip
