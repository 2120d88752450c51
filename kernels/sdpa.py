"""Attention over segments on a CPU, from PyTorch's own flash attention.

The newest tokens of a request (its queries) attend to *runs*: tokens that lie in the cache already, each run at its own
shift. A request without segments has one run, its own past, at shift 0. Runs are cut into tiles; tiles of similar
length are attended to in one call, by queries turned back by the tile's shift; the parts merge by log-sum-exp:

    o = sum_i w_i o_i,    w = softmax_i(lse_i)

Several queries see each other causally, from the keys at hand. A single one needs no mask: it is stored first, so its
own past includes it, and all requests that decode are one group.

A `Plan` holds every index that a step needs; all layers share it. A tile that is shorter than its neighbours is filled
up with one of its own tokens, masked: no pad, free block or uninitialised memory is ever read.

Sizes: T queries, R rows, V tiles of N tokens, D head size, H key heads, G query heads to a key head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lazyrag.kernels.checks import check_attention, check_shape
from lazyrag.kernels.rope import Rope

TILE, LONG_TILE = 256, 1024
"""Most tokens in a tile for one query, and for several. One query is cheap, so tiles of all its runs share a call, and
short ones waste less there; several queries make a merge cost more than a call."""

FULL = 0.75
"""Tiles for several queries share a call only if the shortest fills this part of the longest."""

MAX_COPIES = 8192
"""Most queries in a call, each counted once for every tile: they are copied."""

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The first `num_tokens` tokens of some blocks.

    Attributes:
        blocks: indices into the cache.
        shift: true position minus the position at which the keys were rotated.
        first_query: the first of the row's queries that sees the run.
    """

    blocks: Indices
    num_tokens: int
    shift: int = 0
    first_query: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Queries [start, start + num_queries) of the batch and the runs that they see.

    The runs hold no token of the row's own queries if it has several, and the token itself if it has one.
    """

    start: int
    num_queries: int
    runs: Sequence[Run]


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Tiles that are attended to in one call.

    Attributes:
        lines: where keys and values lie in the cache seen as [num_blocks * H * block_size, 2 * D]; [V * H * N].
        mask: 0 or -inf, [V, 1, 1, N]; None if all tiles are full.
        row: the row of the group that each tile belongs to, [V].
        part: each tile's line in the merge table, [V].
        turn: cos and sin of R(-shift), [V, 1, 1, 1, D]; None if no tile is shifted.
        first_query: queries before it see none of the tiles.
        hidden: the later queries that do not see a tile, [V, 1, 1, T - first_query]; None if all see all.
    """

    lines: Tensor
    mask: Tensor | None
    row: Tensor
    part: Tensor
    turn: tuple[Tensor, Tensor] | None
    first_query: int
    hidden: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Rows that are attended to together: all that decode, or one that prefills.

    Attributes:
        tokens: the queries' places in the batch, [R * T].
        num_rows: R.
        num_queries: T. If there are several, they see each other, and that part has line 0 of the merge table.
        num_parts: lines of the merge table for each row.
    """

    tokens: Tensor
    num_rows: int
    num_queries: int
    num_parts: int
    tiles: tuple[Tiles, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step: where new keys and values go, and what is attended to.

    Attributes:
        num_tokens: tokens of the batch; what lies behind them in query, key and value is not read.
        stored: the new tokens' lines in the cache seen as [num_blocks * H * block_size, 2 * D], [num_stored * H].
        storing: the tokens that are stored, [num_stored]; None if all are.
    """

    num_tokens: int
    stored: Tensor
    storing: Tensor | None
    groups: tuple[Group, ...]


# ---------------------------------------------------------------- once a step


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    run: Run
    begin: int
    num_tokens: int
    row: int
    part: int


