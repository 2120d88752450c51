"""Pads, free blocks and fresh memory hold NaN, and no answer changes by a bit."""

import pytest
import torch
from engines import Config, Text
from oracle import Prompt, Use

CONFIG = Config("poisoned", worker="poison.PoisonedWorker")
pytestmark = pytest.mark.parametrize(
    "engine", [CONFIG, Config("poisoned-budget-48", worker=CONFIG.worker, budget=48)], ids=str, indirect=True
)


def free_blocks(engine):
    """Blocks that nobody uses and that hold nothing that could be found."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    return torch.tensor([b.block_id for b in pool.blocks if b.ref_cnt == 0 and b.block_hash is None and not b.is_null])


@pytest.mark.parametrize(("kind", "length"), [("prefix", 0), ("prefix", 19), ("sink", 4)])
def test_poison_is_never_read(engine, kind, length):
    text = Text(3 + length)
    a, b, c, one = Use(text(37)), Use(text(64)), Use(text(5)), Use(text(1))
    behind, question = {kind: text(length)}, text(21)
    ordinary = Prompt([text(45)])
    rounds = [
        [Prompt([text(11), a, text(5), b, c, question], **behind)],
        [Prompt([c, text(1), a, text(3), a, one, question], **behind), ordinary],
        [Prompt([one, b, text(2)], **behind), Prompt([a, c, text(30)], **behind), Prompt([text(3)])],
        [Prompt([text(2) + a.chunk[:16], Use(a.chunk, offset=16), text(4)], **behind)],
        [Prompt([text(2), Use(b.chunk, 0, 16, whole=True), b.chunk[16:48], Use(b.chunk, 48), question], **behind)],
    ]
    for prompts in rounds:
        engine.worker.poison_blocks(free_blocks(engine))
        engine.check(*prompts, max_tokens=20)


def test_the_poison_is_there(engine):
    """The hook works: a chunk's pad holds NaN, its tokens do not, and block 0, which stands for no block, holds NaN."""
    text = Text(5)
    before = set(free_blocks(engine).tolist())
    engine.check(Prompt([Use(text(5)), text(3)]), max_tokens=1)
    used = sorted(before - set(free_blocks(engine).tolist()))
    assert used
    cache = engine.worker.caches[0]
    assert cache[0].isnan().all()
    # The chunk's one block is found by its hash; the suffix fills none.
    (block,) = used
    assert not cache[block][:, :5].isnan().any()
    assert cache[block][:, 5:].isnan().all()
