"""Who asks: an API key names a namespace. Without keys, only this machine is served.

A key file is TOML with one table:

    [keys]
    "sk-a-long-random-text" = "team-a"
    "sk-another-one" = "team-b"

Two keys may name one namespace. The empty namespace is that of `lazyrag ingest` without `--namespace`.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from lazyrag.errors import ConfigError

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]


class Keys:
    """API keys. They are kept as digests, and compared in a time that does not depend on them.

    Args:
        namespaces: key -> namespace.

    Raises:
        ConfigError: a key that cannot stand in a header.
    """

    def __init__(self, namespaces: Mapping[str, str] | None = None) -> None:
        self._known: list[tuple[bytes, str]] = []
        for number, (key, namespace) in enumerate((namespaces or {}).items(), 1):
            if not key.isascii() or not key.isprintable() or not key or " " in key:
                raise ConfigError(
                    f"API key number {number} cannot be used:",
                    why="it is empty, or holds a character that is not printable ASCII.",
                    fix='Make one: python -c "import secrets; print(secrets.token_urlsafe(32))"',
                )
            self._known.append((_digest(key), namespace))

    @classmethod
    def load(cls, path: str | Path) -> Keys:
        """Read a key file.

        Raises:
            ConfigError: it cannot be read, or is none.
        """
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"The key file {path} cannot be read:", why=f"{error.strerror}.") from None
        except (ValueError, RecursionError):  # whose text could show a key
            raise ConfigError(f"The key file {path} is not a TOML file.", fix=_FIX) from None
        keys = values.get("keys")
        if values.keys() != {"keys"} or not isinstance(keys, dict) or not keys:
            raise ConfigError(f"The key file {path} cannot be used:", why="it holds no table of keys.", fix=_FIX)
        if not all(isinstance(namespace, str) for namespace in keys.values()):
            raise ConfigError(f"The key file {path} cannot be used:", why="a namespace in it is not text.", fix=_FIX)
        return cls(keys)

    def __len__(self) -> int:
        return len(self._known)

    def namespace(self, key: str) -> str | None:
        """Whose key this is; None if it is nobody's."""
        given, found = _digest(key), None
        for known, namespace in self._known:  # all of them, whichever fits
            if hmac.compare_digest(known, given):
                found = namespace
        return found


_FIX = 'Write: [keys], and below it lines of "KEY" = "NAMESPACE".'


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def is_loopback(host: str | None) -> bool:
    """Whether an address or a name can only mean this machine."""
    if not host:
        return False
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def names_loopback(host_header: str | None) -> bool:
    """Whether a Host header names this machine: a page of another name may be made to point here."""
    try:
        return is_loopback(urlsplit(f"//{host_header or ''}").hostname)
    except ValueError:
        return False
