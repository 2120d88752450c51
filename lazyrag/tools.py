"""Tools: how a model is shown them, how its calls are made valid, and how they are read out of its reply.

A model whose chat template has a place for tools is shown them there, and its calls look as the template writes them.
Any other model is told in words, in its system message (`INSTRUCTION`): each of its replies begins with a line of JSON,
which is a call or says that words follow; calls and results of earlier turns are put into words, too. Such a model was
not trained to use tools, so it is not left to itself: guided decoding admits no other beginning, and what follows a
result are words, or a small model would call for ever.

Guided decoding makes calls valid: the names are those of the tools, the arguments fit their schemas.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

from lazyrag.backend.engine import Sampling
from lazyrag.chat import Message, render
from lazyrag.errors import InputError
from lazyrag.tokens import Tokenizer

Tool: TypeAlias = Mapping[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`, as OpenAI writes it."""

Format: TypeAlias = dict[str, Any]
"""A format of a structural tag, as vLLM's guided decoding takes it."""

CHOICES = ("auto", "none", "required", "any")
"""What a `tool_choice` says without naming a tool; "any" is the frameworks' word for "required"."""

INSTRUCTION = """\
You can use these tools, one a line:
{tools}

To use a tool, reply with JSON: {{"name": the tool's name, "arguments": {{...}}}}. The user then tells you the result. \
If you have the result already, or need no tool, reply {words} and go on in words on the next line."""
"""What a model is told whose chat template has no place for tools."""

