from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What may take longest starts first, so that no core waits for it at the end."""
    usual = float(config.getini("timeout"))

    def limit(item: pytest.Item) -> float:
        mark = item.get_closest_marker("timeout")
        return usual if mark is None or not mark.args else float(mark.args[0])

    items.sort(key=limit, reverse=True)
