"""Who asks: an API key names a namespace. Without keys, only this machine is served.

A key file is TOML:

    operators = ["team-a"]

    [keys]
    "sk-a-long-random-text" = "team-a"
    "sk-another-one" = "team-b"

    [quotas.team-b]
    documents = 1000
    chunks = 50_000
    kv_bytes = "20GiB"

Two keys may name one namespace. The empty namespace is that of `lazyrag ingest` without `--namespace`. `operators`
(nobody, if it is not there) may see what concerns all tenants: /metrics, and that a text is another tenant's. What a
quota leaves out is as in the server's settings (`quota_documents`, ...).
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lazyrag.config import Config
from lazyrag.errors import ConfigError

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]


class Keys:
    """API keys. They are kept as digests, and compared in a time that does not depend on them.

    Args:
        namespaces: key -> namespace.
        quotas: namespace -> what it may hold, by the names in a key file; other namespaces have the settings' quota.
        operators: namespaces whose keys may see what concerns all tenants.

    Raises:
        ConfigError: a key that cannot stand in a header; a quota that is none; a namespace that no key names.
    """

    def __init__(
        self,
        namespaces: Mapping[str, str] | None = None,
        *,
        quotas: Mapping[str, Mapping[str, Any]] | None = None,
        operators: Collection[str] = (),
    ) -> None:
        self._known: list[tuple[bytes, str]] = []
        for number, (key, namespace) in enumerate((namespaces or {}).items(), 1):
            if not key.isascii() or not key.isprintable() or not key or " " in key:
                raise ConfigError(
                    f"API key number {number} cannot be used:",
                    why="it is empty, or holds a character that is not printable ASCII.",
                    fix='Make one: python -c "import secrets; print(secrets.token_urlsafe(32))"',
                )
            self._known.append((_digest(key), namespace))
        self.namespaces = frozenset((namespaces or {}).values())
        # A name that was mistyped would leave a tenant without its quota. It is not shown: it may be a key.
        if not {*(quotas or {}), *operators} <= self.namespaces:
            raise ConfigError("A quota or an operator is of a namespace that no key has.", fix="Mend the key file.")
        self._quotas = {namespace: _quota(namespace, given) for namespace, given in (quotas or {}).items()}
        self._operators = frozenset(operators)

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
        keys, quotas, operators = values.get("keys"), values.get("quotas", {}), values.get("operators", [])

        def unfit(why: str) -> ConfigError:
            return ConfigError(f"The key file {path} cannot be used:", why=why, fix=_FIX)

        if not isinstance(keys, dict) or not keys:
            raise unfit("it holds no table of keys.")
        if not values.keys() <= {"keys", "quotas", "operators"}:  # whose names may be keys
            raise unfit("it holds something else than keys, quotas and operators.")
        if not all(isinstance(namespace, str) for namespace in keys.values()):
            raise unfit("a namespace in it is not text.")
        if not isinstance(quotas, dict) or not all(isinstance(quota, dict) for quota in quotas.values()):
            raise unfit("a quota in it is no table.")
        if not isinstance(operators, list) or not all(isinstance(name, str) for name in operators):
            raise unfit("operators in it is no list of namespaces.")
        return cls(keys, quotas=quotas, operators=operators)

    def __len__(self) -> int:
        return len(self._known)

    def namespace(self, key: str) -> str | None:
        """Whose key this is; None if it is nobody's."""
        given, found = _digest(key), None
        for known, namespace in self._known:  # all of them, whichever fits
            if hmac.compare_digest(known, given):
                found = namespace
        return found

    def settings(self, namespace: str) -> Mapping[str, Any]:
        """The settings in which a namespace differs from the server's."""
        return self._quotas.get(namespace, {})

    def is_operator(self, namespace: str) -> bool:
        """Whether a caller may see what concerns all tenants. Without keys, callers are on this machine, and may."""
        return not self._known or namespace in self._operators


def _quota(namespace: str, given: Mapping[str, Any]) -> dict[str, Any]:
    quota = {f"quota_{name}": value for name, value in given.items()}
    known = ("quota_documents", "quota_chunks", "quota_kv_bytes")
    if not quota.keys() <= set(known):
        raise ConfigError(
            f"The quota of {namespace!r} cannot be used:", why="it may hold documents, chunks and kv_bytes, no more."
        )
    checked = Config(**quota, origins=dict.fromkeys(quota, f"quota of {namespace!r}"))
    return {name: getattr(checked, name) for name in quota}


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