_NAME = "lazyrag_probe"
_CALL = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(arguments|parameters)"\s*:\s*(?=\{)')
_OPEN_TAG = re.compile(r"<(\w+)>\s*\Z")
_MISTRAL = "[TOOL_CALLS]"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for.

    Attributes:
        arguments: a JSON object; or the text that the model wrote, if that is none (the reply was cut off).
        id: nine letters and digits, the one form that every chat template takes.
    """

    name: str
    arguments: Mapping[str, Any] | str
    id: str = field(default_factory=lambda: secrets.token_hex(5)[:9])


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call in a stream; `id` and `name` come with the first piece, `arguments` is more of their JSON."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Style:
    """How a model writes a call: `begin`, `{"name": ..., <arguments>: {...}}`, `end`.

    Attributes:
        is_native: whether its chat template shows it the tools.
    """

    begin: str = ""
    end: str = ""
    arguments: str = "arguments"
    is_native: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """A conversation with the tools that the model may call, ready to be sent.

    Attributes:
        messages: what to send.
        shown: the tools for the chat template; None if it is given none.
        sampling: the settings, with the constraint that makes calls valid.
        names: of the tools that may be called.
        style: how the model writes calls.
        words: the line that a reply in words begins with; empty if it has none.
    """

    messages: list[Message]
    shown: list[Tool] | None
    sampling: Sampling
    names: frozenset[str] = frozenset()
    style: Style = Style()
    words: str = ""

    def reader(self) -> Reader:
        """What takes one reply apart as it comes."""
        return Reader(self.names, self.style, self.words)

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """The words and the calls of a whole reply."""
        reader = self.reader()
        for _ in reader.feed(text, last=True):
            pass
        return reader.content, reader.calls


def offer(tokenizer: Tokenizer, messages: Sequence[Message], tools: Any, choice: Any, sampling: Sampling) -> Offer:
    """Offer tools to a model.

    Args:
        tokenizer: the model's, which knows its chat template.
        messages: the conversation.
        tools: see `Tool`; None or empty: there are none.
        choice: see `choice_of`.
        sampling: the request's settings. With a `json_schema`, a reply that is no call fits that.

    Raises:
        InputError: these are no tools, or `choice` names none of them.
    """
    tools, choice = checked(tools), choice_of(choice)
    style = style_of(tokenizer)
    if choice == "none":
        tools = []
    called = [tool for tool in tools if choice in ("auto", "required", tool["function"]["name"])]
    if choice not in ("auto", "none") and not called:
        raise InputError(
            "tool_choice names a tool that is not among the tools given.",
            fix=f"Name one of them: {', '.join(tool['function']['name'] for tool in tools) or 'there are none'}.",
        )
    if not called:
        return Offer(list(messages) if style.is_native else _told(messages), None, sampling)
    words = ""
    if choice == "auto" and not style.is_native:
        words = _words(called)
    format = _format(called, style, choice, words, messages, sampling.json_schema)
    if format is not None:
        sampling = replace(sampling, json_schema=None, structural_tag={"type": "structural_tag", "format": format})
    names = frozenset(tool["function"]["name"] for tool in called)
    if style.is_native:
        return Offer(list(messages), list(tools), sampling, names, style)
    told = _instructed(tokenizer, _told(messages), _instruction(tools))
    return Offer(told, None, sampling, names, style, words)


# ---------------------------------------------------------------- what is asked for


def checked(tools: Any) -> list[Tool]:
    """The tools as a list.

    Raises:
        InputError: they are something else, or one has a name that `tool_choice` uses otherwise.
    """
    found = list(tools) if isinstance(tools, Iterable) else [] if tools is None else [tools]
    for tool in found:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(
                "tools is not a list of tools.",
                fix='A tool is {"type": "function", "function": {"name": ..., "parameters": {...}}}.',
            )
        if function["name"] in CHOICES:
            raise InputError(
                f"A tool cannot be called {function['name']!r}:",
                why="as a tool_choice, that word does not name a tool.",
                fix="Give it another name.",
            )
    return found


def choice_of(choice: Any) -> str:
    """The frameworks' `tool_choice` as "auto", "none", "required" (any of them), or the name of one.

    Raises:
        InputError: it is a mapping that names no function, or one that cannot be.
    """
    if not choice:
        return "auto"
    if isinstance(choice, Mapping):
        try:
            name = str(choice["function"]["name"])
        except (KeyError, TypeError):
            raise InputError("tool_choice names no tool.", fix="Pass its name.") from None
        if name in CHOICES:  # which no tool is called
            raise InputError(f"tool_choice names a tool {name!r}, and there is none.", fix=f"Pass {name!r} as a text.")
        return name
    return "required" if choice in (True, "any") else str(choice)


@lru_cache(maxsize=8)
def style_of(tokenizer: Tokenizer) -> Style:
    """How the model writes calls: as its chat template writes one."""
    if "tools" not in (tokenizer.chat_template or ""):
        return Style()
    function = {"name": _NAME, "arguments": {"at": 1}}
    tool = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}
    call = {"id": "probe0000", "type": "function", "function": function}
    messages = [Message("user", "?"), Message("assistant", "", tool_calls=[call])]
    try:
        text = render(tokenizer, messages, tools=[tool], add_generation_prompt=False).text
    except InputError:  # it shows tools, and wants calls in a form of its own
        return Style(is_native=True)
    for found in _CALL.finditer(text):
        if json.loads(found[1]) != _NAME:
            continue
        _, end = json.JSONDecoder().raw_decode(text, found.start())
        tag = _OPEN_TAG.search(text, 0, found.start())
        if tag and (close := re.match(rf"\s*</{tag[1]}>", text[end:])):
            return Style(tag[0], close[0], found[2], is_native=True)
        return Style(arguments=found[2], is_native=True)
    return Style(is_native=True)


# ---------------------------------------------------------------- what guided decoding admits


def _format(
    tools: Sequence[Tool],
    style: Style,
    choice: str,
    words: str,
    messages: Sequence[Message],
    schema: Mapping[str, Any] | None,
) -> Format | None:
    """What replies may look like; None: anything."""
    calls = [_call_format(tool["function"], style) for tool in tools]
    if choice != "auto":
        return _either(calls)
    said: Format = {"type": "any_text"} if schema is None else {"type": "json_schema", "json_schema": dict(schema)}
    if words:
        said = {"type": "sequence", "elements": [{"type": "const_string", "value": words}, said]}
        return said if messages[-1].role == "tool" else _either([*calls, said])
    if schema is not None:
        return _either([*calls, said])
    if style.begin:
        return {"type": "triggered_tags", "triggers": [style.begin.rstrip()], "tags": calls}
    return None


def _call_format(function: Mapping[str, Any], style: Style) -> Format:
    head = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{style.arguments}": '
    arguments = function.get("parameters") or {"type": "object", "properties": {}}
    return {
        "type": "tag",
        "begin": style.begin + head,
        "content": {"type": "json_schema", "json_schema": dict(arguments)},
        "end": "}" + style.end,
    }


def _either(formats: Sequence[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


# ---------------------------------------------------------------- in words


def _words(tools: Sequence[Tool]) -> str:
    """The line that begins a reply in words, which no tool's name is in."""
    name = "answer"
    while any(tool["function"]["name"] == name for tool in tools):
        name += "_"
    return f'{{"name": "{name}"}}\n'


