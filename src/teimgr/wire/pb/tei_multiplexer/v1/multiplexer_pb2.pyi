from teimgr.wire.pb.tei.v1 import tei_pb2 as _tei_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ArrowCompression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ARROW_COMPRESSION_NONE: _ClassVar[ArrowCompression]
    ARROW_COMPRESSION_LZ4: _ClassVar[ArrowCompression]

class OutputDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTPUT_DTYPE_UNSPECIFIED: _ClassVar[OutputDtype]
    OUTPUT_DTYPE_F32: _ClassVar[OutputDtype]
    OUTPUT_DTYPE_F16: _ClassVar[OutputDtype]
ARROW_COMPRESSION_NONE: ArrowCompression
ARROW_COMPRESSION_LZ4: ArrowCompression
OUTPUT_DTYPE_UNSPECIFIED: OutputDtype
OUTPUT_DTYPE_F32: OutputDtype
OUTPUT_DTYPE_F16: OutputDtype

class Target(_message.Message):
    __slots__ = ("instance_name", "model_id", "instance_index")
    INSTANCE_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    instance_name: str
    model_id: str
    instance_index: int
    def __init__(self, instance_name: _Optional[str] = ..., model_id: _Optional[str] = ..., instance_index: _Optional[int] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: Target
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.EmbedRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.EmbedRequest, _Mapping]] = ...) -> None: ...

class EmbedSparseRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.EmbedSparseRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.EmbedSparseRequest, _Mapping]] = ...) -> None: ...

class EmbedAllRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.EmbedAllRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.EmbedAllRequest, _Mapping]] = ...) -> None: ...

class PredictRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.PredictRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.PredictRequest, _Mapping]] = ...) -> None: ...

class PredictPairRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.PredictPairRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.PredictPairRequest, _Mapping]] = ...) -> None: ...

class RerankRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.RerankRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.RerankRequest, _Mapping]] = ...) -> None: ...

class RerankStreamRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.RerankStreamRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.RerankStreamRequest, _Mapping]] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.EncodeRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.EncodeRequest, _Mapping]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.DecodeRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.DecodeRequest, _Mapping]] = ...) -> None: ...

class EmbedArrowRequest(_message.Message):
    __slots__ = ("target", "arrow_ipc", "truncate", "normalize", "noop", "truncation_direction", "prompt_name", "dimensions", "compression", "output_dtype")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    NOOP_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_DIRECTION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    target: Target
    arrow_ipc: bytes
    truncate: bool
    normalize: bool
    noop: bool
    truncation_direction: _tei_pb2.TruncationDirection
    prompt_name: str
    dimensions: int
    compression: ArrowCompression
    output_dtype: OutputDtype
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., arrow_ipc: _Optional[bytes] = ..., truncate: _Optional[bool] = ..., normalize: _Optional[bool] = ..., noop: _Optional[bool] = ..., truncation_direction: _Optional[_Union[_tei_pb2.TruncationDirection, str]] = ..., prompt_name: _Optional[str] = ..., dimensions: _Optional[int] = ..., compression: _Optional[_Union[ArrowCompression, str]] = ..., output_dtype: _Optional[_Union[OutputDtype, str]] = ...) -> None: ...

class EmbedArrowResponse(_message.Message):
    __slots__ = ("arrow_ipc",)
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    arrow_ipc: bytes
    def __init__(self, arrow_ipc: _Optional[bytes] = ...) -> None: ...

class EmbedSparseArrowRequest(_message.Message):
    __slots__ = ("target", "arrow_ipc", "truncate", "noop", "truncation_direction", "prompt_name", "compression")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    NOOP_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_DIRECTION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    target: Target
    arrow_ipc: bytes
    truncate: bool
    noop: bool
    truncation_direction: _tei_pb2.TruncationDirection
    prompt_name: str
    compression: ArrowCompression
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., arrow_ipc: _Optional[bytes] = ..., truncate: _Optional[bool] = ..., noop: _Optional[bool] = ..., truncation_direction: _Optional[_Union[_tei_pb2.TruncationDirection, str]] = ..., prompt_name: _Optional[str] = ..., compression: _Optional[_Union[ArrowCompression, str]] = ...) -> None: ...

class EmbedSparseArrowResponse(_message.Message):
    __slots__ = ("arrow_ipc",)
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    arrow_ipc: bytes
    def __init__(self, arrow_ipc: _Optional[bytes] = ...) -> None: ...