def make_plan(
    rows: Sequence[Row],
    slots: Indices,
    *,
    num_kv_heads: int,
    block_size: int,
    rope: Rope | None,
    dtype: torch.dtype,
) -> Plan:
    """Plan a step.

    Args:
        rows: the batch.
        slots: each token's place in the cache, block * block_size + offset; negative: it has none. [num_tokens].
        num_kv_heads: H.
        block_size: tokens a block.
        rope: the model's rotations; may be None if no run is shifted.
        dtype: of the queries.
    """
    place = _Places(num_kv_heads, block_size)
    keep = slots >= 0
    decoding = [row for row in rows if row.num_queries == 1]
    groups = [_group(decoding, place, rope, dtype)] if decoding else []
    groups += [_group([row], place, rope, dtype) for row in rows if row.num_queries > 1]
    return Plan(
        num_tokens=len(slots),
        stored=torch.from_numpy(place.of_slots(slots[keep]).ravel()),
        storing=None if keep.all() else torch.from_numpy(np.flatnonzero(keep)),
        groups=tuple(groups),
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Places of tokens in the cache seen as [num_blocks * H * block_size, 2 * D]."""

    num_kv_heads: int
    block_size: int

    def of_slots(self, slots: Indices) -> Indices:
        """[..., tokens] -> [..., tokens, H]."""
        block, offset = np.divmod(slots, self.block_size)
        heads = np.arange(self.num_kv_heads) * self.block_size
        lines: Indices = (block * (self.num_kv_heads * self.block_size) + offset)[..., None] + heads
        return lines

    def of_tile(self, tile: _Tile) -> Indices:
        """Slots of a tile's tokens, [num_tokens]."""
        token = np.arange(tile.begin, tile.begin + tile.num_tokens)
        return np.asarray(tile.run.blocks[token // self.block_size] * self.block_size + token % self.block_size)


def _group(rows: Sequence[Row], place: _Places, rope: Rope | None, dtype: torch.dtype) -> Group:
    num_queries = rows[0].num_queries
    causal = num_queries > 1
    most = LONG_TILE if causal else TILE
    cut = [[(run, begin) for run in row.runs for begin in range(0, run.num_tokens, most)] for row in rows]
    num_parts = causal + max(map(len, cut))
    tiles = [
        _Tile(run, begin, min(most, run.num_tokens - begin), r, r * num_parts + causal + p)
        for r, parts in enumerate(cut)
        for p, (run, begin) in enumerate(parts)
    ]
    tokens = np.concatenate([np.arange(row.start, row.start + num_queries) for row in rows])
    return Group(
        tokens=torch.from_numpy(tokens),
        num_rows=len(rows),
        num_queries=num_queries,
        num_parts=num_parts,
        tiles=tuple(
            _tiles(some, num_queries, place, rope, dtype)
            for some in _alike(tiles, FULL if causal else 0.0, max(1, MAX_COPIES // num_queries))
        ),
    )


def _alike(tiles: Sequence[_Tile], full: float, most: int) -> Iterator[list[_Tile]]:
    """At most `most` tiles each, which fill at least `full` of the longest of them."""
    some: list[_Tile] = []
    for tile in sorted(tiles, key=lambda t: -t.num_tokens):
        if len(some) == most or (some and tile.num_tokens < full * some[0].num_tokens):
            yield some
            some = []
        some.append(tile)
    if some:
        yield some


def _tiles(tiles: Sequence[_Tile], num_queries: int, place: _Places, rope: Rope | None, dtype: torch.dtype) -> Tiles:
    length = max(t.num_tokens for t in tiles)
    slots = np.empty((len(tiles), length), np.int64)
    for line, tile in zip(slots, tiles, strict=True):
        line[: tile.num_tokens] = place.of_tile(tile)
        line[tile.num_tokens :] = line[0]
    num_tokens = torch.tensor([t.num_tokens for t in tiles])
    ragged = bool((num_tokens < length).any())
    shifts = [t.run.shift for t in tiles]
    first = torch.tensor([t.run.first_query for t in tiles])
    first_query = int(first.min())
    turn = None
    if any(shifts):
        assert rope is not None
        cos, sin = rope.tables([-shift for shift in shifts])
        turn = cos[:, None, None, None], sin[:, None, None, None]
    return Tiles(
        # [V, N, H] -> [V, H, N]
        lines=torch.from_numpy(place.of_slots(slots)).transpose(1, 2).flatten(),
        mask=_minus_inf(torch.arange(length) >= num_tokens[:, None], dtype)[:, None, None] if ragged else None,
        row=torch.tensor([t.row for t in tiles]),
        part=torch.tensor([t.part for t in tiles]),
        turn=turn,
        first_query=first_query,
        hidden=(torch.arange(first_query, num_queries) < first[:, None])[:, None, None]
        if bool((first > first_query).any())
        else None,
    )


def _minus_inf(where: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(where.shape, dtype=dtype).masked_fill_(where, float("-inf"))


# ---------------------------------------------------------------- once a layer


def store(key: Tensor, value: Tensor, kv_cache: Tensor, plan: Plan) -> None:
    """Write the batch's keys and values into the cache.

    Args:
        key: [>= num_tokens, H, D].
        value: [>= num_tokens, H, D].
        kv_cache: [num_blocks, H, block_size, 2 * D], contiguous; a token's key and value lie side by side.
        plan: of this step.
    """
    check_shape("kv_cache", kv_cache, (None, key.shape[1], None, 2 * key.shape[2]))
    both = torch.cat([key[: plan.num_tokens], value[: plan.num_tokens]], -1)
    if plan.storing is not None:
        both = both.index_select(0, plan.storing)
    # Where a line is the key and value of one token and one head.
    kv_cache.view(-1, kv_cache.shape[-1]).index_copy_(0, plan.stored, both.flatten(0, 1))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    output: Tensor,
    *,
    plan: Plan,
    rope: Rope | None,
    scale: float,
) -> None:
    """Attention of a batch, after `store`.

    Args:
        query: [>= num_tokens, H * G, D], rotated at true positions.
        key: the batch's own, [>= num_tokens, H, D].
        value: [>= num_tokens, H, D].
        kv_cache: as in `store`.
        output: as `query`; the first `num_tokens` lines are written.
        plan: of this step.
        rope: as given to `make_plan`.
        scale: of the scores.

    Raises:
        ValueError: the tensors do not fit together.
    """
    check_attention(query, kv_cache, output)
    num_heads, head_size = query.shape[1:]
    num_kv_heads = kv_cache.shape[1]
    lines = kv_cache.view(-1, 2 * head_size)
    for group in plan.groups:
        # [R, T, H, G, D] -> [R, H, G, T, D]
        shape = (group.num_rows, group.num_queries, num_kv_heads, num_heads // num_kv_heads, head_size)
        q = query.index_select(0, group.tokens).view(shape).permute(0, 2, 3, 1, 4).contiguous()
        own = None
        if group.num_queries > 1:
            own = _causal(q, key.index_select(0, group.tokens), value.index_select(0, group.tokens), scale)
        out = _attend_group(q, own, lines, group, rope, scale)
        output.index_copy_(0, group.tokens, out.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_size))


def _attend_group(
    q: Tensor, own: tuple[Tensor, Tensor] | None, lines: Tensor, group: Group, rope: Rope | None, scale: float
) -> Tensor:
    """Queries [R, H, G, T, D] and their attention among themselves, if there are several -> [R, H, G, T, D]."""
    if own is not None and not group.tiles:
        return own[0]
    num_rows, num_kv_heads, gqa, num_queries, _ = q.shape
    lse = torch.full((num_rows * group.num_parts, num_kv_heads, gqa, num_queries), float("-inf"))
    if own is not None:
        lse[0] = own[1][0]
    half_turned = rope.half_turn(q.float()) if rope is not None and any(t.turn for t in group.tiles) else None
    parts = []
    for tiles in group.tiles:
        part, part_lse = _attend_tiles(q, half_turned, lines, tiles, scale)
        lse[..., tiles.first_query :].index_copy_(0, tiles.part, part_lse)
        parts.append(part)
    weight = lse.view(num_rows, group.num_parts, -1).softmax(1).view(lse.shape).unsqueeze(-1)
    out = own[0] * weight[:1] if own is not None else torch.zeros(q.shape)
    for tiles, part in zip(group.tiles, parts, strict=True):
        seen = out[..., tiles.first_query :, :]
        weighted = part * weight[..., tiles.first_query :, :].index_select(0, tiles.part)
        if num_rows == 1:
            seen += weighted.sum(0)
        else:
            seen.index_add_(0, tiles.row, weighted)
    return out.to(q.dtype)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Queries of one row among themselves: q [1, H, G, T, D], k and v [T, H, D] -> [1, H, G, T, D], [1, H, G, T]."""
    # Heads of a group share keys by a stride of 0.
    k, v = (x.transpose(0, 1).unsqueeze(1).expand(q.shape[1:]) for x in (k, v))
    out, lse = _flash(q[0], k, v, scale=scale, causal=True)
    return out[None], lse[None]


def _attend_tiles(
    q: Tensor, half_turned: Tensor | None, lines: Tensor, tiles: Tiles, scale: float
) -> tuple[Tensor, Tensor]:
    """Queries [R, H, G, T, D] -> out [V, H, G, T', D], lse [V, H, G, T'] with T' = T - first_query."""
    num_rows, num_kv_heads, gqa, _, head_size = q.shape
    num_tiles = tiles.row.numel()

    def for_each_tile(x: Tensor) -> Tensor:
        x = x[..., tiles.first_query :, :]
        return x if num_rows == 1 else x.index_select(0, tiles.row)

    turned = for_each_tile(q)
    if tiles.turn is not None:
        assert half_turned is not None
        cos, sin = tiles.turn
        turned = torch.addcmul(turned.float() * cos, for_each_tile(half_turned), sin).to(q.dtype)
    # Heads of a group are more queries of their key head: [V, H, G * T', D]
    turned = turned.expand(num_tiles, -1, -1, -1, -1)
    num_queries = turned.shape[3]
    kv = lines.index_select(0, tiles.lines).view(num_tiles, num_kv_heads, -1, 2 * head_size)
    k, v = kv.split(head_size, -1)
    out, lse = _flash(turned.reshape(num_tiles, num_kv_heads, -1, head_size), k, v, scale=scale, mask=tiles.mask)
    lse = lse.view(num_tiles, num_kv_heads, gqa, num_queries)
    if tiles.hidden is not None:
        lse = lse.masked_fill(tiles.hidden, float("-inf"))
    return out.reshape(num_tiles, num_kv_heads, gqa, num_queries, head_size), lse


def _flash(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[B, heads, T, D] each -> output and, in float32, natural log of the sum of exponentials [B, heads, T]."""
    # scaled_dot_product_attention runs the same kernel but drops the log-sum-exp.
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse
