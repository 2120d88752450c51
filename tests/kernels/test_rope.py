import pytest
import torch
from torch.testing import assert_close

from lazyrag.kernels import reference
from lazyrag.kernels.rope import Rope

STYLES = pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
WIDTHS = pytest.mark.parametrize("rotary_dim", [32, 24, 2], ids=["whole", "partial", "one-pair"])


def rope(rotary_dim: int, neox: bool) -> Rope:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return Rope(10000.0**-exponents, 32, neox)


@STYLES
@WIDTHS
@pytest.mark.parametrize("shift", [0, 1, -37, 20_000, -131_072])
def test_rotation_agrees_with_complex_multiplication(rotary_dim, neox, shift):
    r = rope(rotary_dim, neox)
    x = torch.randn(5, 3, 32)
    cos, sin = r.tables([shift])
    assert_close(r.rotate(x, cos, sin), reference.rotate(x, shift, r.inv_freq, neox=neox), rtol=0, atol=1e-6)


@STYLES
@WIDTHS
def test_two_rotations_are_one_by_the_sum(rotary_dim, neox):
    r = rope(rotary_dim, neox)
    x = torch.randn(4, 2, 32)
    cos, sin = r.tables([300, -4321, 300 - 4321])
    twice = r.rotate(r.rotate(x, cos[0], sin[0]), cos[1], sin[1])
    assert_close(twice, r.rotate(x, cos[2], sin[2]), rtol=0, atol=2e-6)


@STYLES
@WIDTHS
def test_a_turned_query_sees_a_stored_key_as_if_the_key_had_moved(rotary_dim, neox):
    """(R(t) q) . (R(p + s) k) = (R(-s) R(t) q) . (R(p) k), the identity that everything rests on."""
    r = rope(rotary_dim, neox)
    q, k = torch.randn(1, 1, 32), torch.randn(1, 1, 32)
    t, p, s = 911, 17, 640

    def at(x, position):
        return reference.rotate(x, position, r.inv_freq, neox=neox)

    cos, sin = r.tables([-s])
    assert_close((r.rotate(at(q, t), cos, sin) * at(k, p)).sum(), (at(q, t) * at(k, p + s)).sum(), rtol=0, atol=1e-5)


def test_shift_zero_changes_no_bit():
    r = rope(24, neox=True)
    x = torch.randn(7, 3, 32)
    assert torch.equal(r.rotate(x, *r.tables([0])), x)


@STYLES
def test_a_rotation_keeps_lengths(neox):
    x = torch.randn(6, 2, 32)
    turned = rope(24, neox).rotate(x, *rope(24, neox).tables([12345]))
    assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[..., 24:], x[..., 24:])


@pytest.mark.parametrize(
    ("inv_freq", "message"),
    [
        (torch.ones(4), "must be float64"),
        (torch.ones(17, dtype=torch.float64), "34 dimensions are to be rotated, the head has 32"),
        (torch.ones(0, dtype=torch.float64), "0 dimensions"),
    ],
)
def test_impossible_frequencies_are_refused(inv_freq, message):
    with pytest.raises(ValueError, match=message):
        Rope(inv_freq, 32)
