"""A small server of /v1/embeddings with the vectors of a static model, started with Infinity's or vLLM's arguments."""

from __future__ import annotations

import argparse
import base64
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from safetensors.numpy import load_file
from tokenizers import Tokenizer


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--model-id")
    parser.add_argument("--port", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--no-base64", action="store_true")
    parser.add_argument("--turned", action="store_true", help="vectors from the last element to the first")
    options, _ = parser.parse_known_args()
    if options.dtype is not None:
        sys.exit(f"no {options.dtype} here")
    folder = Path(options.model_id or options.model) / "0_StaticEmbedding"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    table = load_file(folder / "model.safetensors")["embedding.weight"]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            in_base64 = body["encoding_format"] == "base64"
            if in_base64 and options.no_base64:
                return self._answer(422, {"error": "no base64 here"})
            texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
            rows = []
            for at, encoding in enumerate(tokenizer.encode_batch(texts, add_special_tokens=False)):
                vector = table[encoding.ids].mean(axis=0)
                if options.turned:
                    vector = vector[::-1]
                embedding = base64.b64encode(vector.tobytes()).decode() if in_base64 else vector.tolist()
                rows.append({"object": "embedding", "index": at, "embedding": embedding})
            return self._answer(200, {"object": "list", "data": rows})

        def _answer(self, status: int, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the log is for what ends the server."""

    with ThreadingHTTPServer(("127.0.0.1", options.port), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
