import sys

import pytest

from lazyrag.errors import LazyRAGError, MissingExtraError
from lazyrag.optional import need


def test_an_installed_module_is_returned():
    assert need("json.decoder", extra="none") is sys.modules["json.decoder"]


def test_a_missing_package_names_the_extra_that_brings_it():
    with pytest.raises(MissingExtraError, match=r"nosuchpackage is not installed\. pip install 'lazyrag\[pdf\]'") as e:
        need("nosuchpackage.part", extra="pdf")
    assert isinstance(e.value, ImportError)
    assert isinstance(e.value, LazyRAGError)


def test_a_package_that_is_there_but_broken_keeps_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "brokenpackage.py").write_text("import adependencythatismissing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="adependencythatismissing") as e:
        need("brokenpackage", extra="pdf")
    assert not isinstance(e.value, MissingExtraError)
