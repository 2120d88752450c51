"""Chat messages -> text pieces, such that no message can write a control token.

A chat template mixes its own markers (`<|im_start|>user`) with what people and documents wrote. Once mixed, a content
that says `<|im_end|>` cannot be told from the template. So the template is rendered twice: as it is, and with an
unguessable marker in place of each content. The second rendering says where the contents stand in the first one; the
split is used only if template parts and contents, put together again, are exactly the first rendering. Templates may
look into contents, strip them or write them as JSON; what they do to them beyond that ends in the fallback: the
rendering stays whole, and control tokens in the contents are broken by a zero-width space (all that could begin one, if
the template deletes text and puts one together by that).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from lazyrag.errors import ConfigError, InputError
from lazyrag.tokens import Tokenizer

TEMPLATE, CONTENT, MIXED = "template", "content", "mixed"
"""Kinds of text. TEMPLATE: control tokens are meant, chunks are not looked for. CONTENT: no control tokens, chunks are
looked for. MIXED: control tokens are meant, chunks are looked for and are inert (a prompt given as a string)."""

_BREAK = "\u200b"
_THINKING = re.compile(r"(</?think>)")


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A run of a prompt's text; `kind` is one of `TEMPLATE`, `CONTENT`, `MIXED`.

    Raises:
        InputError: another kind, or a text that is none.
    """

    text: str
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in (TEMPLATE, CONTENT, MIXED) or not isinstance(self.text, str):
            raise InputError(
                "This is no piece of a prompt's text:",
                why=f"its kind is {self.kind!r:.40}, its text a {type(self.text).__name__}.",
                fix=f"The kinds are {TEMPLATE!r}, {CONTENT!r} and {MIXED!r}.",
            )


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat.

    Attributes:
        role: "system", "user", "assistant", "tool", or what else the model's template knows.
        tool_calls: calls that the assistant made, as templates want them:
            {"type": "function", "id": ..., "function": {"name": ..., "arguments": {...}}}.
        tool_call_id: for role "tool", the call that this is the result of.
    """

    role: str
    content: str
    tool_calls: Sequence[Mapping[str, Any]] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The message as chat templates see it; what is not set is not there."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            out["tool_calls"] = list(self.tool_calls)
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            out["name"] = self.name
        return out


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered chat.

    Attributes:
        pieces: they concatenate to the prompt.
        fallback: empty, or why the contents could not be told from the template; then there is one MIXED piece, and if
            a content held a control token, that text differs from it by a zero-width space.
    """

    pieces: tuple[TextPiece, ...]
    fallback: str = ""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(slots=True)
class _Markers:
    """Puts a marker in place of each content and remembers the content."""

    control: re.Pattern[str]
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    contents: list[str] = field(default_factory=list)

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        marked = self.controls({name: value for name, value in message.items() if name != "content"})
        content = message["content"]
        if message["role"] != "assistant":
            return {**marked, "content": self.mark(content)}
        # The model wrote its own turns: there the tags around its thinking are meant, and templates look for them.
        parts = _THINKING.split(content)
        return {**marked, "content": "".join(part if _THINKING.fullmatch(part) else self.mark(part) for part in parts)}

    def controls(self, value: Any) -> Any:
        """The value with a marker for every string that holds a control token, whoever wrote it."""
        return _map_strings(value, lambda text: self.mark(text) if self.control.search(text) else text)

    def mark(self, text: str) -> str:
        if not text.strip():  # templates ask whether a content is empty
            return text
        self.contents.append(text)
        return f"lz{self.secret}x{len(self.contents) - 1}x"

    def split(self, rendered: str) -> list[str]:
        """[template text, number of a content, template text, ..., template text]."""
        return re.split(f"lz{self.secret}x(\\d+)x", rendered)


