"""Tools are offered in the model's own form, or in words; replies are taken apart the same, however they come."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyrag.backend.engine import Sampling
from lazyrag.chat import Message, render
from lazyrag.errors import InputError
from lazyrag.tokens import Tokenizer
from lazyrag.tools import CallDelta, Offer, Reader, Style, offer, style_of

TAGGED = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

BARE = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if tools and loop.first %}{{ tools | tojson }}
{% endif %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}\
{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}\
{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}"""

LISTED = """\
{% for m in messages %}<|im_start|>{% if tools %}{{ tools | tojson }}{% endif %}{% if m.tool_calls %}[TOOL_CALLS] [\
{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, \
"id": "{{ c.id[:9] }}"}{% endfor %}]{% else %}{{ m.content }}{% endif %}{% endfor %}"""

OWN_FORM = """\
{% for m in messages %}<|im_start|>{{ tools | length if tools else 0 }}{{ m.content }}{% for c in m.tool_calls or [] %}\
<function={{ c.function.name }}>{{ c.function.arguments.at }}</function>{% endfor %}{% endfor %}"""

NO_TOOLS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('role ' + m.role) }}"
    "{% endif %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)


def tool(name: str, **arguments: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in arguments.items()}}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}


TOOLS = [tool("weather", city="string"), tool("clock", zone="integer")]
QUESTION = [Message("user", "How is it?")]
CALL = {"id": "7", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
HISTORY = [
    Message("system", "Be brief."),
    Message("user", "How is it?"),
    Message("assistant", "I look.", tool_calls=[CALL]),
    Message("tool", "rain", tool_call_id="7"),
    Message("tool", "noon", name="clock"),
]


@pytest.fixture
def made(model_folder: Callable[..., Path]) -> Callable[[str], Tokenizer]:
    return lambda template: Tokenizer.from_folder(model_folder("byte-level", chat_template=template))


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (TAGGED, Style("<tool_call>\n", "\n</tool_call>", is_native=True)),
        (BARE, Style(arguments="parameters", is_native=True)),
        (LISTED, Style(is_native=True)),
        (OWN_FORM, Style(is_native=True)),
        (NO_TOOLS, Style()),
    ],
    ids=["tagged", "bare", "listed", "own-form", "none"],
)
def test_the_style_of_calls_is_read_off_the_template(
    made: Callable[[str], Tokenizer], template: str, style: Style
) -> None:
    assert style_of(made(template)) == style


def given(made: Callable[[str], Tokenizer], template: str, choice: Any, messages: Any = None, **sampling: Any) -> Offer:
    return offer(made(template), messages or QUESTION, TOOLS, choice, Sampling(**sampling))


def format_of(sent: Offer) -> Any:
    assert sent.sampling.json_schema is None
    return None if sent.sampling.structural_tag is None else sent.sampling.structural_tag["format"]


