from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyrag.backend.contents import Contents, Sender, name_of, pack, unpack

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(tokens)
def test_tokens_survive_the_way(token_ids):
    assert unpack(pack(token_ids)).tolist() == token_ids


@pytest.mark.parametrize("data", [b"123", pack([3]) + b"\0", (-1).to_bytes(4, "little", signed=True)])
def test_what_is_no_tokens_is_refused(data):
    with pytest.raises(ValueError, match=r"negative|multiple"):
        unpack(data)


@given(st.lists(tokens, max_size=8))
def test_an_engine_knows_under_a_name_what_was_sent_and_nothing_else(runs):
    contents = Contents(2**31)
    added = [contents.add(pack(run)) for run in runs]
    assert added == [(name_of(pack(run)), run) for run in runs]
    names = [name for name, _ in added]
    assert [contents.get(name) for name in names] == runs
    assert contents.get("another") is None


def test_tokens_that_the_model_does_not_have_are_not_kept():
    contents = Contents(100)
    contents.add(pack([99]))
    with pytest.raises(ValueError, match="token id 100 is out of vocabulary"):
        contents.add(pack([3, 100]))
    assert contents.get(name_of(pack([3, 100]))) is None


@pytest.mark.parametrize("tokens", [[2**31], [1.5], [None], ["a"]])
def test_what_cannot_be_a_token_is_not_packed(tokens):
    with pytest.raises(ValueError, match="no whole number"):
        pack(tokens)


def test_the_least_used_contents_are_forgotten():
    contents = Contents(100, most_tokens=5)
    (a, _), (b, _) = contents.add(pack([1, 2])), contents.add(pack([3, 4]))
    assert contents.get(a) == [1, 2]
    c, _ = contents.add(pack([5, 6]))
    assert (contents.get(b), contents.get(a), contents.get(c)) == (None, [1, 2], [5, 6])
    long, _ = contents.add(pack(range(9)))
    assert contents.get(long) == list(range(9))
    assert contents.get(c) is None


def test_tokens_are_sent_once():
    sender = Sender()
    names, sent = sender.names([("a", [1, 2]), ("b", [3])])
    assert sent == {names[0]: pack([1, 2]), names[1]: pack([3])}
    again, more = sender.names([("b", [3]), ("a", [1, 2]), ("c", [1, 2])])
    assert again == [names[1], names[0], names[0]]
    assert set(more) == {names[0]}, "another identity"
    assert sender.names([("a", [1, 2])]) == ([names[0]], {})
    assert sender.names([("a", [1, 2])], everything=True) == ([names[0]], {names[0]: pack([1, 2])})


def test_the_same_identity_with_other_tokens_is_another_run():
    sender = Sender()
    (first,), _ = sender.names([("a", [1, 2])])
    (other,), sent = sender.names([("a", [1, 3])])
    assert other != first
    assert sent == {other: pack([1, 3])}
    (shorter,), sent = sender.names([("a", [1])])
    assert sent == {shorter: pack([1])}


def test_what_was_sent_long_ago_is_sent_again():
    sender = Sender(most_tokens=3)
    sender.names([("a", [1, 2])])
    sender.names([("b", [3, 4])])
    assert sender.names([("b", [3, 4])])[1] == {}
    assert sender.names([("a", [1, 2])])[1]


def test_what_one_tenant_has_sent_is_sent_again_for_another():
    """A request that is shorter, or taken sooner, would tell that another tenant has the same text."""
    sender, engine, tokens = Sender(), Contents(10), list(range(9))
    names = []
    for namespace in ("", "a", "b"):
        (name,), sent = sender.names([("chunk", tokens)], namespace=namespace)
        assert engine.get(name) is None
        assert engine.add(sent[name], namespace) == (name, tokens)
        assert sender.names([("chunk", tokens)], namespace=namespace) == ([name], {})
        names.append(name)
    assert len(set(names)) == 3
