"""Numbers, types and presence of every field, as the contract's tables have them."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2

# As the contract writes them: number, name, type, and `opt` or `rep` where it is so.
TEI = {
    "InfoRequest": "",
    "InfoResponse": """1 version:string · 2 sha:string opt · 3 docker_label:string opt · 4 model_id:string ·
        5 model_sha:string opt · 6 model_dtype:string · 7 model_type:ModelType · 8 max_concurrent_requests:uint32 ·
        9 max_input_length:uint32 · 10 max_batch_tokens:uint32 · 11 max_batch_requests:uint32 opt ·
        12 max_client_batch_size:uint32 · 13 tokenization_workers:uint32""",
    "Metadata": """1 compute_chars:uint32 · 2 compute_tokens:uint32 · 3 total_time_ns:uint64 ·
        4 tokenization_time_ns:uint64 · 5 queue_time_ns:uint64 · 6 inference_time_ns:uint64""",
    "EmbedRequest": """1 inputs:string · 2 truncate:bool · 3 normalize:bool opt ·
        4 truncation_direction:TruncationDirection · 5 prompt_name:string opt · 6 dimensions:uint32 opt""",
    "EmbedResponse": "1 embeddings:float rep · 2 metadata:Metadata",
    "EmbedSparseRequest": """1 inputs:string · 2 truncate:bool · 3 truncation_direction:TruncationDirection ·
        4 prompt_name:string opt""",
    "SparseValue": "1 index:uint32 · 2 value:float",
    "EmbedSparseResponse": "1 sparse_embeddings:SparseValue rep · 2 metadata:Metadata",
    "EmbedAllRequest": """1 inputs:string · 2 truncate:bool · 3 truncation_direction:TruncationDirection ·
        4 prompt_name:string opt""",
    "TokenEmbedding": "1 embeddings:float rep",
    "EmbedAllResponse": "1 token_embeddings:TokenEmbedding rep · 2 metadata:Metadata",
    "PredictRequest": """1 inputs:string · 2 truncate:bool · 3 raw_scores:bool ·
        4 truncation_direction:TruncationDirection""",
    "PredictPairRequest": """1 inputs:string rep · 2 truncate:bool · 3 raw_scores:bool ·
        4 truncation_direction:TruncationDirection""",
    "Prediction": "1 score:float · 2 label:string",
    "PredictResponse": "1 predictions:Prediction rep · 2 metadata:Metadata",
    "RerankRequest": """1 query:string · 2 texts:string rep · 3 truncate:bool · 4 raw_scores:bool ·
        5 return_text:bool · 6 truncation_direction:TruncationDirection""",
    "RerankStreamRequest": """1 query:string · 2 text:string · 3 truncate:bool · 4 raw_scores:bool ·
        5 return_text:bool · 6 truncation_direction:TruncationDirection""",
    "Rank": "1 index:uint32 · 2 text:string opt · 3 score:float",
    "RerankResponse": "1 ranks:Rank rep · 2 metadata:Metadata",
    "EncodeRequest": "1 inputs:string · 2 add_special_tokens:bool · 3 prompt_name:string opt",
    "SimpleToken": "1 id:uint32 · 2 text:string · 3 special:bool · 4 start:uint32 opt · 5 stop:uint32 opt",
    "EncodeResponse": "1 tokens:SimpleToken rep",
    "DecodeRequest": "1 ids:uint32 rep · 2 skip_special_tokens:bool",
    "DecodeResponse": "1 text:string",
}
_WRAPPED = {
    f"{name}Request": f"1 target:Target · 2 request:{name}Request"
    for name in (
        "Embed",
        "EmbedSparse",
        "EmbedAll",
        "Predict",
        "PredictPair",
        "Rerank",
        "RerankStream",
        "Encode",
        "Decode",
    )
}
MUX = {
    "Target": "1 instance_name:string opt · 2 model_id:string opt · 3 instance_index:uint32 opt",
    "InfoRequest": "1 target:Target",
    **_WRAPPED,
    "EmbedArrowResponse": "1 arrow_ipc:bytes",
    "EmbedSparseArrowResponse": "1 arrow_ipc:bytes",
}
NEWER = {
    "EmbedArrowRequest": """1 target:Target · 2 arrow_ipc:bytes · 3 truncate:bool · 4 normalize:bool · 5 noop:bool ·
        6 truncation_direction:TruncationDirection · 7 prompt_name:string opt · 8 dimensions:uint32 opt ·
        9 compression:ArrowCompression · 10 output_dtype:OutputDtype""",
    "EmbedSparseArrowRequest": """1 target:Target · 2 arrow_ipc:bytes · 3 truncate:bool · 4 noop:bool ·
        5 truncation_direction:TruncationDirection · 6 prompt_name:string opt · 7 compression:ArrowCompression""",
}
TYPES = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_FLOAT: "float",
}


def fields(message: Descriptor) -> list[str]:
    """The fields of a message as the contract writes them."""
    return [f"{field.number} {field.name}:{_type(field)}{_presence(field)}" for field in message.fields]


def _type(field: FieldDescriptor) -> str:
    named = field.message_type or field.enum_type
    return str(named.name) if named else TYPES[field.type]


def _presence(field: FieldDescriptor) -> str:
    if field.is_repeated:
        return " rep"
    return " opt" if field.containing_oneof is not None else ""


def _is_as_told(file: FileDescriptor, tables: dict[str, str]) -> None:
    for name, told in tables.items():
        expected = [" ".join(each.split()) for each in told.split("·") if each.strip()]
        assert fields(file.message_types_by_name[name]) == expected, name


@pytest.mark.clause("M1.4-messages")
def test_messages_of_tei_are_the_contracts() -> None:
    assert set(TEI) == set(tei_pb2.DESCRIPTOR.message_types_by_name)
    _is_as_told(tei_pb2.DESCRIPTOR, TEI)


@pytest.mark.clause("M1.3-messages")
def test_messages_of_the_multiplexer_are_the_contracts() -> None:
    _is_as_told(multiplexer_pb2.DESCRIPTOR, MUX)


@pytest.mark.clause("N-messages")
def test_newer_fields_have_their_numbers_and_ours_are_in_files_of_our_own() -> None:
    _is_as_told(multiplexer_pb2.DESCRIPTOR, NEWER)
    assert set(multiplexer_pb2.DESCRIPTOR.message_types_by_name) == {*MUX, *NEWER}
    enums = multiplexer_pb2.DESCRIPTOR.enum_types_by_name
    values = {name: {value.name: value.number for value in enum.values} for name, enum in enums.items()}
    assert values == {
        "ArrowCompression": {"ARROW_COMPRESSION_NONE": 0, "ARROW_COMPRESSION_LZ4": 1},
        "OutputDtype": {"OUTPUT_DTYPE_UNSPECIFIED": 0, "OUTPUT_DTYPE_F32": 1, "OUTPUT_DTYPE_F16": 2},
    }
