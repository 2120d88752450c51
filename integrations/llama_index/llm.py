"""LlamaIndex's interface for language models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from llama_index.core import Settings
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools import BaseTool
from pydantic import ConfigDict

from lazyrag.backend.engine import Delta, Sampling
from lazyrag.chat import Message
from lazyrag.client import LazyRAG
from lazyrag.errors import InputError
from lazyrag.integrations.common import (
    Connection,
    Generation,
    Heard,
    StringPrompts,
)
from lazyrag.integrations.llama_index.convert import to_chat_delta, to_chat_response, to_completion, to_messages
from lazyrag.integrations.llama_index.embedding import LazyRAGEmbedding
from lazyrag.tools import Offer, Tool, offer
from lazyrag.types import Answer


class LazyRAGLLM(StringPrompts, Connection, Generation, FunctionCallingLLM):
    """A chat model whose prompts are rendered with the model's own chat template.

    Chunks that were ingested or registered are found in any prompt, and their KV is reused; a response's
    `raw["lazyrag"]` says how much of it. `metadata` reports the engine's true context window, so that LlamaIndex packs
    chunks whole. Constructing it starts nothing.

    Example:
        LazyRAGLLM(model="path/to/model", store="kb").complete("What changed in the last release?")
    """

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def class_name(cls) -> str:
        """The name in LlamaIndex's serialised settings."""
        return "LazyRAGLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex packs prompts by; read from the model's folder, starts nothing."""
        config = self.client.config
        return LLMMetadata(
            context_window=self.client.max_model_len,
            num_output=self.max_tokens or config.max_tokens,
            is_chat_model=self._has_template,
            is_function_calling_model=self._has_template,
            model_name=self.model_name,
        )

    @property
    def _has_template(self) -> bool:
        return self.client.tokenizer.chat_template is not None

    # ------------------------------------------------------------ chat

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation. `kwargs`: settings of this request, by the names of this class's fields, or `mode`."""
        call = self._chat_call(messages, kwargs)
        (answer,) = self.client.generate([call.prompt], call.sampling, tools=call.tools, mode=call.mode)
        return call.chat_response(answer)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`, without blocking the event loop."""
        call = await asyncio.to_thread(self._chat_call, messages, kwargs)
        (answer,) = await self.client.agenerate([call.prompt], call.sampling, tools=call.tools, mode=call.mode)
        return call.chat_response(answer)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """As `chat`, piece by piece; with tools the reply comes in one piece, for no sooner can a call be told."""
        call = self._chat_call(messages, kwargs)

        def pieces() -> ChatResponseGen:
            for delta in self.client.stream(call.prompt, call.sampling, tools=call.tools, mode=call.mode):
                yield from call.chat_pieces(delta)

        return pieces()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As `stream_chat`, without blocking the event loop."""
        call = await asyncio.to_thread(self._chat_call, messages, kwargs)

        async def pieces() -> ChatResponseAsyncGen:
            async with aclosing(
                self.client.astream(call.prompt, call.sampling, tools=call.tools, mode=call.mode)
            ) as deltas:
                async for delta in deltas:
                    for piece in call.chat_pieces(delta):
                        yield piece

        return pieces()

    # ------------------------------------------------------------ completion

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt.

        Args:
            prompt: one user message; with `formatted=True` the whole text, chat template and all.
            formatted: see `prompt`.
            **kwargs: settings of this request, by the names of this class's fields, or `mode`.
        """
        call = self._completion_call(prompt, formatted, kwargs)
        (answer,) = self.client.generate([call.prompt], call.sampling, special=self.special, mode=call.mode)
        return to_completion(answer, call.model)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As `complete`, without blocking the event loop."""
        call = await asyncio.to_thread(self._completion_call, prompt, formatted, kwargs)
        (answer,) = await self.client.agenerate([call.prompt], call.sampling, special=self.special, mode=call.mode)
        return to_completion(answer, call.model)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """As `complete`, piece by piece."""
        call = self._completion_call(prompt, formatted, kwargs)

        def pieces() -> CompletionResponseGen:
            for delta in self.client.stream(call.prompt, call.sampling, special=self.special, mode=call.mode):
                yield call.completion_piece(delta)

        return pieces()

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """As `stream_complete`, without blocking the event loop."""
        call = await asyncio.to_thread(self._completion_call, prompt, formatted, kwargs)

        async def pieces() -> CompletionResponseAsyncGen:
            async with aclosing(
                self.client.astream(call.prompt, call.sampling, special=self.special, mode=call.mode)
            ) as deltas:
                async for delta in deltas:
                    yield call.completion_piece(delta)

        return pieces()

    # ------------------------------------------------------------ tools

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or ())
        if user_msg is not None:
            is_text = isinstance(user_msg, str)
            messages.append(ChatMessage(role=MessageRole.USER, content=user_msg) if is_text else user_msg)
        choice = kwargs.pop("tool_choice", None) or ("required" if tool_required else "auto")
        described = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        return {"messages": messages, "tools": described, "tool_choice": choice, **kwargs}

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        if not allow_parallel_tool_calls:
            for surplus in _tool_calls(response)[1:]:
                response.message.blocks.remove(surplus)
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls that the model asks for.

        Raises:
            InputError: it asks for none, and `error_on_no_tool_call` is set; or a call was cut off.
        """
        calls = _tool_calls(response)
        if any(isinstance(call.tool_kwargs, str) for call in calls):
            # LlamaIndex would run the tool, with no arguments.
            raise InputError(
                "A call of a tool was cut off.", why="The answer ended in its arguments.", fix="Raise max_tokens."
            )
        if not calls and error_on_no_tool_call:
            raise InputError(
                "The model called no tool.", fix="Pass tool_required=True, or error_on_no_tool_call=False."
            )
        return [
            ToolSelection(tool_id=call.tool_call_id or "", tool_name=call.tool_name, tool_kwargs=call.tool_kwargs)
            for call in calls
        ]

    # ------------------------------------------------------------ requests

    def _chat_call(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> _Call:
        kwargs = dict(kwargs)
        tools, choice = kwargs.pop("tools", None), kwargs.pop("tool_choice", None)
        sampling = self.sampling(self.client, kwargs.pop("stop", None), kwargs)
        sent = offer(self.client.tokenizer, to_messages(messages), tools, choice, sampling)
        return _Call(sent.messages, sent.sampling, self.model_name, kwargs.get("mode"), sent)

    def _completion_call(self, prompt: str, formatted: bool, kwargs: Mapping[str, Any]) -> _Call:
        kwargs = dict(kwargs)
        sampling = self.sampling(self.client, kwargs.pop("stop", None), kwargs)
        sent = prompt if formatted or not self._has_template else [Message("user", prompt)]
        return _Call(sent, sampling, self.model_name, kwargs.get("mode"))


@dataclass(slots=True)
class _Call:
    """One request in LazyRAG's terms, and the way back."""

    prompt: str | list[Message]
    sampling: Sampling
    model: str
    mode: str | None = None
    offer: Offer | None = None
    heard: Heard = field(default_factory=Heard)

    @property
    def tools(self) -> list[Tool] | None:
        """Those that the chat template shows."""
        return self.offer.shown if self.offer else None

    def chat_response(self, answer: Answer, delta: str | None = None) -> ChatResponse:
        content, calls = self.offer.read(answer.text) if self.offer else (answer.text, [])
        return to_chat_response(answer, self.model, content, calls, delta)

    def chat_pieces(self, delta: Delta) -> Iterator[ChatResponse]:
        answer = self.heard.add(delta)
        may_call = self.offer is not None and bool(self.offer.names)
        if answer:
            yield self.chat_response(answer, answer.text if may_call else delta.text)
        elif not may_call:
            yield to_chat_delta(delta, self.heard.text)

    def completion_piece(self, delta: Delta) -> CompletionResponse:
        answer = self.heard.add(delta)
        if answer:
            return to_completion(answer, self.model, delta.text)
        return CompletionResponse(text=self.heard.text, delta=delta.text)


def _tool_calls(response: ChatResponse) -> list[ToolCallBlock]:
    return [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]


def configure(llm: LazyRAGLLM | None = None, **settings: Any) -> LazyRAGLLM:
    """Make LlamaIndex use this model, count with its tokenizer where it packs prompts, and embed with its embedder.

    An embedding model that the application has chosen already stays, and so does that of a model behind a server.

    Args:
        llm: the model; None makes one.
        **settings: its settings, if `llm` is None.
    """
    llm = llm or LazyRAGLLM(**settings)
    Settings.llm = llm
    Settings.tokenizer = llm.client.tokenizer.encode_plain
    if Settings._embed_model is None and isinstance(llm.client, LazyRAG):
        Settings.embed_model = LazyRAGEmbedding(lazyrag=llm.client)
    return llm
