"""From one vLLM request to a lazy one, and to the child requests that compute or load its missing segments."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.request import Request

from lazyrag.backend import wire
from lazyrag.backend.contents import Contents, name_of, pack
from lazyrag.backend.hashing import BlockHash, ExtraKeys, block_hashes, chunk_hashes, chunk_key
from lazyrag.backend.layout import LaidSegment, Layout, check_spans, lay_out_parts, take_apart
from lazyrag.backend.plugin.chains import Chain, Chains
from lazyrag.errors import (
    CapacityError,
    ContextOverflowError,
    InputError,
    RequestError,
    UnknownContentError,
)
from lazyrag.types import COMPUTED, DISK, HBM

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MODES = ("lazy", "lazy-prefix")


@dataclass(eq=False, slots=True)
class Child:
    """A hidden request in flight that makes one segment's chunk resident.

    Attributes:
        key: hash of the segment's last block, by which requests in flight share the child.
        block_hashes: of the chunk's blocks.
        first_block: index of the first of them in the child's block table.
        is_loaded: a connector loads KV for it; set by the scheduler when the child is given blocks.
    """

    request_id: str
    key: BlockHash
    block_hashes: list[BlockHash]
    first_block: int
    is_loaded: bool = False


@dataclass(eq=False, slots=True)
class LazyRequest:
    """A request with a layout: a client's, or a child that is computed behind the preamble.

    Attributes:
        request: vLLM's, rewritten to the physical prompt.
        chains: the blocks of each segment.
        is_child: hidden from clients.
        num_preamble: 1 if segment 0 is the preamble, else 0.
        children: segment index -> the child it last waited for; set by the scheduler.
        asked: the children that were made for this request (not those shared with an earlier one), without those whose
            load failed.
        cached_suffix_tokens: suffix tokens that the prefix cache held; set when the request is first scheduled.
        missing: indices of the segments that are not resident; set at the start of each step.
    """

    request: Request
    layout: Layout
    chains: tuple[Chain, ...]
    is_child: bool = False
    num_preamble: int = 0
    children: dict[int, Child] = field(default_factory=dict)
    asked: list[Child] = field(default_factory=list)
    cached_suffix_tokens: int | None = None
    missing: list[int] = field(default_factory=list)

    def report(self) -> wire.WireReport:
        """What the client is told (see `wire`)."""
        sources = [self._source(i) for i in range(len(self.layout.segments))]
        loaded = sum(child.is_loaded for child in self.asked)
        return {
            "sources": sources[self.num_preamble :],
            "preamble": sources[0] if self.num_preamble else "",
            "cached_suffix_tokens": self.cached_suffix_tokens or 0,
            "children_computed": len(self.asked) - loaded,
            "children_loaded": loaded,
        }

    def _source(self, index: int) -> str:
        """Of requests in flight with the same chunk, the one that asked for it has another source than the others.

        So it makes no difference to the others whether they came just before or just after the chunk was resident.
        """
        child = self.children.get(index)
        if child is None or child not in self.asked:
            return HBM
        return DISK if child.is_loaded else COMPUTED


class RequestMaker:
    """Rewrites requests and makes children, for one engine.

    Args:
        vllm_config: the engine's.
        block_size: tokens a block.
        num_blocks: blocks in the pool that requests can use.
    """

    def __init__(self, vllm_config: VllmConfig, *, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._mode = engine_settings(vllm_config).mode
        self._pad = pad_token(vllm_config.model_config.hf_config)
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._hash_block = lambda parent, tokens, extra: hash_block_tokens(hash_function, parent, tokens, extra)
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        self._chains, self._contents = Chains(), Contents(self._vocabulary)
        self._num_made = 0
        # Not to be guessed: a refused request is known by its id until its error is out.
        self._id_prefix = f"{wire.CHILD_PREFIX}{secrets.token_hex(8)}-"

    def rewrite(self, request: Request) -> LazyRequest | None:
        """Turn a client's request into a lazy one, in place; None if it asks for no reuse.

        Raises:
            LazyRAGError: the request cannot be served; it is left as it was.
        """
        params = request.sampling_params
        args = (params and params.extra_args) or {}
        if params is not None and (wire.LAYOUT in args or wire.CHILD in args):
            request.sampling_params = copy(params)
            request.sampling_params.extra_args = wire.strip_private(args)
        if request.request_id.startswith(wire.CHILD_PREFIX):
            raise RequestError(
                "The request's id is reserved for the engine:",
                why=f"no client's id may start with {wire.CHILD_PREFIX}.",
            )
        asked = wire.request_from_args(args)
        prefix_len = asked.prefix_len
        if not asked.spans and not prefix_len:
            return None
        self._refuse_options(request)
        if prefix_len and self._mode != "lazy-prefix":
            raise InputError(
                f"The request has a preamble of {prefix_len} tokens, this engine runs in mode {self._mode}.",
                fix="Start the engine with mode='lazy-prefix', or send no preamble.",
            )
        literals, contents, names = self._parts(request.prompt_token_ids, asked)
        layout, token_ids = lay_out_parts(
            literals, asked.spans, contents, prefix_len=prefix_len, block_size=self._block_size, pad=self._pad
        )
        self._refuse_size(request, layout, len(token_ids))
        chains = self._apply(request, layout, token_ids, names)
        return LazyRequest(request, layout, chains, num_preamble=1 if prefix_len else 0)

    def is_child(self, request_id: str) -> bool:
        """Whether the request is a child, in flight or not."""
        return request_id.startswith(self._id_prefix)

    def make_child(
        self, parent: LazyRequest, index: int, *, may_load: bool
    ) -> tuple[Child, Request, LazyRequest | None]:
        """A child for one segment of a lazy request.

        Args:
            parent: whose segment is missing.
            index: the segment's.
            may_load: the KV connector, if there is one, may load the chunk; it saves what the child computes.

        Returns:
            its record, the request, and, if it is computed behind the preamble, its layout.
        """
        layout, stock = parent.layout, parent.request
        segment, token_ids = layout.segments[index], stock._all_token_ids
        tokens = layout.chunk_tokens(segment, token_ids)
        num_tokens = segment.offset + segment.num_tokens
        hashes = parent.chains[index].hashes
        if segment.offset:  # a chain has the segment's own blocks only
            hashes = chunk_hashes(layout, segment, token_ids, stock.block_hashes, self._keys(stock), self._hash_block)
        num_prefix, num_prefix_blocks = 0, 0
        if segment.behind_prefix:
            num_prefix, num_prefix_blocks = layout.segments[0].num_tokens, layout.segments[0].num_blocks
        named = wire.WireChild(
            key=chunk_key(
                tokens[:num_tokens], prefix=token_ids[:num_prefix], salt=stock.cache_salt, lora=_lora_name(stock)
            ),
            first_token=num_prefix_blocks * self._block_size,
            num_tokens=num_tokens,
            may_load=may_load,
        )
        prefix = token_ids[: num_prefix_blocks * self._block_size]
        all_hashes = [*stock.block_hashes[:num_prefix_blocks], *hashes]
        request = Request(
            request_id=f"{self._id_prefix}{self._num_made}",
            prompt_token_ids=[*prefix, *tokens],
            sampling_params=SamplingParams(
                max_tokens=1, temperature=0.0, detokenize=False, extra_args={wire.CHILD: named}
            ),
            pooling_params=None,
            client_index=stock.client_index,
            arrival_time=stock.arrival_time,
            priority=stock.priority,
            # Those of its parent's segment, or the parent would wait for blocks that nobody computes.
            block_hasher=lambda request: all_hashes[len(request.block_hashes) :],
            cache_salt=stock.cache_salt,
            lora_request=stock.lora_request,
        )
        self._num_made += 1
        lazy = None
        if segment.behind_prefix:
            child_layout = Layout(self._block_size, layout.segments[:1], num_prefix_blocks)
            self._announce(request, child_layout)
            lazy = LazyRequest(request, child_layout, parent.chains[:1], is_child=True, num_preamble=1)
        return Child(request.request_id, hashes[-1], hashes, num_prefix_blocks), request, lazy

    def _parts(
        self, token_ids: Sequence[int], asked: wire.WireRequest
    ) -> tuple[Sequence[int], Sequence[list[int]], Sequence[str]]:
        """A client's prompt as literals, tokens of each segment, and their names."""
        if asked.names is None:
            check_spans(asked.spans, asked.prefix_len, len(token_ids))
            literals, contents = take_apart(token_ids, asked.spans, asked.prefix_len)
            return literals, contents, [name_of(pack(content)) for content in contents]  # vLLM has checked them
        try:
            # All before any is looked up: the names of a request may be more than what is kept.
            sent = dict(map(self._contents.add, asked.contents.values()))
        except ValueError as error:
            raise InputError("The tokens of a segment are not valid:", why=f"{error}.") from None
        found = {name: sent.get(name) or self._contents.get(name) for name in asked.names}
        contents = [tokens for name in asked.names if (tokens := found[name]) is not None]
        if len(contents) < len(asked.names):
            raise UnknownContentError(
                f"The engine does not know the tokens of {len(asked.names) - len(contents)} segments.",
                fix="Send the request again with them (lazyrag_contents).",
            )
        return token_ids, contents, asked.names

    def _apply(self, request: Request, layout: Layout, token_ids: list[int], names: Sequence[str]) -> tuple[Chain, ...]:
        """Give a client's request its layout: physical prompt, hashes, and what the worker needs."""
        request.prompt_token_ids, request.num_prompt_tokens = token_ids, len(token_ids)
        request._all_token_ids[:] = token_ids
        self._announce(request, layout)
        request.block_hashes.clear()
        chains: list[Chain] = []
        for segment, name in zip(layout.segments, names, strict=True):
            chains.append(self._chain(request, layout, segment, name, chains))
            request.block_hashes += chains[-1].hashes
        request._block_hasher = self._hasher(layout)
        request.update_block_hashes()
        return tuple(chains)

    def _chain(
        self, request: Request, layout: Layout, segment: LaidSegment, name: str, before: Sequence[Chain]
    ) -> Chain:
        """The hashes of a segment's blocks; those of the segments in front of it are known."""
        keys = self._keys(request)

        def make() -> list[BlockHash]:
            hashes = chunk_hashes(layout, segment, request._all_token_ids, request.block_hashes, keys, self._hash_block)
            return hashes[segment.offset // self._block_size :]

        if segment.offset:  # the chunk's head is in the literals, which have no name
            return Chain(make())
        preamble = None
        if segment.behind_prefix:
            first = layout.segments[0]
            preamble = (before[0].hashes[-1], first.visible_from, first.num_tokens, first.shift)
        return self._chains.get((name, segment.num_tokens, keys, preamble), make)

    def _announce(self, request: Request, layout: Layout) -> None:
        """Put a layout where the worker finds it. The client may use one SamplingParams for many requests: a copy."""
        params = copy(request.sampling_params)
        params.extra_args = {**wire.strip_sent(params.extra_args or {}), wire.LAYOUT: wire.layout_to_wire(layout)}
        request.sampling_params = params

    def _keys(self, request: Request) -> ExtraKeys:
        block_size = self._block_size
        first, rest = (
            generate_block_hash_extra_keys(request, start, start + block_size, 0)[0] or () for start in (0, block_size)
        )
        return ExtraKeys(first, rest)

    def _hasher(self, layout: Layout) -> Callable[[Request], list[BlockHash]]:
        def new_hashes(request: Request) -> list[BlockHash]:
            if len(request.block_hashes) >= request.num_tokens // layout.block_size:
                return []
            keys = self._keys(request)
            return block_hashes(layout, request._all_token_ids, request.block_hashes, keys, self._hash_block)

        return new_hashes

    def _refuse_options(self, request: Request) -> None:
        params = request.sampling_params
        unsupported = {
            "prompt_embeds": request.prompt_embeds is not None,
            "images, audio or video": bool(request.mm_features),
            "prompt_logprobs": params.prompt_logprobs is not None,
            "skip_reading_prefix_cache": request.skip_reading_prefix_cache,
            "a streamed prompt": request.resumable,
        }
        found = [name for name, is_used in unsupported.items() if is_used]
        if found:
            raise RequestError(
                f"A request that reuses chunks cannot have {', '.join(found)}.",
                fix="Leave that out, or send the request without lazyrag_spans.",
            )

    def _refuse_size(self, request: Request, layout: Layout, num_tokens: int) -> None:
        if num_tokens >= self._max_model_len:
            raise ContextOverflowError(
                f"The prompt has {num_tokens} tokens ({layout.num_pads} of them pad chunks to whole blocks), the "
                f"model's context {self._max_model_len}, and at least one is needed for the answer.",
                fix="Send fewer or shorter chunks, or start the engine with a larger max_model_len.",
            )
        end = min(num_tokens + request.max_tokens, self._max_model_len)
        # Children need no more: what a child has beyond its parent's segment (the chunk's head) is among the parent's
        # literals, which it computes afterwards.
        need = -(-end // self._block_size)
        if need > self._num_blocks:
            raise CapacityError(
                f"The request needs {need} KV blocks of {self._block_size} tokens, the engine has {self._num_blocks}.",
                fix="Give the engine more KV memory, ask for fewer tokens, or send fewer or shorter chunks.",
            )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`additional_config["lazyrag"]`: the engine's mode, and whether invariants are checked after every step."""

    mode: str = "lazy"
    debug: bool = False


def engine_settings(vllm_config: VllmConfig) -> EngineSettings:
    """Read `additional_config["lazyrag"]`.

    Raises:
        InputError: an unknown key or mode.
    """
    given = (vllm_config.additional_config or {}).get("lazyrag", {})
    unknown = sorted(set(given) - {"mode", "debug"})
    if unknown:
        raise InputError(
            f"additional_config['lazyrag'] has unknown keys: {', '.join(unknown)}.", fix="Known: mode, debug."
        )
    settings = EngineSettings(**given)
    if settings.mode not in MODES:
        raise InputError(
            f"additional_config['lazyrag']['mode'] is {settings.mode!r}.", fix=f"Known: {', '.join(MODES)}."
        )
    return settings


def pad_token(hf_config: Any) -> int:
    """The token id that fills blocks up: the model's start token, its pad token, or 0.

    Attention never reads it, but a repetition penalty sees it in the prompt: it should be one that no answer contains,
    and many models pad with their end token.
    """
    for name in ("bos_token_id", "pad_token_id"):
        token = getattr(hf_config, name, None)
        if isinstance(token, int) and token >= 0:
            return token
    return 0


def _lora_name(request: Request) -> str | None:
    return request.lora_request.lora_name if request.lora_request is not None else None
