"""What requests hold. A field that the server does not know, or of another type, is an error: nothing is guessed."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

INT64 = (1 << 63) - 1

Text: TypeAlias = Annotated[str, Field(max_length=1 << 26)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=1 << 24)]
Mode: TypeAlias = Annotated[
    str | None,
    Field(
        max_length=100,
        description="What is reused of chunks: exact, lazy, sink, prefix; also lazy+first_k=32, sink+recompute=0.1, ..."
        " Left out: as the server's settings say. Not one of OpenAI's.",
    ),
]
One: TypeAlias = Annotated[int, Field(ge=1, le=1)] | None
"""A literal 1 would take `true` and 1.0, too."""
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
Stop: TypeAlias = Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None


class Strict(BaseModel):
    """Refuses unknown fields, and values of other types: "5" is no number, and a truth value neither."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


# ---------------------------------------------------------------- OpenAI's


class Generation(Strict):
    """What completions and chats have in common. Fields that cannot change an answer are taken and not looked at."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 24, description="0: all. Not one of OpenAI's.")] | None = None
    seed: Annotated[int, Field(ge=-INT64, le=INT64)] | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: One = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    ignore_eos: Annotated[bool, Field(description="Go on to max_tokens. Not one of OpenAI's.")] = False
    mode: Mode = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class StreamOptions(Strict):
    """How a stream ends."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class CompletionRequest(Generation):
    """Of /v1/completions."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=2048)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: One = None
    suffix: None = None
    special: Annotated[
        Literal["allow", "plain"],
        Field(description="plain: control tokens in the prompt are text, wherever they stand. Not one of OpenAI's."),
    ] = "allow"


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


class FunctionCall(Strict):
    """What an assistant called; the arguments are JSON."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Function(Strict):
    """What a tool is called, does and takes (a JSON schema). Every call is held to it, whatever `strict` says."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolIn(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Strict):
    """The name of a function."""

    name: str


class Chosen(Strict):
    """The tool that the model must call."""

    type: Literal["function"]
    function: ChosenFunction


class ChatMessage(Strict):
    """One message. Text in it never becomes a control token."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # What OpenAI's client adds to an answer that is sent back. None of it is ever set by this server.
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class JsonSchema(Strict):
    """A schema and what it is called."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Generation):
    """Of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ToolIn], Field(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Chosen | None = None
    parallel_tool_calls: Annotated[bool, Field(description="False: of several calls, the first one.")] | None = None


# ---------------------------------------------------------------- LazyRAG's own


class OwnMessage(Strict):
    """As `lazyrag.Message`."""

    role: str
    content: Text
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str | None = None
    name: str | None = None


class OwnPiece(Strict):
    """As `lazyrag.chat.TextPiece`."""

    text: Text
    kind: Literal["template", "content", "mixed"]


class OwnPrompt(Strict):
    """One of: a text, the messages of a chat, a text in pieces."""

    text: Text | None = None
    messages: list[OwnMessage] | None = None
    pieces: Annotated[list[OwnPiece], Field(min_length=1)] | None = None


class Planning(Strict):
    """How prompts are read; see `LazyRAG.plan`."""

    hints: list[Text] = []
    tools: list[Any] | None = None
    special: Literal["allow", "plain"] = "allow"
    mode: Mode = None


class OwnSampling(Strict):
    """As `lazyrag.Sampling`; what is None is the server's default."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=1 << 24)] = 0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    stop: list[Annotated[str, Field(min_length=1)]] = []
    seed: Annotated[int, Field(ge=-INT64, le=INT64)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    ignore_eos: bool = False
    json_schema: dict[str, Any] | None = None
    structural_tag: dict[str, Any] | None = None
    timeout_s: float | None = None
    allowed_token_ids: list[Annotated[int, Field(ge=0, le=INT64)]] = []


class GenerateRequest(Planning):
    """Of /v1/generate."""

    prompts: Annotated[list[OwnPrompt], Field(min_length=1, max_length=2048)]
    sampling: OwnSampling = OwnSampling()


class SegmentRequest(Planning):
    """Of /v1/segment."""

    prompt: OwnPrompt
    run: Annotated[bool, Field(description="Send it to the engine, to learn where each chunk's KV comes from.")] = False


class SearchRequest(Strict):
    """Of /v1/search."""

    query: Text
    k: Annotated[int, Field(ge=1, le=1000)] = 4


class QueryRequest(Strict):
    """Of /v1/query."""

    question: Text
    k: Annotated[int, Field(ge=1, le=100)] = 4
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    mode: Mode = None


class DocumentIn(Strict):
    """A document to add. Without an id it is known by its text, without a source by its id."""

    text: Text
    id: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    source: str | None = None
    title: str | None = None
    metadata: dict[str, str | int | float | bool | None] = {}
    pages: Annotated[
        list[Annotated[int, Field(ge=0, le=INT64)]],
        Field(description="The character at which each page starts, the first 0."),
    ] = []
    sha256: Annotated[
        str | None, Field(pattern="^[0-9a-f]{64}$", description="Of what it was made from: says when it has changed.")
    ] = None
    mtime: Annotated[float | None, Field(allow_inf_nan=False, description="Of its file, seconds since the epoch.")] = (
        None
    )


class DocumentsRequest(Strict):
    """Of POST /v1/documents."""

    documents: Annotated[list[DocumentIn | Text], Field(min_length=1, max_length=10_000)]
    warm: Annotated[bool, Field(description="Compute the chunks' KV now, not when they are first used.")] = True


class Digest(Strict):
    """A document that may be added."""

    id: Annotated[str, Field(min_length=1, max_length=4096)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class NeededRequest(Strict):
    """Of POST /v1/documents/needed."""

    documents: Annotated[list[Digest], Field(max_length=10_000)]


class PinRequest(Strict):
    """Of /v1/pins."""

    ids: Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=10_000)]
    pinned: Annotated[bool, Field(description="False: they need not stay any more.")] = True


Generation.model_rebuild()
