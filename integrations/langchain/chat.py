"""LangChain's interface for chat models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, ConfigDict

from lazyrag.backend.engine import Delta, Sampling
from lazyrag.integrations.common import Heard
from lazyrag.integrations.langchain.convert import (
    InputError,
    langchain_errors,
    to_chunk,
    to_last_chunk,
    to_message,
    to_messages,
)
from lazyrag.integrations.langchain.model import LangChainModel
from lazyrag.tools import Offer, Reader, offer
from lazyrag.types import Answer

AnyTool = dict[str, Any] | type | Callable[..., Any] | BaseTool


class ChatLazyRAG(LangChainModel, BaseChatModel):
    """A chat model: messages are rendered with the model's own chat template.

    Chunks that were ingested or registered are found in any message, and their KV is reused. `usage_metadata` counts
    their tokens as `cache_read`; `response_metadata["lazyrag"]` says where each came from. Constructing it starts
    nothing.

    Example:
        ChatLazyRAG(model="path/to/model", store="kb").invoke("What changed in the last release?")
    """

    model_config = ConfigDict(extra="forbid")

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            call = self._call(messages, stop, kwargs)
            (answer,) = self.client.generate(
                [call.offer.messages], call.offer.sampling, tools=call.offer.shown, mode=call.mode
            )
            return call.result(answer)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            call = await asyncio.to_thread(self._call, messages, stop, kwargs)
            (answer,) = await self.client.agenerate(
                [call.offer.messages], call.offer.sampling, tools=call.offer.shown, mode=call.mode
            )
            return call.result(answer)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with langchain_errors():
            call = self._call(messages, stop, kwargs)
            for delta in self.client.stream(
                call.offer.messages, call.offer.sampling, tools=call.offer.shown, mode=call.mode
            ):
                yield from call.chunks(delta)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with langchain_errors():
            call = await asyncio.to_thread(self._call, messages, stop, kwargs)
            deltas = self.client.astream(
                call.offer.messages, call.offer.sampling, tools=call.offer.shown, mode=call.mode
            )
            async with aclosing(deltas):
                async for delta in deltas:
                    for chunk in call.chunks(delta):
                        yield chunk

    def _call(self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> _Call:
        kwargs = dict(kwargs)
        tools, choice = kwargs.pop("tools", None), kwargs.pop("tool_choice", None)
        sampling = self._sampling(stop, kwargs)
        sent = offer(self.client.tokenizer, to_messages(messages), tools, choice, sampling)
        return _Call(sent, self.model_name, kwargs.get("mode"))

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[AnyTool] | None = None) -> int:
        """Tokens of the messages as the model sees them, chat template included."""
        described = [convert_to_openai_tool(tool) for tool in tools or ()]
        with langchain_errors():
            sent = offer(self.client.tokenizer, to_messages(messages), described, None, Sampling())
            return len(self.client.plan(sent.messages, tools=sent.shown).token_ids)

    def bind_tools(
        self,
        tools: Sequence[AnyTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """A model that may call these tools.

        The chat template shows them to the model; one that has no place for tools is told of them in its system message
        (`lazyrag.tools`). Guided decoding leaves the model no invalid call, and no other answer where it must call.

        Args:
            tools: anything that LangChain can describe as a tool.
            tool_choice: None or "auto": the model decides. "any", "required" or True: it must call one of them. A
                name: it must call that one. "none": it must not call any.
            strict: add `strict` to the tools' descriptions.
            **kwargs: settings of the request.
        """
        described = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        return self.bind(tools=described, tool_choice=tool_choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "json_mode", "function_calling"] = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """A model that answers in the schema.

        Args:
            schema: a Pydantic class (the answer is an instance of it), a TypedDict or a JSON schema (it is a dict).
                None, with `method="json_mode"`: any JSON object.
            include_raw: answer `{"raw": message, "parsed": ..., "parsing_error": ...}`.
            method: "json_schema" admits nothing else while generating, and so does "json_mode", which elsewhere leaves
                it to the prompt; "function_calling" makes the model call a tool with this schema.
            strict: as LangChain's `convert_to_json_schema`.
            **kwargs: settings of the request.

        Raises:
            InputError: there is no schema.
        """
        if schema is None:
            if method != "json_mode":
                raise InputError("There is no schema for the answer.", fix='Give one, or say method="json_mode".')
            wanted: dict[str, Any] = {"type": "object"}
        elif method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        else:
            wanted = convert_to_json_schema(schema, strict=strict)
        model = self.bind(
            json_schema=wanted,
            ls_structured_output_format={"kwargs": {"method": method}, "schema": wanted},
            **kwargs,
        )
        parser: PydanticOutputParser[Any] | JsonOutputParser = JsonOutputParser()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = PydanticOutputParser(pydantic_object=schema)
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


@dataclass(slots=True)
class _Call:
    """One request in LazyRAG's terms, and the way back."""

    offer: Offer
    model: str
    mode: str | None = None
    heard: Heard = field(default_factory=Heard)
    reader: Reader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = self.offer.reader()

    def result(self, answer: Answer) -> ChatResult:
        content, calls = self.offer.read(answer.text)
        return ChatResult(generations=[ChatGeneration(message=to_message(answer, self.model, content, calls))])

    def chunks(self, delta: Delta) -> Iterator[ChatGenerationChunk]:
        """What to pass on at this delta."""
        answer = self.heard.add(delta)
        for part in self.reader.feed(delta.text, last=answer is not None):
            yield ChatGenerationChunk(message=to_chunk(part))
        if answer:
            yield ChatGenerationChunk(message=to_last_chunk(answer, self.model, self.reader.calls))
