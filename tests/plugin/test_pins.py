"""Pins are references on resident blocks, and the budget lets requests in as far as all of them fit."""

from __future__ import annotations

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from lazyrag.backend.plugin.chains import Chain, Chains
from lazyrag.backend.plugin.pins import Budget, Pins


@pytest.fixture
def pool():
    return BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=4)


def fill(pool, *names):
    """Blocks in use that hold these hashes."""
    blocks = pool.get_new_blocks(len(names))
    for name, block in zip(names, blocks, strict=True):
        pool._insert_block_hash(make_block_hash_with_group_id(name, 0), block, num_tokens=4)
    return blocks


def test_a_pinned_block_is_not_evicted_and_a_released_one_is_free(pool):
    pins, blocks = Pins(pool), fill(pool, b"a", b"b")
    pool.free_blocks(blocks)
    assert Chain([b"a", b"x", b"b"]).look_up(pool) == [blocks[0], None, None], "what is behind a gap is computed anew"
    pins.hold("r", blocks)
    pins.check([])
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    assert not {block.block_id for block in taken} & {block.block_id for block in blocks}
    pins.check([taken])
    pins.release("r")
    pins.release("r")
    pins.check([taken])
    assert pool.get_num_free_blocks() == 2
    assert Chain([b"a"]).look_up(pool) == [blocks[0]]


def test_a_chain_remembers_its_blocks_until_one_is_evicted(pool, monkeypatch):
    blocks = fill(pool, b"a", b"b")
    chain = Chain([b"a", b"b"])
    assert chain.look_up(pool) == blocks
    with monkeypatch.context() as patch:
        patch.setattr(pool, "get_cached_block", None)
        assert chain.look_up(pool) == blocks
    pool.free_blocks(blocks)
    assert chain.look_up(pool) == blocks
    pool.evict_blocks({blocks[1].block_id})
    assert chain.look_up(pool) == [blocks[0], None]
    assert chain.look_up(pool) == [blocks[0], None]
    pool._insert_block_hash(make_block_hash_with_group_id(b"b", 0), blocks[1], num_tokens=4)
    assert chain.look_up(pool) == blocks


def test_chains_are_made_once_and_the_least_used_are_forgotten():
    chains, made = Chains(most_blocks=3), []

    def get(name):
        return chains.get(name, lambda: made.append(name) or [name, name])

    assert get(b"a") is get(b"a")
    get(b"b")
    get(b"a")
    assert made == [b"a", b"b", b"a"]


def test_a_block_may_be_pinned_many_times(pool):
    pins, (block,) = Pins(pool), fill(pool, b"a")
    pins.hold("r", [block, block])
    pins.hold("s", [block])
    pins.check([[block]])
    assert block.ref_cnt == 4
    pins.release("s")
    assert block.ref_cnt == 3
    pins.release_all()
    pins.check([[block]])
    assert block.ref_cnt == 1


def test_check_sees_a_leaked_and_a_stolen_reference(pool):
    pins, (block,) = Pins(pool), fill(pool, b"a")
    with pytest.raises(AssertionError, match="references"):
        pins.check([])
    pool.free_blocks([block])
    with pytest.raises(AssertionError, match="references"):
        pins.check([[block]])
    pins.check([])


def test_check_sees_a_lost_block(pool):
    pins = Pins(pool)
    pool.free_block_queue.popleft()
    with pytest.raises(AssertionError, match="lost"):
        pins.check([])


def test_check_sees_a_hash_without_entry(pool):
    pins, (block,) = Pins(pool), fill(pool, b"a")
    pool.cached_block_hash_to_block.pop(block.block_hash, block.block_id)
    with pytest.raises(AssertionError, match="under no hash"):
        pins.check([[block]])


def test_budget_counts_what_is_new_once(pool):
    used, idle = fill(pool, b"a")[0], fill(pool, b"b")[0]
    pool.free_blocks([idle])
    budget = Budget(6)
    assert budget.take([used, idle, idle], [b"x", b"y"], 2)
    assert budget.left == 1
    assert budget.take([used], [b"x", b"y"], 1)
    assert budget.left == 0
    assert budget.take([used], [b"y"], 0)


def test_budget_takes_nothing_of_what_does_not_fit(pool):
    budget = Budget(3)
    assert not budget.take([], [b"x", b"y"], 2)
    assert budget.left == 3
    assert budget.take([], [b"x", b"y"], 1)
    assert not Budget(-1).take([], [], 0)
