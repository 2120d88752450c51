"""The tests of this folder pass on the Python of every supported vLLM, not only on that of the installed one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lazyrag.backend.plugin import compat

ROOT = Path(__file__).parents[2]
OTHERS = sorted(set(compat.TESTED_VERSIONS) - {compat.vllm_version()})


def run(version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / f".vllm-{version}"), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("version", OTHERS)
def test_the_scheduler_tests_pass_on_another_vllm(version, record_property):
    if not (ROOT / f".vllm-{version}").is_dir():
        pytest.skip(f"vLLM {version} is not here; run: python tests/plugin/fetch_vllm.py")
    imported = run(version, "-c", "import vllm.v1.core.sched.scheduler; print(vllm.__version__)")
    if imported.returncode:
        pytest.skip(f"vLLM {version} cannot be imported here: {imported.stderr.strip().splitlines()[-1]}")
    assert imported.stdout.split()[-1].startswith(version)
    # Warnings of another version's own code are nobody's errors here.
    tests = run(
        version,
        "-m",
        "pytest",
        "tests/plugin",
        f"--ignore={__file__}",
        "-q",
        "-rs",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
    )
    assert tests.returncode == 0, tests.stdout[-4000:] + tests.stderr[-2000:]
    summary = tests.stdout.strip().splitlines()[-1]
    record_property("summary", summary)
    print(f"vLLM {version}: {summary}")
    assert int(re.search(r"(\d+) passed", summary)[1]) > 100
    assert "skipped" not in summary, tests.stdout[-2000:]
