"""TEI's HTTP dialect without a transport: JSON values in, engine jobs, JSON bytes out.

Bodies, texts and orders are those of Text Embeddings Inference 1.9.3. Nothing here knows HTTP or a socket, so the same
pieces serve an instance's own port and whoever else speaks this dialect.
"""
