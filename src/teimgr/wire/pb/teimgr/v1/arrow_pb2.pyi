from teimgr.wire.pb.tei.v1 import tei_pb2 as _tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as _multiplexer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Output(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTPUT_UNSPECIFIED: _ClassVar[Output]
    OUTPUT_DENSE: _ClassVar[Output]
    OUTPUT_SPARSE: _ClassVar[Output]
    OUTPUT_MULTI_VECTOR: _ClassVar[Output]
    OUTPUT_TOKENS: _ClassVar[Output]
    OUTPUT_SCORES: _ClassVar[Output]

class Input(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INPUT_UNSPECIFIED: _ClassVar[Input]
    INPUT_TEXT: _ClassVar[Input]
    INPUT_PAIR: _ClassVar[Input]
    INPUT_IDS: _ClassVar[Input]

class ElementType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ELEMENT_TYPE_UNSPECIFIED: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT32: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT16: _ClassVar[ElementType]
    ELEMENT_TYPE_INT8: _ClassVar[ElementType]
    ELEMENT_TYPE_UINT8: _ClassVar[ElementType]
    ELEMENT_TYPE_BINARY: _ClassVar[ElementType]
    ELEMENT_TYPE_UBINARY: _ClassVar[ElementType]
OUTPUT_UNSPECIFIED: Output
OUTPUT_DENSE: Output
OUTPUT_SPARSE: Output
OUTPUT_MULTI_VECTOR: Output
OUTPUT_TOKENS: Output
OUTPUT_SCORES: Output
INPUT_UNSPECIFIED: Input
INPUT_TEXT: Input
INPUT_PAIR: Input
INPUT_IDS: Input
ELEMENT_TYPE_UNSPECIFIED: ElementType
ELEMENT_TYPE_FLOAT32: ElementType
ELEMENT_TYPE_FLOAT16: ElementType
ELEMENT_TYPE_INT8: ElementType
ELEMENT_TYPE_UINT8: ElementType
ELEMENT_TYPE_BINARY: ElementType
ELEMENT_TYPE_UBINARY: ElementType

class ArrowRequest(_message.Message):
    __slots__ = ("target", "arrow_ipc", "outputs", "input", "key_columns", "truncate", "truncation_direction", "prompt_name", "normalize", "dimensions", "raw_scores", "dense_type", "token_type", "compression", "pool_factor")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    KEY_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_DIRECTION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    RAW_SCORES_FIELD_NUMBER: _ClassVar[int]
    DENSE_TYPE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TYPE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    POOL_FACTOR_FIELD_NUMBER: _ClassVar[int]
    target: _multiplexer_pb2.Target
    arrow_ipc: bytes
    outputs: _containers.RepeatedScalarFieldContainer[Output]
    input: Input
    key_columns: _containers.RepeatedScalarFieldContainer[str]
    truncate: bool
    truncation_direction: _tei_pb2.TruncationDirection
    prompt_name: str
    normalize: bool
    dimensions: int
    raw_scores: bool
    dense_type: ElementType
    token_type: ElementType
    compression: _multiplexer_pb2.ArrowCompression
    pool_factor: float
    def __init__(self, target: _Optional[_Union[_multiplexer_pb2.Target, _Mapping]] = ..., arrow_ipc: _Optional[bytes] = ..., outputs: _Optional[_Iterable[_Union[Output, str]]] = ..., input: _Optional[_Union[Input, str]] = ..., key_columns: _Optional[_Iterable[str]] = ..., truncate: _Optional[bool] = ..., truncation_direction: _Optional[_Union[_tei_pb2.TruncationDirection, str]] = ..., prompt_name: _Optional[str] = ..., normalize: _Optional[bool] = ..., dimensions: _Optional[int] = ..., raw_scores: _Optional[bool] = ..., dense_type: _Optional[_Union[ElementType, str]] = ..., token_type: _Optional[_Union[ElementType, str]] = ..., compression: _Optional[_Union[_multiplexer_pb2.ArrowCompression, str]] = ..., pool_factor: _Optional[float] = ...) -> None: ...

class ArrowResponse(_message.Message):
    __slots__ = ("arrow_ipc",)
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    arrow_ipc: bytes
    def __init__(self, arrow_ipc: _Optional[bytes] = ...) -> None: ...

class InfoAddition(_message.Message):
    __slots__ = ("modalities", "fused")
    MODALITIES_FIELD_NUMBER: _ClassVar[int]
    FUSED_FIELD_NUMBER: _ClassVar[int]
    modalities: _containers.RepeatedScalarFieldContainer[str]
    fused: bool
    def __init__(self, modalities: _Optional[_Iterable[str]] = ..., fused: _Optional[bool] = ...) -> None: ...