def _instruction(tools: Sequence[Tool]) -> str:
    lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return INSTRUCTION.format(tools="\n".join(lines), words=_words(tools).strip())


def _instructed(tokenizer: Tokenizer, messages: list[Message], instruction: str) -> list[Message]:
    """The conversation with an instruction at the end of its system message; of its first one, if it can have none."""
    if not messages:
        return []
    if messages[0].role == "system":
        return [_with(messages[0], f"{messages[0].content}\n\n{instruction}"), *messages[1:]]
    try:
        render(tokenizer, [Message("system", "?"), Message("user", "?")])
    except InputError:
        return [_with(messages[0], f"{instruction}\n\n{messages[0].content}"), *messages[1:]]
    return [Message("system", instruction), *messages]


def _told(messages: Sequence[Message]) -> list[Message]:
    """The conversation with calls and results in words, for templates that would drop or refuse them."""
    told: list[Message] = []
    names: dict[str | None, str] = {}
    after_result = False
    for message in messages:
        if message.role == "tool":
            name = message.name or names.get(message.tool_call_id, "the tool")
            text = f"Result of {name}:\n{message.content}"
            if after_result:
                told[-1] = _with(told[-1], f"{told[-1].content}\n\n{text}")
            else:
                told.append(Message("user", text))
        elif message.tool_calls:
            functions = [call["function"] for call in message.tool_calls]
            names |= {call.get("id"): call["function"]["name"] for call in message.tool_calls}
            lines = [
                json.dumps({"name": f["name"], "arguments": f["arguments"]}, ensure_ascii=False) for f in functions
            ]
            content = "\n".join([message.content, *lines] if message.content else lines)
            told.append(Message(message.role, content, name=message.name))
        else:
            told.append(message)
        after_result = message.role == "tool"
    return told


def _with(message: Message, content: str) -> Message:
    return replace(message, content=content)


# ---------------------------------------------------------------- what came back


