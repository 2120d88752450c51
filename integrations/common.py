"""What every façade shares: which client, how to generate, what to report. No framework here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, SecretStr

from lazyrag.backend.engine import Delta, Sampling
from lazyrag.backend.remote import RemoteRAG
from lazyrag.client import LazyRAG
from lazyrag.errors import ConfigError, InputError
from lazyrag.modes import AUTO, ReuseMode
from lazyrag.types import DOCUMENT, Answer, ChunkId, Citation, Reuse

Client: TypeAlias = LazyRAG | RemoteRAG
Mode: TypeAlias = Annotated[str, AfterValidator(lambda text: text if text == AUTO else str(ReuseMode.parse(text)))]


class Connection(BaseModel):
    """Which LazyRAG a façade talks to: the settings of `lazyrag.Config`, a server's address, or a client to share.

    A setting that is None comes from the environment or lazyrag.toml. Façades with the same settings share one engine,
    which starts with the first request. A server (`lazyrag serve`) has settings of its own.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    model: str | None = Field(default=None, description="Folder or name of the model.")
    mode: Mode | None = Field(default=None, description="auto, exact, lazy, sink, prefix; lazy+first_k=32, ...")
    store: Path | str | None = Field(default=None, description="Folder of the document store.")
    preamble: str | None = Field(default=None, description="Fixed text in front of every prompt (mode prefix).")
    embedder: str | None = Field(default=None, description="Name of the embedding model.")
    namespace: str | None = Field(default=None, description="Tenant; nothing is shared between namespaces.")
    dtype: str | None = Field(default=None, description="Data type of weights and KV.")
    max_model_len: int | None = Field(default=None, description="Tokens of prompt and answer together.")
    engine_args: dict[str, Any] | None = Field(default=None, description="More settings for vLLM, by its own names.")
    base_url: str | None = Field(default=None, description="Address of a server: http://127.0.0.1:8000.")
    api_key: SecretStr | None = Field(
        default=None, exclude=True, repr=False, description="For a server; an embedded engine asks for none."
    )
    lazyrag: Client | None = Field(
        default=None, exclude=True, repr=False, description="Use this client, not one of its own."
    )

    _client: Client | None = PrivateAttr(default=None)

    @property
    def client(self) -> Client:
        """The client behind this façade, found or made when it is first needed.

        Raises:
            ConfigError: a setting that cannot be, or that a server decides.
        """
        if self._client is None:
            given = {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}
            if self.lazyrag is not None:
                self._client = self.lazyrag
            elif self.base_url is None:
                self._client = LazyRAG.shared(**given)
            elif given:
                raise ConfigError(
                    f"base_url cannot be combined with {', '.join(sorted(given))}:",
                    why="the server decides these.",
                    fix="Give one or the other.",
                )
            else:
                key = self.api_key.get_secret_value() if self.api_key is not None else ""
                self._client = RemoteRAG.shared(self.base_url, key)
        return self._client

    def register(self, name: str, text: str) -> ChunkId:
        """Make a text known that many prompts hold (a system prompt, examples), so that its KV is computed once.

        Args:
            name: of yours; a text takes the place of the one that had the name before.
            text: as prompts show it.

        Raises:
            ConfigError: the client is a server's.
        """
        (id,) = self.embedded.register({name: text})
        return id

    @property
    def embedded(self) -> LazyRAG:
        """The client, which must not be a server's: for what is done in this process only.

        Raises:
            ConfigError: it is a server's.
        """
        client = self.client
        if isinstance(client, RemoteRAG):
            raise ConfigError(
                "This cannot be done through a server's address.",
                why="the server splits, embeds and registers texts itself.",
                fix="Give the server the documents: POST /v1/documents. Or leave base_url out.",
            )
        return client

    @property
    def model_name(self) -> str:
        """The model as the settings name it, or its folder if the store knows it."""
        return self.client.config.model or str(self.client.model)


def warm(client: LazyRAG, ids: Iterable[ChunkId]) -> None:
    """Compute the KV of known chunks now.

    Raises:
        EngineError: the first of the chunks' errors.
    """
    for _, result in client.warm(ids):
        if isinstance(result, Exception):
            raise result


SETTINGS = tuple(name for name in Connection.model_fields if name not in ("base_url", "api_key", "lazyrag"))


