"""The benchmark's copying system against the same done in torch."""

from __future__ import annotations


def turned(seed: int) -> tuple[float, bool]:
    import torch

    from lazyrag.kernels.copy import copy_turned
    from lazyrag.kernels.plan import turn_table
    from lazyrag.kernels.rope import Rope

    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rope = Rope(10_000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32), 32)
    cache = torch.randn(20, 16, 3, 64, device=device).transpose(1, 2)
    before = cache.clone()
    sources, targets, shifts = [2, 3, 11, 7], [0, 19, 5, 6], [0, 5, 5, 900]
    as_tensor = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=device)  # noqa: E731
    turns = turn_table(rope, range(1000)).to(device)
    copy_turned(cache, as_tensor(sources), as_tensor(targets), as_tensor(shifts), turns)
    expected = before.clone()
    cos, sin = (table[:, None, None].to(device) for table in rope.tables(shifts))
    expected[targets, ..., :32] = rope.rotate(before[sources][..., :32], cos, sin)
    expected[targets, ..., 32:] = before[sources][..., 32:]
    others = [page for page in range(20) if page not in targets]
    return float((cache - expected).abs().max()), torch.equal(cache[others], before[others])


def test_copied_pages_hold_turned_keys_and_the_same_values_and_no_other_page_changes(interpreted):
    for seed in range(3):
        error, untouched = interpreted(turned, seed)
        assert error < 1e-5
        assert untouched
