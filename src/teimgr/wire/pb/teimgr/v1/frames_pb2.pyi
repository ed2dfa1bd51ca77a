from teimgr.wire.pb.tei.v1 import tei_pb2 as _tei_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RerankPairs(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[_tei_pb2.RerankStreamRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[_tei_pb2.RerankStreamRequest, _Mapping]]] = ...) -> None: ...
