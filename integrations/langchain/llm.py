"""LangChain's interface for models that continue a string."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import ConfigDict, PrivateAttr

from lazyrag.backend.engine import Delta
from lazyrag.integrations.common import Heard, StringPrompts, report, usage
from lazyrag.integrations.langchain.convert import langchain_errors
from lazyrag.integrations.langchain.model import LangChainModel
from lazyrag.types import Answer


class LazyRAGLLM(StringPrompts, LangChainModel, BaseLLM):
    """A model that continues the prompt as it is, without a chat template.

    Chunks that were ingested or registered are found in the prompt, wherever it holds them, and their KV is reused;
    `generation_info["lazyrag"]` says how much of it. Constructing it starts nothing.

    Control tokens that the prompt spells are meant, except in what is known to be documents' text. An application that
    writes none itself sets `special="plain"`: then nothing in a prompt is one, in altered or unknown texts neither.

    Example:
        inputs = {"context": retriever | format_docs, "question": RunnablePassthrough()}
        chain = inputs | prompt | LazyRAGLLM(model="path/to/model", store="kb")
    """

    model_config = ConfigDict(extra="forbid")

    _call: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    # LangChain keys cached answers by what `_identifying_params` says of the model, and by no setting of the call.

    def generate(
        self, prompts: list[str], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        """As every model of LangChain; a cache tells calls with other settings apart."""
        return super(LazyRAGLLM, self._called_with(kwargs)).generate(prompts, stop, callbacks, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        """As every model of LangChain; a cache tells calls with other settings apart."""
        return await super(LazyRAGLLM, self._called_with(kwargs)).agenerate(prompts, stop, callbacks, **kwargs)

    def _called_with(self, arguments: Mapping[str, Any]) -> LazyRAGLLM:
        """This model, as it answers one call."""
        of_call = self.model_copy()
        of_call._call = {name: value for name, value in arguments.items() if name not in _NO_SETTINGS}
        return of_call

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with langchain_errors():
            return self._result(
                self.client.generate(
                    prompts, self._sampling(stop, kwargs), special=self.special, mode=kwargs.get("mode")
                )
            )

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with langchain_errors():
            return self._result(
                await self.client.agenerate(
                    prompts, self._sampling(stop, kwargs), special=self.special, mode=kwargs.get("mode")
                )
            )

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        heard = Heard()
        with langchain_errors():
            for delta in self.client.stream(
                prompt, self._sampling(stop, kwargs), special=self.special, mode=kwargs.get("mode")
            ):
                chunk = _to_chunk(delta, heard.add(delta))
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        heard = Heard()
        with langchain_errors():
            async with aclosing(
                self.client.astream(prompt, self._sampling(stop, kwargs), special=self.special, mode=kwargs.get("mode"))
            ) as deltas:
                async for delta in deltas:
                    chunk = _to_chunk(delta, heard.add(delta))
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {**super()._identifying_params, "special": self.special, **self._call}

    def _result(self, answers: Sequence[Answer]) -> LLMResult:
        return LLMResult(
            generations=[[Generation(text=a.text, generation_info=_info(a))] for a in answers],
            llm_output={"token_usage": usage(answers), "model_name": self.model_name},
        )


_NO_SETTINGS = ("tags", "metadata", "run_name", "run_id")
"""Arguments of a call that an answer does not depend on."""


def _info(answer: Answer) -> dict[str, Any]:
    return {"finish_reason": answer.finish_reason, "lazyrag": report(answer)}


def _to_chunk(delta: Delta, answer: Answer | None) -> GenerationChunk:
    return GenerationChunk(text=delta.text, generation_info=_info(answer) if answer else None)
