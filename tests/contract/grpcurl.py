"""The part of grpcurl that tei-manager's documentation uses, built on server reflection alone: no stubs, no files.

    python grpcurl.py [-plaintext | -cacert FILE [-cert FILE -key FILE]] [-d JSON] ADDRESS list
    python grpcurl.py … ADDRESS list SERVICE
    python grpcurl.py … ADDRESS SERVICE/METHOD

Like the real one it prints messages as JSON with bytes in base64, and for a failure the code and message on stderr.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

CALL_LIMIT_S = 60.0
EXIT_FAILED = 64
"""grpcurl's exit status for a failed call is this plus the number of the gRPC code."""
_NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the result is the exit status."""
    options = _parser().parse_args(arguments)
    with _channel(options) as channel:
        known = ProtoReflectionDescriptorDatabase(channel)
        try:
            if options.symbol == "list":
                print("\n".join(_listed(known, options.service)))
            else:
                print(_called(channel, DescriptorPool(known), options.symbol, options.d))
        except grpc.RpcError as error:
            print(f"ERROR:\n  Code: {_camel(error.code().name)}\n  Message: {error.details()}", file=sys.stderr)
            return EXIT_FAILED + int(error.code().value[0])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpcurl", allow_abbrev=False)
    parser.add_argument("-plaintext", action="store_true")
    for name in ("-cacert", "-cert", "-key"):
        parser.add_argument(name, type=Path)
    parser.add_argument("-d", default="{}")
    parser.add_argument("address")
    parser.add_argument("symbol")
    parser.add_argument("service", nargs="?")
    return parser


def _channel(options: argparse.Namespace) -> grpc.Channel:
    if options.plaintext:
        return grpc.insecure_channel(options.address, _NO_LIMIT)
    files = (options.cacert, options.key, options.cert)
    return grpc.secure_channel(
        options.address, grpc.ssl_channel_credentials(*(file and file.read_bytes() for file in files)), _NO_LIMIT
    )


def _listed(known: ProtoReflectionDescriptorDatabase, service: str | None) -> list[str]:
    if service is None:
        return sorted(known.get_services())
    methods = DescriptorPool(known).FindServiceByName(service).methods
    return sorted(method.full_name for method in methods)


def _called(channel: grpc.Channel, pool: DescriptorPool, symbol: str, body: str) -> str:
    service, _, name = symbol.replace("/", ".").rpartition(".")
    method: MethodDescriptor = pool.FindServiceByName(service).methods_by_name[name]
    call = channel.unary_unary(
        f"/{service}/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    request = json_format.Parse(body, GetMessageClass(method.input_type)(), descriptor_pool=pool)
    return json_format.MessageToJson(call(request, timeout=CALL_LIMIT_S), descriptor_pool=pool)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


if __name__ == "__main__":
    sys.exit(main())
