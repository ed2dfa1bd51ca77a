"""TODO."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from teimgr.config.provenance import KEY_FLAG, REDACTED
from teimgr.errors import InvalidConfig
from teimgr.spec import DTYPES, KINDS, POOLINGS

LENGTH_LIMIT_CHARS = 16 * 1024


def _text(value: str) -> str:
    return value


def _key(value: str) -> str:
    if value == REDACTED:
        raise ValueError("must be the key itself, not what is shown in its place")
    return value


def _flag(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError("must be true or false")
    return value == "true"


def _count(value: str) -> int:
    number = int(value) if value.isascii() and value.isdecimal() else 0
    if not 1 <= number < 2**32:
        raise ValueError("must be a positive number")
    return number


def _one_of(*allowed: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return value

    return read


@dataclass(frozen=True, slots=True)
class _Flag:
    """`read` turns the text into a value; `field` is that of WorkerSpec, None for a flag that means nothing here.

    `bare` flags may stand without a value, which then is true; the values of those that `repeats` are a tuple.
    """

    read: Callable[[str], Any]
    field: str | None = None
    bare: bool = False
    repeats: bool = False


_HARMLESS = _Flag(_text)

FLAGS: dict[str, _Flag] = {
    "--revision": _Flag(_text, "revision"),
    "--dtype": _Flag(_one_of(*DTYPES), "dtype"),
    "--pooling": _Flag(_one_of(*POOLINGS), "pooling"),
    "--kind": _Flag(_one_of(*KINDS), "kind"),
    "--trust-remote-code": _Flag(_flag, "trust_remote_code", bare=True),
    "--served-model-name": _Flag(_text, "served_model_name"),
    "--max-concurrent-requests": _Flag(_count, "max_concurrent_requests"),
    "--max-batch-tokens": _Flag(_count, "max_batch_tokens"),
    "--max-batch-requests": _Flag(_count, "max_batch_requests"),
    "--max-client-batch-size": _Flag(_count, "max_client_batch_size"),
    "--auto-truncate": _Flag(_flag, "auto_truncate", bare=True),
    "--default-prompt-name": _Flag(_text, "default_prompt_name"),
    "--default-prompt": _Flag(_text, "default_prompt"),
    "--payload-limit": _Flag(_count, "payload_limit_bytes"),
    KEY_FLAG: _Flag(_key, "api_key"),
    "--cors-allow-origin": _Flag(_text, "cors_allow_origin", repeats=True),
    # Accepted: TEI's way of saying something that teimgr settles elsewhere, without harm if it is not heard.
    "--tokenization-workers": _Flag(_count),
    "--prometheus-port": _HARMLESS,
    "--hostname": _HARMLESS,
    "--uds-path": _HARMLESS,
    "--otlp-endpoint": _HARMLESS,
    "--otlp-service-name": _HARMLESS,
    "--json-output": _Flag(_flag, bare=True),
    "--disable-spans": _Flag(_flag, bare=True),
}

# Refused: not to hear these would change what is served, or to whom.
REFUSED: dict[str, str] = {
    "--model-id": "the model is the instance's own field model_id",
    "--port": "the port is the instance's own field port",
    "-p": "the port is the instance's own field port",
    "--dense-path": "Dense modules are read from the model's modules.json",
    "--hf-token": "set HF_TOKEN in the daemon's environment; arguments are stored and shown",
    "--hf-api-token": "set HF_TOKEN in the daemon's environment; arguments are stored and shown",
    "--huggingface-hub-cache": "set HF_HUB_CACHE in the daemon's environment",
}


def parse(extra_args: Sequence[str]) -> dict[str, Any]:
    """The fields of WorkerSpec that the flags set; both `--flag value` and `--flag=value`.

    Raises:
        InvalidConfig: a flag is unknown, refused, given twice, or has a value it cannot have; the message names it.
    """
    if sum(map(len, extra_args)) > LENGTH_LIMIT_CHARS:
        raise InvalidConfig(f"extra_args: longer than {LENGTH_LIMIT_CHARS} characters in all")
    overrides: dict[str, Any] = {}
    seen: set[str] = set()
    rest = list(extra_args)
    while rest:
        name, flag, value = _take(rest)
        if name in seen and flag is not _HARMLESS and not flag.repeats:
            raise InvalidConfig(f"extra_args: {name} is given twice")
        seen.add(name)
        parsed = _read(name, flag, value)
        if flag.field is not None:
            overrides[flag.field] = (*overrides.get(flag.field, ()), parsed) if flag.repeats else parsed
    if overrides.keys() >= {"default_prompt", "default_prompt_name"}:
        raise InvalidConfig("extra_args: --default-prompt and --default-prompt-name exclude each other")
    return overrides


def _take(rest: list[str]) -> tuple[str, _Flag, str]:
    """The next flag and its value, off the front of `rest`."""
    name, equals, value = rest.pop(0).partition("=")
    if name in REFUSED:
        raise InvalidConfig(f"extra_args: {name} is not taken here: {REFUSED[name]}")
    if name not in FLAGS:
        raise InvalidConfig(f"extra_args: unknown flag {name!r}{_nearest(name)}")
    flag = FLAGS[name]
    if equals:
        return name, flag, value
    if flag.bare:
        return name, flag, rest.pop(0) if rest and rest[0] in ("true", "false") else "true"
    if not rest:
        raise InvalidConfig(f"extra_args: {name} needs a value")
    return name, flag, rest.pop(0)


def _read(name: str, flag: _Flag, value: str) -> Any:
    try:
        return flag.read(value)
    except ValueError as error:
        raise InvalidConfig(f"extra_args: {name} {error} (got {value!r})") from error


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, [*FLAGS, *REFUSED], n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(FLAGS)}"
