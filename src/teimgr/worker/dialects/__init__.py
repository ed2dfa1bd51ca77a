"""The HTTP dialects of the daemon's one endpoint, without a transport: a file for each, and `registry.py` of them all.

A request names its dialect and path; a body is parsed here, once, and the answer is written here, once. What a client
hears of a failure is `wire/error_bodies.py`.
"""
