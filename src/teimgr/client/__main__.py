"""`python -m teimgr.client INSTANCE TEXT …`: one gRPC call from a shell, its vectors as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys

from teimgr.client.clients import Client
from teimgr.client.connection import ConnectionValues, DaemonConnection
from teimgr.errors import TeimgrError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m teimgr.client",
        description="Embed texts over gRPC. The daemon is named by flags, by TEIMGR_URL or by a context.",
    )
    parser.add_argument("--url", metavar="URL", help="REST address of the daemon, which reports its gRPC port")
    parser.add_argument("--grpc", metavar="URL", help="the multiplexer")
    parser.add_argument("--api-key-file", metavar="PATH", help="file with the API key; default: TEIMGR_API_KEY")
    parser.add_argument("--ca", metavar="PATH", help="certificate authority of the server, PEM")
    parser.add_argument("--cert", metavar="PATH", help="client certificate, PEM")
    parser.add_argument("--key", metavar="PATH", help="its private key, PEM")
    parser.add_argument("--context", metavar="NAME", help="named connection of `teimgr context`")
    parser.add_argument("instance", help="who answers")
    parser.add_argument("texts", nargs="+", metavar="text")
    options = parser.parse_args(arguments)
    flags = ConnectionValues(
        url=options.url,
        grpc_url=options.grpc,
        api_key_file=options.api_key_file,
        ca=options.ca,
        cert=options.cert,
        key=options.key,
    )
    try:
        connection = DaemonConnection.resolve(flags, context=options.context)
        with Client(connection.url, connection.grpc(), tls=connection.tls, api_key=connection.api_key) as client:
            vectors = client.embed(options.texts, instance=options.instance)
    except TeimgrError as error:
        print(f"{error.code.name}: {error.message}", file=sys.stderr)
        return 1
    for vector in vectors:
        print(json.dumps([round(float(value), 6) for value in vector]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
