"""The reference of settings: every key of the configuration, from the dataclasses that declare them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from docsite.markdown import MADE_BY, code, document, table
from teimgr.config.auth import ApiKeyEntry, Auth, Mtls, ServerTls
from teimgr.config.sections import BatchSettings, ClusterSettings, OnDemandSettings
from teimgr.config.settings import Otel, Settings, Webhook
from teimgr.config.sources import scalars
from teimgr.spec import Change, InstanceKey, InstanceSpec, key_of

_TABLES: tuple[tuple[str, str, type[Any]], ...] = (
    ("Traces: `[otel]`", "otel", Otel),
    ("Several hosts: `[cluster]`", "", ClusterSettings),
    ("Models that calls load: `[on_demand]`", "", OnDemandSettings),
    ("Files and batches: `[batches]`", "", BatchSettings),
    ("Authentication: `[auth]`", "", Auth),
    ("Mutual TLS: `[auth.mtls]`", "", Mtls),
    ("TLS without client certificates: `[auth.tls]`", "", ServerTls),
    ("API keys: `[[auth.api_keys]]`", "", ApiKeyEntry),
    ("Webhooks: `[[webhooks]]`", "", Webhook),
)
_CHANGES = {
    Change.IN_PLACE: "at once",
    Change.SCALE: "adds or removes workers",
    Change.REPLACE: "new workers, without a gap",
    Change.FIXED: "never",
}
_HEAD = f"""# Settings

{MADE_BY}

Built-in default < TOML file < environment < command line. Unknown keys are refused, with the nearest known one.
[configs/teimgr.toml](../../configs/teimgr.toml) has the same keys as a file to copy. `teimgr config check FILE` reports
every fault with its line, `teimgr config show` each value in effect with its source.

Times are seconds; relative paths are taken from the working directory. *reload*: SIGHUP or `POST /config/reload`
applies the key to a running daemon; other keys count from the next start on. Of two variables the last one wins; the
first is tei-manager's.
"""


def to_markdown() -> str:
    """The text of docs/reference/settings.md."""
    lines = [*_HEAD.splitlines(), "", "## The daemon", "", *_settings(Settings, "")]
    for title, prefix, kind in _TABLES:
        lines += ["", f"## {title}", "", *_settings(kind, prefix)]
    return document([*lines, *_instance_keys(), *_others()])


def _settings(kind: type[Any], prefix: str) -> list[str]:
    hints = get_type_hints(kind)
    variables = {scalar.path: scalar.variables for scalar in scalars()}
    rows = []
    for item in fields(kind):
        declared = key_of(item)
        path = (prefix, item.name) if prefix else (item.name,)
        names = variables.get(path, ()) if kind in (Settings, Otel) else ()
        meaning = _meaning(hints[item.name], declared.meaning, declared.low, declared.high)
        live = "yes" if declared.live else ""
        rows.append(("<br>".join(map(code, (item.name, *names))), _default(kind, item), live, meaning))
    if kind in (Settings, Otel):
        return table(("key, and environment", "default", "reload", "meaning"), rows)
    return table(("key", "default", "meaning"), [(row[0], row[1], row[3]) for row in rows])


def _instance_keys() -> Iterator[str]:
    yield from ("", "## Instances: `[[instances]]`, `POST /instances`, `[templates.NAME]`", "")
    yield from (
        "`name` and `model_id` are needed. Templates have no name and no ports. *changes*: what a `PATCH` of the key",
        "needs. *flag*: also in `extra_args`, in TEI's spelling.",
        "",
    )
    hints = get_type_hints(InstanceSpec)
    rows = []
    for item in fields(InstanceSpec):
        declared = key_of(item)
        assert isinstance(declared, InstanceKey)
        if not declared.in_config:
            continue
        words = f": {', '.join(declared.words)}" if declared.words else ""
        meaning = _meaning(hints[item.name], declared.meaning, declared.low, declared.high) + words
        if not declared.in_rest:
            meaning += "; not over REST"
        flag = code("--" + item.name.replace("_", "-")) if declared.flag else ""
        rows.append((code(item.name), _default(InstanceSpec, item), _CHANGES[declared.change], flag, meaning))
    yield from table(("key", "default", "changes", "flag", "meaning"), rows)


def _others() -> Iterator[str]:
    yield from (
        "",
        "## Variables without a key",
        "",
        *table(
            ("variable", "meaning"),
            (
                (
                    "`TEIMGR_NATIVE`",
                    "`0`: workers use nothing of the native library; `attention`: only its attention; "
                    "`avx2`, `avx_vnni`, `avx512`, `avx512_bf16`, `neon`: no instructions beyond these",
                ),
                ("`TEIMGR_CUDA_GRAPHS`", "`0`: workers on GPUs launch every kernel separately"),
                ("`HF_TOKEN`", "token for gated and private models, read by workers and downloads"),
                ("`HF_HOME`, `HF_HUB_CACHE`", "where the hub cache lies"),
                ("`HF_HUB_OFFLINE`", "`1`: no model is looked for on the hub"),
                ("`HF_ENDPOINT`", "address of the hub, or of a mirror"),
            ),
        ),
        "",
        "Those of the command line are in [its reference](../cli.md#which-daemon).",
    )


def _default(kind: type[Any], item: Field[Any]) -> str:
    if item.default is MISSING and item.default_factory is MISSING:
        return "needed"
    factory: Any = item.default_factory
    value = item.default if item.default is not MISSING else factory()
    if kind is Settings and value is None and item.name in ("state_file", "run_dir", "log_dir"):
        return code(_toml(getattr(Settings(), item.name)))
    return "table" if is_dataclass(value) else code(_toml(value)) if value is not None else "–"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return "{}" if isinstance(value, dict) else str(value)


def _meaning(hint: Any, meaning: str, low: float | None, high: float | None) -> str:
    words = [word for each in (hint, *get_args(hint)) if get_origin(each) is Literal for word in get_args(each)]
    if words and str(words[0]) not in meaning:
        meaning += f"; {' or '.join(map(code, words))}"
    if low is not None or high is not None:
        meaning += f" ({'' if low is None else low} to {'' if high is None else _limit(high)})"
    return meaning


def _limit(high: float) -> str:
    return next((f"2^{bits} - 1" for bits in (32, 63) if high == 2**bits - 1), str(high))
