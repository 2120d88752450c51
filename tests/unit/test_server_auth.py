"""Whose key it is, and who is served without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazyrag.backend.server.app import bound
from lazyrag.backend.server.auth import Keys, is_loopback, names_loopback
from lazyrag.errors import ConfigError


def test_a_key_names_its_namespace_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[keys]\n"sk-one" = "a"\n"sk-two" = "b"\n"sk-three" = ""\n')
    keys = Keys.load(path)
    assert [keys.namespace(key) for key in ("sk-one", "sk-two", "sk-three")] == ["a", "b", ""]
    assert [keys.namespace(key) for key in ("", "sk-on", "sk-one ", "a", "SK-ONE", "\ud800")] == [None] * 6
    assert len(keys) == 3


@pytest.mark.parametrize(
    "text",
    ["", "[keys]\n", 'keys = "sk-secret"\n', '"sk-secret" = "a"\n', '[keys]\n"sk-secret" = 1\n', '[keys\n"sk-secret'],
)
def test_a_file_that_is_no_key_file_is_refused_without_showing_a_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        Keys.load(path)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("key", ["", "with space", "schlüssel-secret", "new\nline"])
def test_a_key_that_cannot_stand_in_a_header_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigError, match="API key number 2") as refused:
        Keys({"sk-good": "", key: "a"})
    assert not key or key not in str(refused.value)


def test_a_missing_key_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Keys.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("", False),
        (None, False),
    ],
)
def test_only_this_machine_is_this_machine(host: str | None, local: bool) -> None:
    assert is_loopback(host) is local


@pytest.mark.parametrize(
    ("header", "local"),
    [
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("[::1]:8000", True),
        ("rebound.example:8000", False),
        ("user@rebound.example", False),
        ("[", False),
        (None, False),
    ],
)
def test_a_name_that_was_made_to_point_here_is_not_this_machine(header: str | None, local: bool) -> None:
    assert names_loopback(header) is local


def test_without_keys_no_address_is_open_to_others() -> None:
    with pytest.raises(ConfigError, match="open to everybody"):
        bound("0.0.0.0", 0, Keys())
    bound("0.0.0.0", 0, Keys({"sk-one": ""})).close()


def test_an_address_that_is_taken_is_an_error_before_anything_starts() -> None:
    with bound("127.0.0.1", 0, Keys()) as first:
        first.listen()
        with pytest.raises(ConfigError, match="in use"):
            bound("127.0.0.1", first.getsockname()[1], Keys())
    with pytest.raises(ConfigError, match="cannot listen"):
        bound("203.0.113.1", 0, Keys({"sk-one": ""}))  # an address of nobody


KEYS = '[keys]\n"sk-secret" = "a"\n"sk-b" = "b"\n'


def test_a_key_file_holds_quotas_and_operators(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'operators = ["b"]\n{KEYS}[quotas.a]\ndocuments = 3\nkv_bytes = "2MiB"\n')
    keys = Keys.load(path)
    assert keys.settings("a") == {"quota_documents": 3, "quota_kv_bytes": 2 << 20}
    assert keys.settings("b") == {}
    assert [keys.is_operator(namespace) for namespace in ("a", "b")] == [False, True]
    assert Keys().is_operator("")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{KEYS}[quotas.sk-secret]\nchunks = 3\n", "of a namespace that no key has"),
        (f'operators = ["sk-secret"]\n{KEYS}', "of a namespace that no key has"),
        (f'operators = "b"\n{KEYS}', "no list of namespaces"),
        (f"{KEYS}[quotas]\na = 3\n", "a quota in it is no table"),
        (f"{KEYS}[quotas.a]\nbytes = 3\n", "it may hold documents, chunks and kv_bytes"),
        (f"{KEYS}[quotas.a]\nchunks = 0\n", "it must be 1 or more"),
        (f'{KEYS}[quotas.a]\nkv_bytes = "much"\n', "a number of bytes"),
        (f"{KEYS}[sk-secret]\n", "something else than keys"),
    ],
)
def test_a_quota_or_an_operator_that_cannot_be_keeps_the_server_from_starting(
    tmp_path: Path, text: str, why: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as refused:
        Keys.load(path)
    assert "secret" not in str(refused.value)
