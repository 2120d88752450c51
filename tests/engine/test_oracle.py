"""The two oracles are one function where both have a meaning; without that they would prove nothing."""

import pytest
from engines import Text
from oracle import Prompt, Use
from torch.testing import assert_close


@pytest.mark.parametrize("parts", [[11, "A", 5, "B", 21], ["A", "B", 3], [1, "B", 1, "A", 1, "B", 1], [30]], ids=str)
def test_one_pass_and_spliced_agree_without_a_preamble(tiny_oracle, parts):
    text = Text(1)
    chunks = {"A": Use(text(37)), "B": Use(text(64))}
    prompt = Prompt([chunks[p] if isinstance(p, str) else text(p) for p in parts])
    forced = text(6)
    # This model turns 1e-6 of a hidden state into 1e-4 of a log-probability.
    assert_close(tiny_oracle.spliced(prompt, forced), tiny_oracle.one_pass(prompt, forced), rtol=0, atol=2e-3)


def test_they_agree_behind_a_preamble_only_where_the_chunk_stands_next_to_it(tiny_oracle):
    text = Text(2)
    preamble, chunk, forced = text(19), Use(text(37)), text(6)
    beside, apart = Prompt([chunk, text(9)], preamble), Prompt([text(8), chunk, text(9)], preamble)
    assert_close(tiny_oracle.spliced(beside, forced), tiny_oracle.one_pass(beside, forced), rtol=0, atol=2e-3)
    assert (tiny_oracle.spliced(apart, forced) - tiny_oracle.one_pass(apart, forced)).abs().max() > 0.1
