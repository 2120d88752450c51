import pytest
import torch
from torch.testing import assert_close

from lazyrag.kernels import reference
from lazyrag.kernels.reference import KeyRun

INV_FREQ = 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)


def at(x, start):
    return reference.rotate(x, torch.arange(start, start + x.shape[0]), INV_FREQ)


def test_segments_computed_elsewhere_equal_one_ordinary_attention():
    """A, literal, B, literal: unrotated q, k, v rotated at true positions in one pass with the block mask."""
    torch.manual_seed(0)
    n = {"A": 5, "lit": 3, "B": 4, "question": 2}
    total = sum(n.values())
    q, k, v = torch.randn(total, 4, 16), torch.randn(total, 2, 16), torch.randn(total, 2, 16)
    owner = torch.tensor([0] * 5 + [-1] * 3 + [1] * 4 + [-1] * 2)
    literal = owner == -1

    i = torch.arange(total)
    mask = (i[None] <= i[:, None]) & (literal[:, None] | (owner[None] == owner[:, None]))
    plain = torch.nn.functional.scaled_dot_product_attention(
        at(q, 0).transpose(0, 1), at(k, 0).transpose(0, 1), v.transpose(0, 1), mask, scale=0.25, enable_gqa=True
    ).transpose(0, 1)

    a, b = slice(0, 5), slice(8, 12)
    segments = [KeyRun(at(k[a], 0), v[a], 0, 0), KeyRun(at(k[b], 0), v[b], 8, 3)]
    lazy = reference.suffix_attention(
        at(q, 0)[literal], segments, at(k, 0)[literal], v[literal], scale=0.25, inv_freq=INV_FREQ
    )
    assert_close(lazy, plain[literal])


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_parts_merge_to_the_whole(cut):
    torch.manual_seed(1)
    scores, v = torch.randn(3, 2, 10), torch.randn(10, 2, 8)
    whole = torch.einsum("thk,khd->thd", scores.softmax(-1), v)
    parts = [
        torch.einsum("thk,khd->thd", s.softmax(-1), x)
        for s, x in ((scores[..., :cut], v[:cut]), (scores[..., cut:], v[cut:]))
    ]
    lses = [scores[..., :cut].logsumexp(-1), scores[..., cut:].logsumexp(-1)]
    assert_close(reference.merge(parts, lses), whole)
    nothing = torch.full_like(lses[0], float("-inf"))
    assert_close(reference.merge([whole, torch.ones_like(whole)], [lses[0], nothing]), whole)


def test_gather_reads_no_pad():
    cache = torch.full((6, 2, 4, 6), float("nan"))
    blocks = torch.tensor([4, 1])
    tokens = torch.randn(7, 2, 6)
    for i in range(7):
        cache[blocks[i // 4], :, i % 4] = tokens[i]
    k, v = reference.gather(cache, blocks, 7)
    assert torch.equal(torch.cat([k, v], -1), tokens)
