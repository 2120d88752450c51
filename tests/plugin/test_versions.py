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
TESTS = """
import sys, pytest, vllm.v1.core.sched.scheduler
print("running on", vllm.__version__, flush=True)
sys.exit(pytest.main())
"""


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("version", OTHERS)
def test_the_scheduler_tests_pass_on_another_vllm(version, record_property):
    folder = ROOT / f".vllm-{version}"
    if not folder.is_dir():
        pytest.skip(f"vLLM {version} is not here; run: python tests/plugin/fetch_vllm.py")
    environment = {**os.environ, "PYTHONPATH": str(folder), "VLLM_LOGGING_LEVEL": "ERROR"}
    # Warnings of another version's own code are nobody's errors here.
    options = [f"--ignore={__file__}", "-q", "-rs", "-W", "default", "-p", "no:cacheprovider"]
    tests = subprocess.run(
        [sys.executable, "-c", TESTS, "tests/plugin", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    running_on = re.search(r"(?m)^running on (.+)$", tests.stdout)
    if running_on is None:
        pytest.skip(f"vLLM {version} cannot be imported here: {tests.stderr.strip().splitlines()[-1]}")
    assert running_on[1].startswith(version)
    assert tests.returncode == 0, tests.stdout[-4000:] + tests.stderr[-2000:]
    summary = tests.stdout.strip().splitlines()[-1]
    record_property("summary", summary)
    print(f"vLLM {version}: {summary}")
    assert int(re.search(r"(\d+) passed", summary)[1]) > 100
    assert "skipped" not in summary, tests.stdout[-2000:]
