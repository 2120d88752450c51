"""From one vLLM request to a lazy one, and to the child requests that compute or load its missing segments."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.request import Request

from lazyrag.backend import wire
from lazyrag.backend.contents import Contents, name_of, pack
from lazyrag.backend.hashing import NAME_DIGITS, BlockHash, ExtraKeys, block_hashes, chunk_hashes, chunk_key
from lazyrag.backend.layout import Layout, check_spans, lay_out_parts, take_apart
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


@dataclass(eq=False, slots=True)
class Child:
    """A hidden request in flight that makes one segment's chunk resident.

    Attributes:
        name: the chunk's (`hashing.chunk_name`).
        key: hash of the chunk's last block, by which requests in flight share the child.
        block_hashes: of the chunk's blocks.
        first_block: index of the first of them in the child's block table.
        is_loaded: a connector loads KV for it; set by the scheduler when the child is given blocks.
        tier: that it is loaded from; set with it.
    """

    request_id: str
    name: str
    key: BlockHash
    block_hashes: list[BlockHash]
    first_block: int
    is_loaded: bool = False
    tier: str = DISK


@dataclass(frozen=True, eq=False, slots=True)
class Content:
    """A whole chunk, of which a segment may be a part: what a child computes.

    Attributes:
        token_ids: not to be changed.
        chain: its blocks.
    """

    token_ids: Sequence[int]
    chain: Chain


@dataclass(eq=False, slots=True)
class LazyRequest:
    """A request with a layout: a client's, or a child that is computed behind the preamble or a sink.

    Attributes:
        request: vLLM's, rewritten to the physical prompt.
        chains: the blocks of each segment.
        contents: the chunk of each segment.
        is_child: hidden from clients.
        num_preamble: 1 if segment 0 is the preamble or a sink, else 0.
        quota: bytes of KV that its namespace may have on disk; None for no limit.
        warms_only: it is not run, but answered when its segments are resident (`control.WARM`).
        children: segment index -> the child it last waited for; set by the scheduler.
        asked: the children that were made for this request (not those shared with an earlier one), without those whose
            load failed.
        cached_suffix_tokens: suffix tokens that the prefix cache held; set when the request is first scheduled.
        missing: indices of the segments that are not resident; set at the start of each step.
        forgotten: names of chunks that were forgotten since it came: it may use them, nobody keeps them for it.
        num_overtaken: how often another request was preferred to it.
    """

    request: Request
    layout: Layout
    chains: tuple[Chain, ...]
    contents: tuple[Content, ...]
    is_child: bool = False
    num_preamble: int = 0
    quota: int | None = None
    warms_only: bool = False
    children: dict[int, Child] = field(default_factory=dict)
    asked: list[Child] = field(default_factory=list)
    cached_suffix_tokens: int | None = None
    missing: list[int] = field(default_factory=list)
    forgotten: set[str] = field(default_factory=set)
    num_overtaken: int = 0

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
        return child.tier if child.is_loaded else COMPUTED


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
        self._pad = pad_token(vllm_config.model_config.hf_config)
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._hash_block = lambda parent, tokens, extra: hash_block_tokens(hash_function, parent, tokens, extra)
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        self._chains, self._contents = Chains(), Contents(self._vocabulary)
        self._num_made = 0
        self._child_params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
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
        if not asked.spans and not asked.prefix_len:
            return None
        self._refuse_options(request)
        literals, contents, names = self._parts(request.prompt_token_ids, asked, request.cache_salt or "")
        layout, token_ids = lay_out_parts(
            literals,
            asked.spans,
            contents,
            prefix_len=asked.prefix_len,
            block_size=self._block_size,
            pad=self._pad,
            sink_len=len(asked.sink),
        )
        self._refuse_size(request, layout, len(token_ids))
        lazy = self._apply(request, layout, token_ids, names, contents)
        lazy.num_preamble = 1 if asked.prefix_len or asked.sink else 0
        lazy.quota = asked.quota
        return lazy

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
        first, segment, content = parent.layout.segments[0], parent.layout.segments[index], parent.contents[index]
        stock, num_tokens = parent.request, len(content.token_ids)
        behind: Sequence[int] = ()
        prefix: Sequence[int] = ()
        all_hashes = content.chain.hashes
        if segment.behind_first:
            behind = parent.contents[0].token_ids
            prefix = self._padded(behind)
            all_hashes = [*parent.chains[0].hashes, *all_hashes]
        named = wire.WireChild(
            key=chunk_key(content.token_ids, prefix=behind, salt=stock.cache_salt, lora=_lora_name(stock)),
            first_token=len(prefix),
            num_tokens=num_tokens,
            may_load=may_load,
            quota=parent.quota,
        )
        params = copy(self._child_params)
        params.extra_args = {wire.CHILD: named}
        request = Request(
            request_id=f"{self._id_prefix}{self._num_made}",
            prompt_token_ids=[*prefix, *self._padded(content.token_ids)],
            sampling_params=params,
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
        if segment.behind_first:
            # What its parent may not see, it does.
            layout = Layout(self._block_size, (replace(first, hidden=False),), first.num_blocks)
            self._announce(request, layout)
            lazy = LazyRequest(request, layout, parent.chains[:1], parent.contents[:1], is_child=True, num_preamble=1)
        chain = content.chain
        child = Child(
            request.request_id,
            named["key"][:NAME_DIGITS],
            chain.hashes[-1],
            chain.hashes,
            len(prefix) // self._block_size,
        )
        return child, request, lazy

    def _padded(self, token_ids: Sequence[int]) -> list[int]:
        return [*token_ids, *[self._pad] * (-len(token_ids) % self._block_size)]

    def _parts(
        self, token_ids: Sequence[int], asked: wire.WireRequest, namespace: str
    ) -> tuple[Sequence[int], Sequence[list[int]], Sequence[str]]:
        """A client's prompt as literals, tokens of each segment's chunk, and their names; a sink's first of all."""
        try:
            sink = [self._contents.add(pack(asked.sink), namespace)] if asked.sink else []
            # All before any is looked up: the names of a request may be more than what is kept.
            sent = dict(self._contents.add(data, namespace) for data in asked.contents.values())
        except ValueError as error:
            raise InputError("The tokens of a segment are not valid:", why=f"{error}.") from None
        literals: Sequence[int] = token_ids
        if asked.names is None:
            check_spans(asked.spans, asked.prefix_len, len(token_ids))
            literals, contents = take_apart(token_ids, asked.spans, asked.prefix_len)
            names = [name_of(pack(content), namespace) for content in contents]  # vLLM has checked them
        else:
            names = list(asked.names)
            found = {name: sent.get(name) or self._contents.get(name) for name in names}
            contents = [tokens for name in names if (tokens := found[name]) is not None]
        if len(contents) < len(names):
            raise UnknownContentError(
                f"The engine does not know the tokens of {len(names) - len(contents)} segments.",
                fix="Send the request again with them (lazyrag_contents).",
            )
        return literals, [*(tokens for _, tokens in sink), *contents], [*(name for name, _ in sink), *names]

    def _apply(
        self,
        request: Request,
        layout: Layout,
        token_ids: list[int],
        names: Sequence[str],
        contents: Sequence[Sequence[int]],
    ) -> LazyRequest:
        """Give a client's request its layout: physical prompt, hashes, and what the worker needs."""
        request.prompt_token_ids, request.num_prompt_tokens = token_ids, len(token_ids)
        request._all_token_ids[:] = token_ids
        self._announce(request, layout)
        request.block_hashes.clear()
        keys = self._keys(request)
        chains: list[Chain] = []
        found: list[Content] = []
        for segment, name, tokens in zip(layout.segments, names, contents, strict=True):
            behind = chains[0].hashes[-1] if segment.behind_first else None
            whole = self._chain(keys, name, tokens, behind)
            first = segment.offset // self._block_size
            part = slice(first, first + segment.num_blocks)
            chains.append(self._part(whole, part, (keys, name, behind)))
            found.append(Content(tokens, whole))
            request.block_hashes += chains[-1].hashes
        request._block_hasher = self._hasher(layout)
        request.update_block_hashes()
        return LazyRequest(request, layout, tuple(chains), tuple(found))

    def _chain(self, keys: ExtraKeys, name: str, token_ids: Sequence[int], behind: BlockHash | None) -> Chain:
        """The blocks of a whole chunk."""
        return self._chains.get(
            (keys, name, behind),
            lambda: chunk_hashes(
                token_ids,
                block_size=self._block_size,
                pad=self._pad,
                keys=keys,
                hash_block=self._hash_block,
                behind=behind,
            ),
        )

    def _part(self, whole: Chain, part: slice, key: tuple[object, ...]) -> Chain:
        """Some blocks of a chunk."""
        if part == slice(0, len(whole.hashes)):
            return whole
        return self._chains.get((*key, part.start, part.stop), lambda: whole.hashes[part])

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
        # Children need no more: a chunk stands in its parent's prompt as a whole, and the preamble or sink in front.
        need = -(-end // self._block_size)
        if need > self._num_blocks:
            raise CapacityError(
                f"The request needs {need} KV blocks of {self._block_size} tokens, the engine has {self._num_blocks}.",
                fix="Give the engine more KV memory, ask for fewer tokens, or send fewer or shorter chunks.",
            )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`additional_config["lazyrag"]`: whether invariants are checked after every step."""

    debug: bool = False


def engine_settings(vllm_config: VllmConfig) -> EngineSettings:
    """Read `additional_config["lazyrag"]`.

    Raises:
        InputError: an unknown key.
    """
    given = (vllm_config.additional_config or {}).get("lazyrag", {})
    unknown = sorted(set(given) - {"debug"})
    if unknown:
        raise InputError(f"additional_config['lazyrag'] has unknown keys: {', '.join(unknown)}.", fix="Known: debug.")
    return EngineSettings(**given)


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
