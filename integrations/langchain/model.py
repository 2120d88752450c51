"""What LazyRAG's string model and chat model have in common in LangChain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.language_models.base import LangSmithParams
from pydantic import Field

from lazyrag.backend.engine import Sampling
from lazyrag.errors import InputError
from lazyrag.integrations.common import Connection, Generation

_IDENTITY = ("model", "namespace", "preamble", "dtype")


class LangChainModel(Connection, Generation):
    """Settings, identity and token counts; to be derived from before LangChain's base class."""

    streaming: bool = Field(default=False, description="Stream inside invoke, too, so that callbacks see every token.")
    max_retries: int = Field(
        default=0,
        description="Taken as every model takes it; what fails fails again, so nothing is retried.",
    )

    @property
    def _llm_type(self) -> str:
        return "lazyrag"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """What an answer depends on: LangChain's cache keys answers by it."""
        config = self.client.config
        generation = {name: getattr(self, name) for name in Generation.model_fields}
        server = {"base_url": self.base_url} if self.base_url is not None else {}
        mode = self.client.choice.mode
        return {**server, **generation, **{name: getattr(config, name) for name in _IDENTITY}, "mode": mode}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params: LangSmithParams = super()._get_ls_params(stop=stop, **kwargs)  # type: ignore[misc]
        params["ls_provider"] = "lazyrag"
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """The text's token ids in the model's own vocabulary."""
        return list(self.client.tokenizer.encode_template(text))

    def _sampling(self, stop: str | Sequence[str] | None, call: Mapping[str, Any]) -> Sampling:
        """The settings of one request.

        Raises:
            InputError: an unknown setting, or a model that this engine does not run.
        """
        call, mine = dict(call), self.model_name
        if (asked := call.pop("model", mine)) != mine:
            raise InputError(
                f"This engine runs {mine}, not {asked}.", fix=f"Make a {type(self).__name__} for the other model."
            )
        return self.sampling(self.client, stop, call)
