"""HTTP inference, shared by all dialects: request bodies, calls through the dispatcher, JSON answers.

No sockets here: the instance's own port and the frames of the daemon's gateway both end in `HttpInference`.
"""