class ChatTemplate:
    """A model's chat template. Immutable, thread-safe."""

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str] | None = None, control_tokens: Sequence[str] = ()
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError("The model's chat template cannot be read.", why=str(error)) from error
        self._special_tokens = dict(special_tokens or {})
        longest_first = sorted(filter(None, control_tokens), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        beginnings = "".join(re.escape(first) for first in sorted({token[0] for token in longest_first if token}))
        self._beginning = re.compile(f"[{beginnings}]" if beginnings else r"(?!)")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Render a chat.

        Args:
            messages: the chat so far.
            tools: JSON schemas of the tools that the model may call.
            add_generation_prompt: end with the opening of an assistant message.
            variables: further variables of this template (`enable_thinking`).

        Raises:
            InputError: the template refuses these messages (for example two user messages in a row).
        """
        # One clock for both renderings.
        fixed = {**(variables or {}), "add_generation_prompt": add_generation_prompt, "now": datetime.now()}
        dicts = [message.to_dict() for message in messages]
        text = self._render(dicts, tools, fixed)
        markers = _Markers(self._control)
        try:
            marked = self._render([markers.message(m) for m in dicts], markers.controls(tools), fixed)
        except InputError:
            return self._fallback(dicts, tools, fixed, "the template refuses placeholders for the contents")
        pieces = _put_together(markers.split(marked), markers.contents, text)
        if pieces is None:
            return self._fallback(dicts, tools, fixed, "the template rewrites the contents")
        return RenderedChat(tuple(pieces))

    def _fallback(self, dicts: Any, tools: Any, fixed: Mapping[str, Any], reason: str) -> RenderedChat:
        def render_with(change: Callable[[str], str]) -> str:
            return self._render(_map_strings(dicts, change), _map_strings(tools, change), fixed)

        text, safe = render_with(self._broken), render_with(self._shattered)
        # What a template deletes may have held a control token's halves apart.
        if self._control.findall(text) != self._control.findall(safe):
            text = safe
        return RenderedChat((TextPiece(text, MIXED),), fallback=reason)

    def _broken(self, text: str) -> str:
        """Control tokens broken."""
        return self._control.sub(lambda found: found[0][0] + _BREAK + found[0][1:], text)

    def _shattered(self, text: str) -> str:
        """Nothing left that a control token could be made of, whatever is deleted from it."""
        return self._beginning.sub(lambda found: found[0] + _BREAK, text)

    def _render(self, messages: Any, tools: Any, fixed: Mapping[str, Any]) -> str:
        now: datetime = fixed["now"]
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    "documents": None,
                    **{name: value for name, value in fixed.items() if name != "now"},
                    "strftime_now": now.strftime,
                    "messages": messages,
                    "tools": tools,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InputError("The model's chat template refuses these messages.", why=f"It says: {error}") from error


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> RenderedChat:
    """Render a chat with the template of a model; arguments as in `ChatTemplate.render`.

    Raises:
        ConfigError: the model has no chat template.
        InputError: the template refuses these messages.
    """
    template = _template_of(tokenizer)
    return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables)


@lru_cache(maxsize=8)
def _template_of(tokenizer: Tokenizer) -> ChatTemplate:
    if tokenizer.chat_template is None:
        raise ConfigError(
            "The model has no chat template:",
            why="neither tokenizer_config.json nor chat_template.jinja holds one.",
            fix="Use an instruction-tuned model, or send the prompt as a string.",
        )
    return ChatTemplate(
        tokenizer.chat_template, special_tokens=tokenizer.special_tokens, control_tokens=tokenizer.control_tokens
    )


def _put_together(parts: Sequence[str], contents: Sequence[str], text: str) -> list[TextPiece] | None:
    """Find the contents in the real rendering.

    Args:
        parts: `_Markers.split` of the rendering with markers.
        contents: what the markers stand for.
        text: the real rendering.

    Returns:
        pieces that concatenate to `text`, or None if template parts and contents do not make `text`.
    """
    if not text.startswith(parts[0]):
        return None
    # steps[n] maps where the text behind content n and its template part may end to where that content starts and ends.
    ends = [len(parts[0])]
    steps: list[dict[int, tuple[int, int]]] = []
    for number, literal in zip(parts[1::2], parts[2::2], strict=True):
        step: dict[int, tuple[int, int]] = {}
        for start in ends:
            for shown in _forms(contents[int(number)]):
                end = start + len(shown)
                if text.startswith(shown, start) and text.startswith(literal, end):
                    step.setdefault(end + len(literal), (start, end))
        steps.append(step)
        ends = list(step)
    if len(text) not in ends:
        return None
    pieces, at = [], len(text)
    for step in reversed(steps):
        start, end = step[at]
        pieces += [TextPiece(text[end:at], TEMPLATE), TextPiece(text[start:end], CONTENT)]
        at = start
    pieces.append(TextPiece(text[:at], TEMPLATE))
    return [piece for piece in reversed(pieces) if piece.text]


def _forms(content: str) -> Iterator[str]:
    """How templates show a content: as it is, stripped, or inside a JSON string."""
    yield content
    yield content.strip()
    yield content.rstrip()
    yield content.lstrip()
    yield content.strip("\n")
    yield content.rstrip("\n")
    yield content.lstrip("\n")
    yield json.dumps(content, ensure_ascii=False)[1:-1]
    yield json.dumps(content)[1:-1]


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A value made of dicts, lists and scalars, with every string in it changed, dict keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _map_strings(part, change) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(part, change) for part in value]
    return value


# ---------------------------------------------------------------- what transformers gives chat templates


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what a model is trained on; in a prompt it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
