"""The daemon that a command uses, and its credentials: flags, environment variables and named contexts, in one order.

Flags replace single values of a context or the environment. With `--context NAME` the environment is not read; without
it, `TEIMGR_URL` means that no context is read. Key and certificates belong to the address that they are given with, and
are left out if a flag or variable replaces that address by another one.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teimgr.client.blocking_http import BlockingHttpChannel
from teimgr.client.rest_client import API, RestClient
from teimgr.client.server_address import ServerAddress, Tls
from teimgr.errors import InvalidConfig, TeimgrError, Unreachable
from teimgr.files import expanded, write_atomically

if TYPE_CHECKING:
    from teimgr.client.clients import Client

CONTEXT = "TEIMGR_CONTEXT"
CONTEXTS_FILE = "TEIMGR_CONTEXTS"
_DEFAULT_API_PORT = 9000
_DEFAULT_GRPC_PORT = 9001
_FILE_MODE = 0o600
_CREDENTIALS = ("api_key", "api_key_file", "ca", "cert", "key", "server_name")


@dataclass(frozen=True, slots=True)
class ConnectionValues:
    """Values that flags, the environment and a context may give; None leaves a value to the next source."""

    url: str | None = None
    grpc_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None

    def over(self, other: ConnectionValues) -> ConnectionValues:
        """Return these values, with None replaced from `other`; a key and a file of a key replace each other.

        The credentials of `other` are left out if these values have another address than `other`.

        Raises:
            InvalidConfig: an address is not valid.
        """
        given = {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}
        if "api_key" in given or "api_key_file" in given:
            given = {"api_key": None, "api_key_file": None} | given
        if "url" in given:  # another REST address also replaces the gRPC address
            given = {"grpc_url": None} | given
        if self._leads_elsewhere(other):
            given = dict.fromkeys(_CREDENTIALS) | given
        return replace(other, **given)

    def _leads_elsewhere(self, other: ConnectionValues) -> bool:
        """True if these values have a REST address that `other` lacks, or without one, gRPC on another host."""
        known = [ServerAddress.parse(url) for url in (other.url, other.grpc_url) if url is not None]
        if not known:
            return False
        if self.url is not None:
            return other.url is None or ServerAddress.parse(self.url) != known[0]
        return self.grpc_url is not None and ServerAddress.parse(self.grpc_url).host not in {
            each.host for each in known
        }


VARIABLES = {item.name: f"TEIMGR_{item.name.upper()}" for item in fields(ConnectionValues)}
"""Environment variable by value: TEIMGR_URL, TEIMGR_API_KEY, TEIMGR_CA, …"""


@dataclass(frozen=True, slots=True)
class DaemonConnection:
    """A daemon's addresses and this caller's credentials.

    If `grpc_url` is None, the daemon is asked for its gRPC port. `source` names the source of the address in messages.
    """

    url: str = API
    grpc_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    tls: Tls = field(default_factory=Tls)
    source: str = "the default"

    @classmethod
    def resolve(
        cls,
        flags: ConnectionValues | None = None,
        *,
        context: str | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> DaemonConnection:
        """Find the connection by flags, then `context`, else the environment, else the current context, else the
        default.

        Raises:
            InvalidConfig: an unknown context, a file that cannot be read, or an invalid address.
        """
        flags = flags or ConnectionValues()
        variables = ConnectionValues(**{name: environ.get(variable) or None for name, variable in VARIABLES.items()})
        if context is not None:
            found, source = flags.over(Contexts.load(environ).get(context)), f"the context {context!r}"
        else:
            # A key in a variable without an address belongs to the address of a flag, so flags are applied first.
            found, source = flags.over(variables), f"the environment variable {VARIABLES['url']}"
            if variables.url is None:
                contexts = Contexts.load(environ)
                name = environ.get(CONTEXT) or contexts.current
                source = f"the context {name!r}" if name else "the default"
                found = found.over(contexts.get(name)) if name else found
        return cls._of(found, "--url" if flags.url is not None else source)

    @classmethod
    def _of(cls, values: ConnectionValues, source: str) -> DaemonConnection:
        url = values.url or API
        ServerAddress.parse(url)
        api_key = values.api_key
        if api_key is None and values.api_key_file is not None:
            try:
                api_key = expanded(values.api_key_file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or error
                raise InvalidConfig(f"the file of the API key, {values.api_key_file}: {reason}") from error
        tls = Tls(ca=values.ca, cert=values.cert, key=values.key, server_name=values.server_name)
        return cls(url, values.grpc_url, api_key, tls, source)

    @property
    def is_default(self) -> bool:
        """True if neither flags nor environment nor a context named a daemon."""
        return self.source == "the default" and self.grpc_url is None

    def rest_client(self, timeout_s: float = 60.0, expect_fingerprint: str | None = None) -> RestClient:
        return RestClient(
            self.url, tls=self.tls, api_key=self.api_key, timeout_s=timeout_s, expect_fingerprint=expect_fingerprint
        )

    def http_channel(self) -> BlockingHttpChannel:
        return BlockingHttpChannel(ServerAddress.parse(self.url), self.tls, self.api_key)

    def client(self, timeout_s: float = 60.0, expect_fingerprint: str | None = None) -> Client:
        """Make the client of REST and gRPC, not yet opened; imports numpy, pyarrow and grpc.

        Raises:
            TeimgrError: the daemon did not answer the question for its gRPC port.
        """
        from teimgr.client.clients import Client

        return Client(
            self.url,
            self.grpc(),
            tls=self.tls,
            api_key=self.api_key,
            timeout_s=timeout_s,
            expect_fingerprint=expect_fingerprint,
        )

    def grpc(self) -> str:
        """Return the gRPC address: the given one, else the REST host with the port that the daemon reports; if REST is
        at a Unix socket, the socket of gRPC if the daemon has one.

        A key that may not read the settings gets the port above that of REST; at a Unix socket, the default port.

        Raises:
            Unreachable: no daemon answers.
        """
        if self.grpc_url is not None:
            return self.grpc_url
        address = ServerAddress.parse(self.url)
        port = _DEFAULT_GRPC_PORT if address.path or address.port == _DEFAULT_API_PORT else address.port + 1
        try:
            settings = {each["key"]: each["value"] for each in self.rest_client(timeout_s=5.0).config()}
            if address.path and str(settings.get("grpc_socket")).startswith("/"):
                return replace(address, path=settings["grpc_socket"]).url
            port = int(settings["grpc_port"])
        except Unreachable:
            raise
        except (TeimgrError, ValueError, TypeError, KeyError):
            pass  # the key may not read the settings, or the server is another product
        return ServerAddress(address.host, port, address.secure).url


@dataclass(frozen=True, slots=True)
class Contexts:
    """The named connections of a user: a TOML file with `current` and one table `[contexts.NAME]` each."""

    path: Path
    current: str | None = None
    tables: Mapping[str, ConnectionValues] = field(default_factory=dict)

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ) -> Contexts:
        """Read the contexts in `TEIMGR_CONTEXTS`, else in the user's configuration folder; none if it lacks the file.

        Raises:
            InvalidConfig: the file is not TOML, has an unknown key, or a value of another type.
        """
        if CONTEXTS_FILE in environ:
            path = Path(environ[CONTEXTS_FILE])
        else:
            base = environ.get("XDG_CONFIG_HOME")
            folder = Path(base) if base else expanded(environ.get("HOME") or "~") / ".config"
            path = folder / "teimgr" / "contexts.toml"
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError) as error:
            raise InvalidConfig(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        tables = {name: _values(path, name, each) for name, each in _tables(path, table).items()}
        return cls(path, table.get("current"), tables)

    def get(self, name: str) -> ConnectionValues:
        """Return the values of a context.

        Raises:
            InvalidConfig: no context has this name.
        """
        if name not in self.tables:
            known = ", ".join(self.tables) or "none"
            raise InvalidConfig(
                f"{self.path}: no context {name!r}; there are {known}; `teimgr context add NAME URL` makes one"
            )
        return self.tables[name]

    def save(self) -> None:
        """Write the file, readable only by its owner.

        Raises:
            InvalidConfig: it cannot be written.
        """
        import tomli_w

        tables = {
            name: {item.name: value for item in fields(each) if (value := getattr(each, item.name)) is not None}
            for name, each in self.tables.items()
        }
        text = tomli_w.dumps(({"current": self.current} if self.current else {}) | {"contexts": tables})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, text.encode(), mode=_FILE_MODE, durable=True)
        except OSError as error:
            raise InvalidConfig(f"{self.path}: {error.strerror}") from error


def _tables(path: Path, table: Mapping[str, Any]) -> Mapping[str, Any]:
    if unknown := table.keys() - {"current", "contexts"}:
        raise InvalidConfig(f"{path}: unknown key {min(unknown)!r}; known are current, contexts")
    if not isinstance(table.get("current", ""), str):
        raise InvalidConfig(f"{path}: current must be a string")
    tables = table.get("contexts", {})
    if not isinstance(tables, dict):
        raise InvalidConfig(f"{path}: contexts must be a table")
    return tables


def _values(path: Path, name: str, table: Any) -> ConnectionValues:
    known = {item.name for item in fields(ConnectionValues)}
    for key, value in table.items() if isinstance(table, dict) else ():
        if key not in known:
            raise InvalidConfig(f"{path}: contexts.{name}: unknown key {key!r}; known are {', '.join(sorted(known))}")
        if not isinstance(value, str):
            raise InvalidConfig(f"{path}: contexts.{name}.{key} must be a string")
    if not isinstance(table, dict) or "url" not in table:
        raise InvalidConfig(f"{path}: contexts.{name}: url is missing")
    return ConnectionValues(**table)