def test_a_template_with_a_place_for_tools_is_given_them_and_the_messages_stay(
    made: Callable[[str], Tokenizer],
) -> None:
    sent = given(made, TAGGED, None, HISTORY)
    assert (sent.shown, sent.messages) == (TOOLS, HISTORY)
    format = format_of(sent)
    assert (format["type"], format["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert [tag["begin"] for tag in format["tags"]] == [
        '<tool_call>\n{"name": "weather", "arguments": ',
        '<tool_call>\n{"name": "clock", "arguments": ',
    ]
    assert {tag["end"] for tag in format["tags"]} == {"}\n</tool_call>"}


def test_a_call_that_must_be_is_all_that_is_admitted(made: Callable[[str], Tokenizer]) -> None:
    for template in (TAGGED, BARE, LISTED, OWN_FORM, NO_TOOLS):
        any_of = format_of(given(made, template, "any"))
        assert [tag["type"] for tag in any_of["elements"]] == ["tag", "tag"]
        one = format_of(given(made, template, "clock"))
        assert '"clock"' in one["begin"]
        assert one["content"] == {"type": "json_schema", "json_schema": TOOLS[1]["function"]["parameters"]}
    assert '"parameters": ' in format_of(given(made, BARE, "clock"))["begin"]


def test_a_model_without_tools_is_told_of_them_in_its_system_message(made: Callable[[str], Tokenizer]) -> None:
    sent = given(made, NO_TOOLS, "auto")
    assert sent.shown is None
    system, user = sent.messages
    assert (system.role, user) == ("system", QUESTION[0])
    for one in TOOLS:
        assert json.dumps(one["function"]) in system.content
    *calls, words = format_of(sent)["elements"]
    assert len(calls) == 2
    assert words["elements"][0] == {"type": "const_string", "value": '{"name": "answer"}\n'}
    assert render(made(NO_TOOLS), sent.messages).fallback == ""


def test_earlier_calls_and_results_are_told_in_words_and_words_must_follow(made: Callable[[str], Tokenizer]) -> None:
    sent = given(made, NO_TOOLS, "auto", HISTORY)
    system, _, assistant, results = sent.messages
    assert system.content.startswith("Be brief.\n\n")
    assert assistant == Message("assistant", 'I look.\n{"name": "weather", "arguments": {"city": "Bern"}}')
    assert results == Message("user", "Result of weather:\nrain\n\nResult of clock:\nnoon")
    assert format_of(sent)["elements"][-1] == {"type": "any_text"}
    without = offer(made(NO_TOOLS), HISTORY, None, None, Sampling())
    assert [message.role for message in without.messages] == ["system", "user", "assistant", "user"]
    assert without.sampling == Sampling()


def test_a_template_without_a_system_role_gets_the_instruction_in_the_first_message(
    made: Callable[[str], Tokenizer],
) -> None:
    (message,) = given(made, NO_SYSTEM, "auto").messages
    assert message.role == "user"
    assert message.content.endswith("\n\nHow is it?")
    given(made, NO_SYSTEM, "auto", HISTORY[1:])


def test_the_line_for_words_is_no_tools_name(made: Callable[[str], Tokenizer]) -> None:
    sent = offer(made(NO_TOOLS), QUESTION, [tool("answer"), tool("answer_")], None, Sampling())
    assert sent.words == '{"name": "answer__"}\n'


@pytest.mark.parametrize("template", [TAGGED, BARE, NO_TOOLS], ids=["tagged", "bare", "none"])
def test_with_a_schema_a_reply_is_a_call_or_fits_it(made: Callable[[str], Tokenizer], template: str) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    last = format_of(given(made, template, "auto", json_schema=schema))["elements"][-1]
    if template == NO_TOOLS:
        last = last["elements"][-1]
    assert last == {"type": "json_schema", "json_schema": schema}


@pytest.mark.parametrize("name", ["auto", "none", "required", "any"])
def test_a_tool_whose_name_says_something_else_as_a_choice_is_refused(
    made: Callable[[str], Tokenizer], name: str
) -> None:
    """Whether it is chosen by that name, or offered at all, could not be told."""
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    messages = [Message("user", "?")]
    for choice in (None, name, {"type": "function", "function": {"name": name}}):
        with pytest.raises(InputError, match=f"A tool cannot be called '{name}'"):
            offer(made(TAGGED), messages, [other, tool], choice, Sampling())
    with pytest.raises(InputError, match=f"names a tool '{name}', and there is none"):
        offer(made(TAGGED), messages, [other], {"type": "function", "function": {"name": name}}, Sampling())


def test_no_tools_change_nothing(made: Callable[[str], Tokenizer]) -> None:
    for tools, choice in ((None, None), ([], "auto"), (TOOLS, "none")):
        sent = offer(made(TAGGED), QUESTION, tools, choice, Sampling(max_tokens=3))
        assert (sent.messages, sent.shown, sent.sampling) == (QUESTION, None, Sampling(max_tokens=3))
        assert sent.read('{"name": "weather", "arguments": {}}') == ('{"name": "weather", "arguments": {}}', [])


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        ([{"name": "f"}], None, "not a list of tools"),
        (5, None, "not a list of tools"),
        (TOOLS, "hammer", "weather, clock"),
        (None, "hammer", "there are none"),
        (None, "any", "there are none"),
        (TOOLS, {"type": "function"}, "names no tool"),
    ],
)
def test_what_is_no_tool_or_names_none_is_refused(
    made: Callable[[str], Tokenizer], tools: Any, choice: Any, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        offer(made(TAGGED), QUESTION, tools, choice, Sampling())


# ---------------------------------------------------------------- replies

WEATHER = '{"name": "weather", "arguments": {"city": "}\\" {"}}'
CLOCK = '{"name": "clock", "parameters": {"zone": [1, {"a": 2}]}}'
W, C = ("weather", {"city": '}" {'}), ("clock", {"zone": [1, {"a": 2}]})
REPLIES: dict[str, tuple[str, str, list[Any]]] = {
    "words": ("It rains. <tool_ca", "It rains. <tool_ca", []),
    "one": (f"<tool_call>\n{WEATHER}\n</tool_call>", "", [W]),
    "two": (f"<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{CLOCK}</tool_call>\n", "", [W, C]),
    "words around": (f"I look.\n\n<tool_call>{CLOCK}</tool_call>\nSo.", "I look.So.", [C]),
    "no end tag": (f"<tool_call>{WEATHER}", "", [W]),
    "bare": (WEATHER, "", [W]),
    "bare list": (f" [{WEATHER}, {CLOCK}]", "", [W, C]),
    "bare lines": (f"{WEATHER}\n{CLOCK}", "", [W, C]),
    "mistral": (f"[TOOL_CALLS] [{CLOCK}]", "", [C]),
    "other json": ('{"city": "A"}', '{"city": "A"}', []),
    "other tool": ('{"name": "hammer", "arguments": {}}', '{"name": "hammer", "arguments": {}}', []),
    "a list": ("[1] says so", "[1] says so", []),
    "no json": ("So:\n<tool_call>{not json}</tool_call>.", "So:\n<tool_call>{not json}</tool_call>.", []),
    "cut off": ('<tool_call>{"name": "weather", "arguments": {"city": "Be', "", [("weather", '{"city": "Be')]),
    "cut early": ('<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    "spaces": ("  ", "  ", []),
    "empty": ("", "", []),
}  # fmt: skip


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_is_words_and_calls_in_whatever_pieces_it_comes(reply: str, step: int) -> None:
    text, content, calls = REPLIES[reply]
    reader = Reader(frozenset({"weather", "clock"}), Style("<tool_call>\n", "\n</tool_call>", is_native=True))
    parts: list[Any] = []
    for start in range(0, len(text), step):
        parts += reader.feed(text[start : start + step])
    parts += reader.feed("", last=True)
    assert reader.content == "".join(part for part in parts if isinstance(part, str)) == content
    assert [(call.name, call.arguments) for call in reader.calls] == calls
    pieces = [part for part in parts if isinstance(part, CallDelta)]
    for index, call in enumerate(reader.calls):
        first, *rest = (piece for piece in pieces if piece.index == index)
        assert (first.name, first.id) == (call.name, call.id)
        assert all(piece.name is piece.id is None for piece in rest)
        joined = first.arguments + "".join(piece.arguments for piece in rest)
        assert joined == call.arguments if isinstance(call.arguments, str) else json.loads(joined) == call.arguments


@pytest.mark.parametrize("step", [1, 1000])
def test_the_line_that_announces_words_is_not_said(step: int) -> None:
    reader = Reader(frozenset({"weather"}), Style(), '{"name": "answer"}\n')
    text = '{"name": "answer"}\nIt rains: {"name": "weather", "arguments": {}}\n'
    parts: list[Any] = []
    for start in range(0, len(text), step):
        parts += reader.feed(text[start : start + step])
    parts += reader.feed("", last=True)
    assert "".join(parts) == reader.content == 'It rains: {"name": "weather", "arguments": {}}\n'
    assert len(parts) > 3 or step > 1
    assert reader.calls == []


# ---------------------------------------------------------------- what guided decoding makes of it


@pytest.fixture(scope="module")
def admits() -> Callable[[Offer, str], bool]:
    """Whether vLLM's guided decoding lets a model give this whole reply."""
    xgrammar = pytest.importorskip("xgrammar")
    vocabulary = [*(chr(n) for n in range(128)), "<end>"]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[128]))

    def ask(sent: Offer, reply: str) -> bool:
        tag = sent.sampling.structural_tag
        grammar = xgrammar.Grammar.from_structural_tag(json.dumps(tag))
        matcher = xgrammar.GrammarMatcher(compiler.compile_grammar(grammar))
        return bool(matcher.accept_string(reply) and matcher.accept_token(128))

    return ask


