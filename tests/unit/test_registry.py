import pytest

from lazyrag.errors import ConfigError
from lazyrag.registry import Registry


def make():
    registry = Registry("animal")
    registry.register("owl", "eule")(lambda: "hoot")
    registry.register("cat")(lambda: "meow")
    return registry


def test_every_name_finds_its_factory():
    registry = make()
    assert registry.get("owl")() == registry.get("eule")() == "hoot"
    assert "cat" in registry
    assert "dog" not in registry


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"There is no animal 'dog'\. Known: cat, eule, owl\."):
        make().get("dog")


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="animal 'owl' is registered twice"):
        make().register("owl")(lambda: "again")
