"""Are the tests sharp? Breaks the code in the ways that corrupt silently, one at a time, and runs the engine tests.

    python tests/engine/mutations.py [NAME ...]

Each mutation is made in a copy of the repository, in a temporary folder; the tests must fail there. About half a minute
each; not part of the test suite. Exits with an error if a mutation survives, or no longer applies to the code.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).parents[2]
TESTS = ["tests/engine/test_lazy.py", "-k", "sync and not async"]
FROM_DISK = ["tests/engine/test_from_disk.py"]
PLANNER = ["tests/unit/test_plan.py"]


class Mutation(NamedTuple):
    """Replaces text in a file; `old` must occur exactly once."""

    file: str
    old: str
    new: str


ATTENTION = "backend/plugin/attention_cpu.py"
CONNECTOR = "backend/tiers/connector.py"
HASHING = "backend/hashing.py"
LAYOUT = "backend/layout.py"
METADATA = "backend/plugin/metadata.py"
PLAN = "lazyrag/plan.py"
REQUESTS = "backend/plugin/requests.py"
SDPA = "kernels/sdpa.py"

MUTATIONS = {
    "positions not overridden": [Mutation(ATTENTION, "if any(layouts):", "if not layouts:")],
    "queries not turned back": [Mutation(SDPA, "if any(shifts):", "if not shifts:")],
    "visibility ignored": [
        Mutation(METADATA, "if s.visible_from < suffix_len:", "if s.visible_from < 10**9:"),
        Mutation(METADATA, "max(0, s.visible_from - first)", "0"),
    ],
    "pads attended to": [Mutation(METADATA, "s.num_tokens, s.shift", "s.num_blocks * block_size, s.shift")],
    "short tiles not masked": [
        Mutation(SDPA, "[:, None, None] if ragged else None", "[:, None, None] if not shifts else None")
    ],
    "base of chunks behind a preamble or a sink ignored": [
        Mutation(LAYOUT, "shift=run.chunk_start - (first_len if behind_first else 0)", "shift=run.chunk_start"),
        Mutation(LAYOUT, "base = s.offset + (self.segments[0].num_tokens if s.behind_first else 0)", "base = s.offset"),
    ],
    "sinks visible": [
        Mutation("backend/wire.py", "s.shift] for s in layout.visible]", "s.shift] for s in layout.segments]")
    ],
    "children do not see the sink": [Mutation(REQUESTS, "replace(first, hidden=False)", "first")],
    "sink not hashed": [
        Mutation(REQUESTS, "behind = chains[0].hashes[-1] if segment.behind_first else None", "behind = None")
    ],
    "sink not in the key on disk": [
        Mutation(REQUESTS, "chunk_key(content.token_ids, prefix=behind,", "chunk_key(content.token_ids, prefix=(),")
    ],
    "sink ignored for KV on disk": [
        Mutation(
            CONNECTOR,
            'start = (child["first_token"] + first_token) // self._block_size',
            "start = first_token // self._block_size",
        ),
        Mutation(
            CONNECTOR,
            'end = (child["first_token"] + self._padded(child["num_tokens"])) // self._block_size',
            'end = self._padded(child["num_tokens"]) // self._block_size',
        ),
    ],
    "planner ignores first_k": [Mutation(PLAN, "head = min(mode.first_k, num_tokens)", "head = 0")],
    "planner recomputes what differs least": [Mutation(PLAN, "(-score(start), start)", "(score(start), start)")],
    "planner recomputes what first_k computes": [
        Mutation(PLAN, "[start for start in starts if start >= head]", "list(starts)")
    ],
    "a part of a chunk takes the chunk's first blocks": [
        Mutation(REQUESTS, "first = segment.offset // self._block_size", "first = 0")
    ],
    "tokens computed in place counted as if they were reused": [
        Mutation(
            "backend/plugin/positions.py",
            "return np.asarray(suffix + self._before[seen])",
            "return suffix + self._before[-1]",
        )
    ],
    "salt dropped": [
        Mutation("backend/plugin/requests.py", "return ExtraKeys(first, rest)", "return ExtraKeys()"),
        Mutation("backend/plugin/requests.py", "cache_salt=stock.cache_salt,", "cache_salt=None,"),
    ],
    "visible segments not hashed": [Mutation(HASHING, "extra += tuple(", "extra += () and tuple(")],
    "length of visible segments not hashed": [
        Mutation(HASHING, "s.visible_from - start, s.num_tokens, s.last_hash", "s.visible_from - start, s.last_hash")
    ],
    "place of visible segments not hashed": [
        Mutation(HASHING, "s.visible_from - start, s.num_tokens, s.last_hash", "s.num_tokens, s.last_hash")
    ],
    "ordinary chain continued behind a padded segment": [
        Mutation(HASHING, "num_valid is not None and num_valid < start + block_size", "num_valid == -1")
    ],
}


def apply(root: Path, mutation: Mutation) -> None:
    path = root / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        sys.exit(
            f"{mutation.old!r} is in {mutation.file} {text.count(mutation.old)} times: bring the mutation up to date."
        )
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def copy_of_repo(folder: str) -> Path:
    root = Path(folder) / "repo"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (REPO / name).is_symlink() or (REPO / name).is_file():
            shutil.copy2(REPO / name, target, follow_symlinks=False)
    return root


def run_tests(root: Path, tests: list[str]) -> tuple[int, int, str]:
    """Number of failed and passed tests, and the last line of the report."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *tests],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]
    count = {what: int(number) for number, what in re.findall(r"(\d+) (failed|error|passed)", last)}
    return count.get("failed", 0) + count.get("error", 0), count.get("passed", 0), last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutations to make; all if none is given")
    names = parser.parse_args().names or ["none", *MUTATIONS]
    survivors = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            root = copy_of_repo(folder)
            for mutation in MUTATIONS.get(name, []):
                apply(root, mutation)
            tests = FROM_DISK if "disk" in name else PLANNER if name.startswith("planner") else TESTS
            failed, passed, last = run_tests(root, tests)
        print(f"{name:50s} {failed:3d} of {failed + passed} tests fail", flush=True)
        if bool(failed) != (name in MUTATIONS) or not failed + passed:
            survivors.append(f"{name}: {last}")
    sys.exit("\n".join(survivors) or 0)


if __name__ == "__main__":
    main()