W_CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'
LONE = '{"name": "weather", "parameters": {"city": "Bern"}}'


@pytest.mark.parametrize(
    ("template", "choice", "admitted", "refused"),
    [
        (TAGGED, "auto", ["It rains.", f"<tool_call>\n{W_CALL}\n</tool_call>"],
         ['<tool_call>\n{"name": "hammer"', f"<tool_call>{W_CALL}</tool_call>",
          '<tool_call>\n{"name": "weather", "arguments": {"city": 5}}\n</tool_call>']),
        (TAGGED, "any", [f"<tool_call>\n{W_CALL}\n</tool_call>"], ["It rains.", W_CALL]),
        (BARE, "any", [LONE], ["It rains.", W_CALL, '{"name": "clock", "parameters": {"zone": "x"}}']),
        (LISTED, "weather", [W_CALL], ["It rains.", '{"name": "clock", "arguments": {"zone": 1}}']),
        (NO_TOOLS, "auto", [W_CALL, '{"name": "answer"}\nIt rains: {"a"}.'],
         ["It rains.", '{"name": "hammer", "arguments": {}}', f"{W_CALL} and more"]),
        (NO_TOOLS, "any", [W_CALL], ['{"name": "answer"}\nIt rains.']),
    ],
    ids=["tagged-auto", "tagged-any", "bare-any", "listed-one", "words-auto", "words-any"],
)  # fmt: skip
def test_guided_decoding_admits_valid_calls_and_they_are_read(
    made: Callable[[str], Tokenizer],
    admits: Callable[[Offer, str], bool],
    template: str,
    choice: str,
    admitted: list[str],
    refused: list[str],
) -> None:
    sent = given(made, template, choice)
    for reply in admitted:
        assert admits(sent, reply), reply
        content, calls = sent.read(reply)
        if "Bern" in reply:
            assert (content, [(call.name, call.arguments) for call in calls]) == ("", [("weather", {"city": "Bern"})])
        else:
            assert (content, calls) == (reply.removeprefix('{"name": "answer"}\n'), [])
    for reply in refused:
        assert not admits(sent, reply), reply


def test_references_in_a_tools_schema_still_lead_somewhere(
    made: Callable[[str], Tokenizer], admits: Callable[[Offer, str], bool]
) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "required": ["a"],
        "$defs": {"A": {"type": "integer"}},
    }
    one = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    sent = offer(made(NO_TOOLS), QUESTION, [one, tool("g")], "any", Sampling())
    assert admits(sent, '{"name": "f", "arguments": {"a": 5}}')
    assert not admits(sent, '{"name": "f", "arguments": {"a": "five"}}')
