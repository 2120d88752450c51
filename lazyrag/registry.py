"""Names for things that users choose by name: file types, embedders.

A factory imports what it needs inside itself, so a thing that is not chosen costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from lazyrag.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Name -> thing, usually a factory. Filled while modules are imported, read-only afterwards.

    Args:
        kind: what the names name, for messages ("embedder").
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._things: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """A decorator that gives a thing its names.

        Raises:
            ValueError: a name is taken.
        """

        def add(thing: T) -> T:
            for name in names:
                if name in self._things:
                    raise ValueError(f"{self._kind} {name!r} is registered twice")
                self._things[name] = thing
            return thing

        return add

    def get(self, name: str) -> T:
        """The thing of this name.

        Raises:
            ConfigError: no such name; the message lists those that exist.
        """
        try:
            return self._things[name]
        except KeyError:
            raise ConfigError(f"There is no {self._kind} {name!r}.", fix=f"Known: {', '.join(self)}.") from None

    def __contains__(self, name: object) -> bool:
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._things))
