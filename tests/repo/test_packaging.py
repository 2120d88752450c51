"""The wheel holds the whole package and nothing else, and works without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FOLDERS = ("backend", "kernels", "retrievers", "integrations")


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of what git tracks or would track: no leftovers of this checkout get in."""
    if not (root / ".git").exists():
        pytest.skip("not a git checkout: there is no list of the files that belong to the project")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    copy = tmp_path_factory.mktemp("copy")
    for name in listed.stdout.decode().split("\0"):
        source = root / name
        if name and not name.startswith("tests/") and os.path.lexists(source):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy / name, follow_symlinks=False)
    out = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check", "--outdir", str(out)],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_puts_one_name_into_site_packages(unpacked: Path) -> None:
    assert {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")} == {"lazyrag"}
    (top_level,) = unpacked.glob("*.dist-info/top_level.txt")
    assert top_level.read_text().split() == ["lazyrag"]


def test_the_wheel_holds_every_module_and_no_other(unpacked: Path, modules: dict[str, Path]) -> None:
    expected = {
        name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")
        for name, path in modules.items()
    }
    assert {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*.py")} == expected


def test_the_wheel_is_marked_as_typed_and_licensed(unpacked: Path) -> None:
    assert (unpacked / "lazyrag" / "py.typed").is_file()
    assert list(unpacked.glob("*.dist-info/licenses/LICENSE"))


def test_the_wheel_announces_command_and_plugin(unpacked: Path) -> None:
    (entry_points,) = unpacked.glob("*.dist-info/entry_points.txt")
    text = entry_points.read_text()
    assert "[console_scripts]\nlazyrag = lazyrag.cli:main" in text
    assert "[vllm.general_plugins]\nlazyrag = lazyrag.backend.plugin:register" in text


def test_the_command_runs_from_the_wheel_alone(unpacked: Path, tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(unpacked)!r}); sys.argv = ['lazyrag', '--version']\n"
        "import lazyrag.cli, lazyrag.backend.layout\n"
        f"assert lazyrag.backend.layout.__file__.startswith({str(unpacked)!r}), lazyrag.backend.layout.__file__\n"
        "lazyrag.cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lazyrag ")


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_package_reaches_its_folders_by_relative_links(folder: str, root: Path) -> None:
    link = root / "lazyrag" / folder
    assert link.is_symlink(), (
        "this checkout lost its symbolic links (git config core.symlinks true, and check out again)"
    )
    assert Path(os.readlink(link)) == Path("..") / folder


def test_the_kernels_folder_is_no_importable_package_at_the_root(root: Path) -> None:
    # With an __init__.py it would hide the PyPI package `kernels` from everything started at the root.
    assert not (root / "kernels" / "__init__.py").exists()


def test_no_module_is_loaded_twice_under_a_folders_bare_name(root: Path) -> None:
    twice = [
        name
        for name, module in sys.modules.items()
        if name.split(".")[0] in FOLDERS and str(getattr(module, "__file__", None) or "").startswith(str(root))
    ]
    assert twice == []
