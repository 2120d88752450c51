"""Constraints on answers that are small as texts, and large as grammars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lazyrag.backend.engine import Sampling
from lazyrag.backend.guided import MOST_IN_PATTERNS, MOST_NESTED, MOST_REPEATED, check_size
from lazyrag.errors import RequestError

MUCH = 10**9
FORMS: dict[str, dict[str, Any]] = {
    **{
        name: {name: MUCH}
        for name in ("minItems", "maxItems", "minLength", "maxLength", "minContains", "minProperties", "maxProperties")
    },
    "minItems as a float": {"minItems": 1e9},
    "minItems without end": {"minItems": float("inf")},
    "maxLength that is no number": {"maxLength": float("nan")},
    "pattern": {"pattern": "^a{1,1000000}$"},
    "pattern with a number beyond all": {"pattern": "a{" + "9" * 5000 + "}"},
    "patternProperties": {"patternProperties": {"^a{1000000}$": {}}},
    "enum": {"enum": list(range(10_001))},
    "properties": {"properties": {f"p{i}": {} for i in range(501)}},
    "counted properties": {"properties": {f"p{i}": {} for i in range(300)}, "maxProperties": 250},
    "text": {"const": "x" * (1 << 18)},
    "many": {"prefixItems": [{"minItems": MOST_REPEATED}] * 11},
    "many patterns": {"anyOf": [{"pattern": f"a{{{MOST_IN_PATTERNS // 2}}}"}] * 3},
    "repeat": {"type": "repeat", "min": 0, "max": MUCH},
    "any_text": {"type": "any_text", "max_chars": MUCH},
    "regex": {"type": "regex", "pattern": "a{1000000}"},
    "grammar": {"type": "grammar", "grammar": 'root ::= "a"{1000000}'},
}


def places(form: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A form wherever one may stand."""
    return [
        dict(form),
        {"$defs": {"a": form}, "$ref": "#/$defs/a"},
        {"prefixItems": [True, form]},
        {"properties": {"minItems": {"anyOf": [form]}}},
        {"type": "structural_tag", "format": {"type": "tag", "content": {"type": "json_schema", "json_schema": form}}},
    ]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_makes_a_large_grammar_is_refused_wherever_it_stands(form: dict[str, Any]) -> None:
    for whole in places(form):
        with pytest.raises(RequestError, match=r"too large.* at most"):
            check_size(whole)


def test_nesting_without_end_is_refused() -> None:
    form: dict[str, Any] = {}
    form["items"] = form
    with pytest.raises(RequestError, match=f"nesting: {MOST_NESTED} at most"):
        check_size(form)


def test_ordinary_schemas_are_not_refused() -> None:
    fields = {f"p{i}": {"type": "string", "maxLength": 200, "pattern": "^[a-z]{1,20}$"} for i in range(40)}
    check_size({"type": "object", "properties": fields, "minProperties": 1})
    check_size({"properties": {name: {"type": "integer"} for name in ("minItems", "pattern", "max", "enum")}})
    check_size({"type": "array", "items": {"enum": list(range(1000))}, "minItems": 0, "maxItems": MOST_REPEATED})


@pytest.mark.parametrize("name", ["json_schema", "structural_tag"])
def test_an_engine_looks_at_both_ways_in(name: str) -> None:
    local = pytest.importorskip("lazyrag.backend.local")
    pytest.importorskip("vllm")
    with pytest.raises(RequestError, match=r"minItems: \d+ at most"):
        local.constraint(Sampling(**{name: {"type": "array", "minItems": MUCH}}))


def test_a_tag_that_cannot_be_is_refused_as_the_callers_fault() -> None:
    pytest.importorskip("vllm")
    from lazyrag.backend.local import constraint

    structures = [{"begin": "", "schema": {}, "end": ""}]
    for tag in ({}, {"type": "structural_tag", "structures": structures, "triggers": [""]}):
        with pytest.raises(RequestError, match="structural tag is not valid"):
            constraint(Sampling(structural_tag=tag))
    assert constraint(Sampling(structural_tag={"type": "structural_tag", "format": {"type": "any_text"}})) is not None