class StringPrompts(BaseModel):
    """How a façade for prompts that are one string sends them."""

    special: Literal["allow", "plain"] = Field(
        default="allow",
        description="allow: control tokens spelt in a prompt are meant, except in what is known to be documents' text; "
        "plain: they are text, wherever they stand. Chats need no such setting: contents never hold any.",
    )


class Generation(BaseModel):
    """How a façade generates. A value that is None is the client's default."""

    max_tokens: int | None = Field(default=None, description="Tokens to generate, at most.")
    temperature: float | None = Field(default=None, description="0: always the likeliest token.")
    top_p: float | None = Field(
        default=None, description="Sample from the likeliest tokens that make up this probability."
    )
    top_k: int | None = Field(default=None, description="Sample from this many of the likeliest tokens; 0: from all.")
    frequency_penalty: float | None = Field(
        default=None, description="Takes likelihood from tokens for each time they were generated, -2 to 2."
    )
    presence_penalty: float | None = Field(
        default=None, description="Takes likelihood from tokens that were generated at all, -2 to 2."
    )
    seed: int | None = Field(default=None, description="Makes sampling repeatable.")
    stop: str | list[str] | None = Field(
        default=None, description="A text, or several, that ends the answer; it is not part of it."
    )
    timeout: float | None = Field(default=None, description="Seconds that a request may take.")

    def sampling(self, client: Client, stop: str | Sequence[str] | None, call: Mapping[str, Any]) -> Sampling:
        """The settings of one request.

        Args:
            client: for the defaults.
            stop: replaces `self.stop` for this call.
            call: further settings for this call, by the names of this class's fields, `json_schema` or
                `structural_tag`. A `mode` is no matter of sampling, and is passed over.

        Raises:
            InputError: a name in `call` that is none of these.
        """
        if unknown := sorted(call.keys() - _PER_CALL):
            raise InputError(
                f"A request takes no {', '.join(unknown)}.", fix=f"It takes {', '.join(sorted(_PER_CALL))}."
            )
        values = {
            "max_tokens": client.config.max_tokens,
            "temperature": client.config.temperature,
            **{name: value for name in Generation.model_fields if (value := getattr(self, name)) is not None},
            **{name: value for name, value in call.items() if name != "mode" and value is not None},
        }
        if stop is not None:
            values["stop"] = stop
        values["timeout_s"] = values.pop("timeout", None)
        return Sampling(**values)


_PER_CALL = {*Generation.model_fields, "json_schema", "structural_tag", "mode"}


# ---------------------------------------------------------------- what came back


@dataclass(slots=True)
class Heard:
    """What a stream of deltas has said so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)

    def add(self, delta: Delta) -> Answer | None:
        """Take a delta in; the whole answer if it was the last one."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.finish_reason is None:
            return None
        return Answer(
            self.text,
            tuple(self.token_ids),
            delta.finish_reason,
            delta.reuse or Reuse(0, 0),
            ttft_s=delta.ttft_s,
            citations=delta.citations,
            mode=delta.mode,
        )


def report(answer: Answer) -> dict[str, Any]:
    """What LazyRAG adds to a framework's answer, as plain values."""
    return {
        "prompt_tokens": answer.reuse.prompt_tokens,
        "reused_tokens": answer.reuse.reused_tokens,
        "computed_tokens": answer.reuse.computed_tokens,
        "segments": len(answer.reuse.sources),
        "sources": list(answer.reuse.sources),
        "ttft_s": answer.ttft_s,
        "mode": answer.mode.mode if answer.mode is not None else None,
        "mode_why": answer.mode.why if answer.mode is not None else None,
        "citations": [_citation(citation) for citation in answer.citations],
    }


def _citation(citation: Citation) -> dict[str, Any]:
    """A chunk that the prompt held: where its KV came from, and where documents hold its text."""
    places = [
        {
            "document_id": place.metadata.get(DOCUMENT) or place.document_id,
            **{name: getattr(place, name) for name in ("source", "title", "page", "start", "end")},
        }
        for place in citation.places
    ]
    first = places[0] if places else {}
    return {"chunk_id": citation.chunk_id, "kv": citation.kv, **first, **({"also": places[1:]} if places[1:] else {})}


def usage(answers: Iterable[Answer]) -> dict[str, int]:
    """Token counts under the names that OpenAI gave them."""
    answers = list(answers)
    prompt, completion = sum(a.reuse.prompt_tokens for a in answers), sum(len(a.token_ids) for a in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
