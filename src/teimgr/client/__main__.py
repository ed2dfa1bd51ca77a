"""`python -m teimgr.client INSTANCE TEXT …`: one gRPC call from a shell, its vectors as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys

from teimgr.client import Client
from teimgr.client.clients import GRPC
from teimgr.errors import TeimgrError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m teimgr.client", description="Embed texts over gRPC.")
    parser.add_argument("--grpc", default=GRPC, metavar="URL", help="the multiplexer (default %(default)s)")
    parser.add_argument("instance", help="who answers")
    parser.add_argument("texts", nargs="+", metavar="text")
    options = parser.parse_args(arguments)
    try:
        with Client(grpc=options.grpc) as client:
            vectors = client.embed(options.texts, instance=options.instance)
    except TeimgrError as error:
        print(f"{error.code.name}: {error.message}", file=sys.stderr)
        return 1
    for vector in vectors:
        print(json.dumps([round(float(value), 6) for value in vector]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
