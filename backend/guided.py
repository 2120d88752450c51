"""How large a constraint on an answer may be. What it is compiled to grows with the numbers in it, not with its text.

A schema of thirty characters can ask for a billion items: grammar compilers then take memory, or time that grows with
the square, in the process of the caller and in the engine's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lazyrag.errors import RequestError

MOST_TEXT = 1 << 18
"""Characters of all names and texts, and values."""
MOST_NESTED = 80
"""Levels of nesting; vLLM takes 64 of a schema."""
MOST_REPEATED = 10_000
"""Of items, characters or tokens, in one place."""
MOST_REPEATED_IN_ALL = 100_000
"""The same, in sum."""
MOST_IN_PATTERNS = 1_000
"""Repetitions `{n,m}` in all regular expressions, in sum: a compiler takes a time that grows with the square."""
MOST_PROPERTIES = 500
"""Of one object."""
MOST_COUNTED = 10_000
"""An object's properties times the number that it must, or may, have of them."""
MOST_CHOICES = 10_000
"""Values of one enum."""

_REPEATS = {"minItems", "maxItems", "minLength", "maxLength", "minContains", "maxContains", "max_whitespace_cnt"}
_REPEATS |= {"max_tokens", "max_chars"}
_COUNTS = {"minProperties", "maxProperties"}
_PATTERNS = {"pattern", "regex", "grammar"}
_BRACES = re.compile(r"\{[0-9,\s]*\}")


def check_size(form: Mapping[str, Any]) -> None:
    """Refuse a JSON schema or a structural tag that compilers of grammars could choke on.

    Wherever a number stands is looked at, for that is simpler than to know which places count.

    Raises:
        RequestError: with the limit that is exceeded.
    """
    text, repeated, in_patterns = 0, 0.0, 0.0
    left: list[tuple[Any, int]] = [(form, 1)]
    while left:
        value, depth = left.pop()
        text += 1 + (len(value) if isinstance(value, str) else 0)
        _limit("levels of nesting", depth, MOST_NESTED)
        if isinstance(value, Mapping):
            text += sum(len(str(name)) for name in value)
            for name, number in _repeats(value):
                _limit(name, number, MOST_REPEATED)
                repeated += number
            for pattern in _patterns(value):
                in_patterns += sum(
                    float(n) for braces in _BRACES.findall(pattern) for n in re.findall("[0-9]+", braces)
                )
            _check_object(value)
            left += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list | tuple):
            left += [(each, depth + 1) for each in value]
        _limit("characters", text, MOST_TEXT)
        _limit("repetitions in all", repeated, MOST_REPEATED_IN_ALL)
        _limit("repetitions {n,m} in patterns", in_patterns, MOST_IN_PATTERNS)


def _limit(name: str, number: float, most: int) -> None:
    if not number <= most:  # which no NaN is
        raise RequestError("The form of the answer is too large:", why=f"{name}: {most} at most.")


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not value < 0 else None


def _repeats(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    names = _REPEATS | {"min", "max"} if values.get("type") == "repeat" else _REPEATS
    for name in names & values.keys():
        if (number := _number(values[name])) is not None:
            yield name, number


def _patterns(values: Mapping[str, Any]) -> Iterator[str]:
    yield from (values[name] for name in _PATTERNS & values.keys() if isinstance(values[name], str))
    if isinstance(named := values.get("patternProperties"), Mapping):
        yield from map(str, named)


def _check_object(values: Mapping[str, Any]) -> None:
    properties, choices = values.get("properties"), values.get("enum")
    count = len(properties) if isinstance(properties, Mapping) else 0
    _limit("properties of an object", count, MOST_PROPERTIES)
    _limit("values of an enum", len(choices) if isinstance(choices, list | tuple) else 0, MOST_CHOICES)
    for name in _COUNTS & values.keys():
        if (number := _number(values[name])) is not None:
            _limit(f"{name} times the properties", number * max(count, 1), MOST_COUNTED)
