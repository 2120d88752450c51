"""The tokens of chunks, sent to the engine once and named from then on.

A prompt of ten documents is twenty thousand integers, and all but the literal ones are known to the engine since the
first request that used the documents. So a request carries its literals and, for each segment, the name of its tokens:
a digest of them, so that a name can never stand for other tokens, whoever sent them. What an engine does not know (any
more) it names in an error, and the request is sent again with the tokens.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

TYPE = "i"  # 32 bits
MOST_TOKENS = 1 << 25
"""That an engine keeps: 256 MiB."""
MOST_SENT = 1 << 22
"""That a client remembers having sent, as Python's numbers: about 170 MB."""


def pack(token_ids: Sequence[int]) -> bytes:
    """Tokens as bytes, in the order of this machine: both ends run on it.

    Raises:
        ValueError: something that is no whole number of 32 bits.
    """
    try:
        return array(TYPE, token_ids).tobytes()
    except (OverflowError, TypeError):
        raise ValueError("a token id is no whole number, or too large") from None


def unpack(data: bytes) -> array[int]:
    """What `pack` was given.

    Raises:
        ValueError: not a whole number of tokens, or negative ones.
    """
    tokens = array(TYPE)
    tokens.frombytes(data)
    if tokens and min(tokens) < 0:
        raise ValueError("a token id is negative")
    return tokens


def check_tokens(token_ids: Sequence[int], vocabulary: int) -> None:
    """The model would read an embedding that it does not have, and the engine would die of it.

    Raises:
        ValueError: a token id that is not below the size of the vocabulary.
    """
    if token_ids and max(token_ids) >= vocabulary:
        raise ValueError(f"token id {max(token_ids)} is out of vocabulary, which has {vocabulary}")


def name_of(data: bytes, namespace: str = "") -> str:
    """The name of packed tokens in a namespace: 32 hex digits.

    What one tenant has sent is not known under another's name: else the time that a request takes would tell whether
    another tenant has the same document.
    """
    salt = blake2b(namespace.encode(), digest_size=16).digest() if namespace else b""
    return blake2b(data, digest_size=16, salt=salt, person=b"lazyrag-tokens").hexdigest()


class Contents:
    """What an engine knows: the tokens of chunks by name, least recently used ones forgotten.

    Args:
        vocabulary: of the model: token ids are below.
        most_tokens: that are kept.
    """

    def __init__(self, vocabulary: int, most_tokens: int = MOST_TOKENS) -> None:
        self._vocabulary = vocabulary
        self._most_tokens = most_tokens
        self._num_tokens = 0
        self._known: OrderedDict[str, array[int] | list[int]] = OrderedDict()
        """Packed until they are used again: most chunks that are ingested are not, for a while."""
        self._numbers: dict[int, int] = {}
        """One object for each token id: eight bytes a token, and prompts are put together without making numbers."""

    def add(self, data: bytes, namespace: str = "") -> tuple[str, list[int]]:
        """Keep packed tokens of a namespace; returns their name and the tokens, which must not be changed.

        Raises:
            ValueError: see `unpack`; or a token that the model does not have.
        """
        name = name_of(data, namespace)
        tokens = self.get(name)
        if tokens is None:
            given = unpack(data)
            check_tokens(given, self._vocabulary)
            self._known[name] = given
            tokens = given.tolist()
            self._num_tokens += len(tokens)
        while self._num_tokens > self._most_tokens and len(self._known) > 1:
            _, dropped = self._known.popitem(last=False)
            self._num_tokens -= len(dropped)
        return name, tokens

    def get(self, name: str) -> list[int] | None:
        """The tokens of a name, None if it is not known. Not to be changed."""
        tokens = self._known.get(name)
        if tokens is None:
            return None
        self._known.move_to_end(name)
        if isinstance(tokens, array):
            tokens = self._known[name] = [self._numbers.setdefault(token, token) for token in tokens]
        return tokens


class Sender:
    """What a client believes one engine to know. Not for several threads at once.

    Args:
        most_tokens: that are kept here, too, for comparison.
    """

    def __init__(self, most_tokens: int = MOST_SENT) -> None:
        self._most_tokens = most_tokens
        self._num_tokens = 0
        self._sent: OrderedDict[tuple[object, int], tuple[list[int], str]] = OrderedDict()

    def names(
        self, runs: Sequence[tuple[object, Sequence[int]]], *, namespace: str = "", everything: bool = False
    ) -> tuple[list[str], Mapping[str, bytes]]:
        """Names for the runs of a prompt, and the tokens that must go along.

        Args:
            runs: (what identifies the run, such as a chunk's id and offset; its tokens). The same identity with other
                tokens is another run.
            namespace: whose they are.
            everything: send all tokens: the engine has said that it lacks some.
        """
        names, contents = [], {}
        for identity, tokens in runs:
            key, known = ((namespace, identity), len(tokens)), None
            if key in self._sent:
                self._sent.move_to_end(key)
                known = self._sent[key]
            if known is not None and known[0] == tokens and not everything:
                names.append(known[1])
                continue
            data = pack(tokens)
            name = name_of(data, namespace)
            contents[name] = data
            names.append(name)
            if known is None:
                self._num_tokens += len(tokens)
            self._sent[key] = list(tokens), name
        while self._num_tokens > self._most_tokens and len(self._sent) > 1:
            _, (dropped, _) = self._sent.popitem(last=False)
            self._num_tokens -= len(dropped)
        return names, contents