class Reader:
    """Takes one reply apart as it comes: words, and the calls in it.

    A call is JSON with a tool's `name` and its `arguments` (or `parameters`), in the style's tags, or at the beginning
    of the reply. What looks like a call but names no tool, or has no object of arguments, is words.

    Args:
        names: of the tools that were offered; without any, a reply is all words.
        style: how the model writes calls.
        words: see `Offer`.

    Attributes:
        content: the words so far.
    """

    def __init__(self, names: frozenset[str], style: Style, words: str = "") -> None:
        self._names = names
        self._tag, self._close = style.begin.strip(), style.end.strip()
        self._words = words.strip()
        self._step = self._at_start if names else self._in_words
        self._buffer = ""
        self._calls: list[tuple[str, str, list[str]]] = []
        self._depth = 0
        self._is_quoted = self._is_escaped = False
        self.content = ""

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far; of one that is not complete, the arguments are a text."""
        return [ToolCall(name, _object("".join(arguments)), id) for name, id, arguments in self._calls]

    def feed(self, text: str, *, last: bool = False) -> Iterator[str | CallDelta]:
        """Take in more of the reply; yields what is now known of it: words, and pieces of calls.

        Args:
            text: what came.
            last: whether the reply ends with it.
        """
        self._buffer += text
        while self._buffer:
            before = self._buffer, self._step
            for part in self._step(last):
                if isinstance(part, str):
                    self.content += part
                if part:
                    yield part
            if (self._buffer, self._step) == before:
                return

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken

    def _at_start(self, last: bool) -> Iterator[str | CallDelta]:
        """Where a call may stand without a tag."""
        text = self._buffer.lstrip()
        if self._words and text.startswith(self._words):
            self._buffer = text[len(self._words) :].lstrip()
            self._step = self._behind_line
            return
        bare = re.sub(rf"\A(?:{re.escape(_MISTRAL)})?\s*\[?\s*", "", text)
        if found := self._known_call(bare):
            yield from self._begin(found, bare)
        elif last or not (bare.startswith("{") or not bare or _MISTRAL.startswith(text)):
            self._step = self._in_words

    def _behind_line(self, last: bool) -> Iterator[str | CallDelta]:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._step = self._in_words
        return iter(())

    def _in_words(self, last: bool) -> Iterator[str | CallDelta]:
        if not self._tag:
            yield self._take(len(self._buffer))
        elif (at := self._buffer.find(self._tag)) >= 0:
            yield self._take(len(self._buffer[:at].rstrip()))
            self._step = self._in_tag
        else:
            yield self._take(len(self._buffer) - (0 if last else self._held_back()))

    def _held_back(self) -> int:
        """How much of the buffer's end may belong to a call: the tag's beginning, and the space in front of it."""
        held = next(n for n in range(len(self._tag), -1, -1) if self._buffer.endswith(self._tag[:n]))
        rest = self._buffer[: len(self._buffer) - held]
        return held + len(rest) - len(rest.rstrip())

    def _in_tag(self, last: bool) -> Iterator[str | CallDelta]:
        start = self._buffer.index(self._tag) + len(self._tag)
        inside = self._buffer[start:].lstrip()
        if found := self._known_call(inside):
            yield from self._begin(found, inside)
        elif last or self._close in inside:
            yield self._take(start)
            self._step = self._in_words

    def _known_call(self, text: str) -> re.Match[str] | None:
        found = _CALL.match(text)
        return found if found and _parsed(found[1]) in self._names else None

    def _begin(self, found: re.Match[str], text: str) -> Iterator[str | CallDelta]:
        call = ToolCall(str(_parsed(found[1])), "")
        self._buffer = text[found.end() :]
        self._calls.append((call.name, call.id, []))
        self._step = self._in_arguments
        yield CallDelta(len(self._calls) - 1, call.id, call.name)

    def _in_arguments(self, last: bool) -> Iterator[str | CallDelta]:
        taken = self._take(self._end_of_object())
        self._calls[-1][2].append(taken)
        yield CallDelta(len(self._calls) - 1, arguments=taken)
        if not self._depth:
            self._step = self._behind_call

    def _end_of_object(self) -> int:
        """Where in the buffer the arguments end; its length if they do not."""
        for at, character in enumerate(self._buffer):
            if self._is_quoted:
                self._is_quoted = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._is_quoted = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if not self._depth:
                    return at + 1
        return len(self._buffer)

    def _behind_call(self, last: bool) -> Iterator[str | CallDelta]:
        rest = self._buffer.lstrip()
        if rest.startswith("}"):
            rest = rest[1:].lstrip()
        if self._tag and rest.startswith(self._close):
            self._buffer, self._step = rest[len(self._close) :], self._behind_line
        elif rest[:1] in (",", "]", ";", "{"):
            self._buffer, self._step = rest.lstrip(",];").lstrip(), self._at_start
        elif rest and not (self._tag and self._close.startswith(rest)):
            self._buffer, self._step = rest, self._in_words
        elif last:
            self._buffer = ""
        return iter(())


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the second: brackets without end
        return None


def _object(text: str) -> Mapping[str, Any] | str:
    value = _parsed(text)
    return value if isinstance(value, dict) else text
