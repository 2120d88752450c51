import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lazyrag.backend.tiers import disk
from lazyrag.backend.tiers.disk import DamagedFileError, DiskTier, Form, Usage
from lazyrag.errors import ConfigError, StoreError

FINGERPRINT = "0123456789abcdef" * 4
KEY = "c0ffee" * 6
FORM = Form(("model.layers.0.attn", "model.layers.1.attn"), "BF16", (5, 2, 8))


def tensors(seed: int = 0, form: Form = FORM) -> disk.Bytes:
    return np.random.default_rng(seed).integers(0, 256, form.num_bytes, dtype=np.uint8)


def key(number: int) -> str:
    return f"{number:032x}"


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "kv", FINGERPRINT)


@pytest.fixture
def saved(tier: DiskTier) -> Path:
    """The file of a chunk that `tier` has saved."""
    assert tier.save(KEY, FORM, tensors())
    return only_file(tier)


def only_file(tier: DiskTier) -> Path:
    (file,) = tier.root.rglob("*.safetensors")
    return file


def leftovers(tier: DiskTier) -> list[Path]:
    return list(tier.root.rglob(".*.tmp"))


# ---------------------------------------------------------------- whole files


def test_what_was_saved_is_loaded_by_another_process(tier: DiskTier, saved: Path) -> None:
    code = (
        "import sys; from lazyrag.backend.tiers.disk import *;"
        "form = Form(('model.layers.0.attn', 'model.layers.1.attn'), 'BF16', (5, 2, 8));"
        "sys.stdout.buffer.write(DiskTier(sys.argv[1], sys.argv[2]).load(sys.argv[3], form).tobytes())"
    )
    command = [sys.executable, "-c", code, tier.root, FINGERPRINT, KEY]
    for seed in ("0", "1"):  # names of files and folders do not depend on Python's hash seed
        run = subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, check=True)
        assert run.stdout == tensors().tobytes()


def test_a_chunk_file_is_a_safetensors_file(tier: DiskTier) -> None:
    numpy_io = pytest.importorskip("safetensors.numpy")
    form = Form(("a", "b", "c"), "F32", (7, 3, 4))
    tier.save(KEY, form, tensors(form=form))
    arrays = numpy_io.load_file(only_file(tier))
    assert list(arrays) == ["a", "b", "c"]
    assert np.concatenate(list(arrays.values())).tobytes() == tensors(form=form).tobytes()


def test_what_a_file_takes_beside_its_tensors_is_known_before(tier: DiskTier) -> None:
    form = Form(tuple(f"model.layers.{i}.self_attn.attn" for i in range(30)), "BF16", (256, 3, 128))
    assert tier.save(KEY, form, tensors(form=form))
    rest = only_file(tier).stat().st_size - form.num_bytes
    assert rest <= disk.most_header_bytes(30) < 2 * rest


def test_a_chunk_is_saved_once(tier: DiskTier, saved: Path) -> None:
    before = saved.stat()
    assert not tier.save(KEY, FORM, tensors())
    assert saved.stat() == before
    assert tier.counters == {"saved": 1, "saved_bytes": FORM.num_bytes}


def test_a_chunk_that_was_never_saved_is_missing_not_damaged(tier: DiskTier) -> None:
    assert not tier.contains(KEY)
    with pytest.raises(StoreError) as caught:
        tier.load(KEY, FORM)
    assert not isinstance(caught.value, DamagedFileError)
    assert not tier.counters


def test_a_deleted_chunk_is_missing(tier: DiskTier, saved: Path) -> None:
    tier.delete(KEY)
    assert not tier.contains(KEY)
    tier.delete(KEY)


def test_namespaces_and_models_share_nothing(tier: DiskTier, saved: Path) -> None:
    assert not tier.contains(KEY, namespace="tenant")
    assert not DiskTier(tier.root, "f" * 64).contains(KEY)
    assert tier.save(KEY, FORM, tensors(1), namespace="tenant")
    tier.delete(KEY, namespace="tenant")
    assert tier.load(KEY, FORM).tobytes() == tensors().tobytes()


def test_a_chunk_spread_over_ranks_is_there_when_every_rank_has_saved(tmp_path: Path) -> None:
    ranks = [DiskTier(tmp_path, FINGERPRINT, rank=rank, ranks=2) for rank in range(2)]
    assert ranks[0].save(KEY, FORM, tensors(0))
    assert not ranks[0].contains(KEY)
    assert ranks[1].save(KEY, FORM, tensors(1))
    for number, rank in enumerate(ranks):
        assert rank.contains(KEY)
        assert rank.load(KEY, FORM).tobytes() == tensors(number).tobytes()
    assert not DiskTier(tmp_path, FINGERPRINT).contains(KEY)
    ranks[0].delete(KEY)
    assert ranks[1].usage() == Usage(0, 0)


@pytest.mark.parametrize(
    "arguments",
    [{"budget_bytes": 0}, {"budget_bytes": -1}, {"fingerprint": "../../etc"}, {"root": "/dev/null/kv"}],
    ids=["no budget", "negative budget", "no fingerprint", "root under a file"],
)
def test_a_store_that_cannot_be_is_refused(tmp_path: Path, arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        DiskTier(**{"root": tmp_path, "fingerprint": FINGERPRINT, **arguments})


# ---------------------------------------------------------------- damage


def assert_refused(tier: DiskTier, file: Path, caplog: pytest.LogCaptureFixture) -> str:
    """The damaged file is never loaded, reported once, removed, and the chunk can be saved again."""
    caplog.clear()
    damaged = tier.counters["damaged"]
    with pytest.raises(DamagedFileError) as caught:
        tier.load(KEY, FORM)
    assert not file.exists()
    assert not tier.contains(KEY)
    assert len(caplog.records) == 1
    assert tier.counters["damaged"] == damaged + 1
    assert tier.save(KEY, FORM, tensors())
    assert tier.load(KEY, FORM).tobytes() == tensors().tobytes()
    return str(caught.value)


def test_a_flipped_bit_anywhere_is_found(tier: DiskTier, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = saved.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        saved.write_bytes(damaged)
        assert_refused(tier, saved, caplog)


def test_a_truncated_file_is_found_at_look_up(tier: DiskTier, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = saved.read_bytes()
    for length in range(len(whole)):
        saved.write_bytes(whole[:length])
        assert not tier.contains(KEY)
        saved.write_bytes(whole[:length])
        tier._reported.clear()
        assert_refused(tier, saved, caplog)


def rewritten(header: Callable[[dict], None] = lambda _: None, tail: bytes = b"") -> Callable[[bytes], bytes]:
    """A file with a well-formed header that says something else."""

    def spoil(whole: bytes) -> bytes:
        length = int.from_bytes(whole[:8], "little")
        entries = json.loads(whole[8 : 8 + length])
        header(entries)
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + whole[8 + length :] + tail

    return spoil


def says(**metadata: object) -> Callable[[bytes], bytes]:
    return rewritten(lambda entries: entries["__metadata__"].update(metadata))


DAMAGES = {
    "another version": (says(format="lazyrag-kv-0"), "another format"),
    "another model": (says(fingerprint="f" * 64), "another model"),
    "another chunk": (says(key="f" * 32), "another chunk"),
    "another checksum": (says(checksum="00000000"), "checksum"),
    "a checksum of no kind": (says(checksum=None), "header is damaged"),
    "no metadata": (rewritten(lambda entries: entries.pop("__metadata__")), "header is damaged"),
    "no tensors": (rewritten(lambda entries: [entries.pop(layer) for layer in FORM.layers]), "header is damaged"),
    "another order": (
        rewritten(lambda entries: entries.update({"x": entries.pop(FORM.layers[0])})),
        "header is damaged",
    ),
    "unknown dtype": (rewritten(lambda entries: entries[FORM.layers[0]].update(dtype="F64")), "header is damaged"),
    "shape of words": (
        rewritten(lambda entries: entries[FORM.layers[0]].update(shape=["5", 2, 8])),
        "header is damaged",
    ),
    "shape too short": (rewritten(lambda entries: entries[FORM.layers[0]].update(shape=[80])), "header is damaged"),
    "longer": (rewritten(tail=b"x"), "bytes instead of"),
    "twice": (lambda whole: whole + whole, "bytes instead of"),
    "zeros": (lambda whole: bytes(len(whole)), "header is damaged"),
    "zeros at the end": (lambda whole: whole[:-64] + bytes(64), "checksum"),
    "a header of 2 EiB": (lambda whole: b"\xff" * 8 + whole[8:], "header is too long"),
    "not JSON": (lambda whole: whole[:8] + b"\xff" + whole[9:], "header is damaged"),
    "nested": (lambda whole: (100_000).to_bytes(8, "little") + b"[" * 100_000, "header is damaged"),
}


@pytest.mark.parametrize(("spoil", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_the_report_says_what_is_wrong(
    tier: DiskTier, saved: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[bytes], bytes], reason: str
) -> None:
    saved.write_bytes(spoil(saved.read_bytes()))
    assert reason in assert_refused(tier, saved, caplog)
    assert reason in caplog.text


@pytest.mark.parametrize(
    "form",
    [
        Form(FORM.layers, "BF16", (4, 2, 8)),
        Form(FORM.layers, "BF16", (5, 1, 16)),
        Form(FORM.layers, "F16", (5, 2, 8)),
        Form(FORM.layers[:1], "BF16", (10, 2, 8)),
        Form(("other", "names"), "BF16", (5, 2, 8)),
    ],
    ids=["tokens", "heads", "dtype", "layers", "names"],
)
def test_a_whole_file_of_another_form_is_refused(
    tier: DiskTier, saved: Path, caplog: pytest.LogCaptureFixture, form: Form
) -> None:
    assert saved.unlink() is None
    tier.save(KEY, form, tensors(form=form))
    assert "this engine has" in assert_refused(tier, saved, caplog)


def test_a_chunk_copied_to_another_ones_name_is_refused(
    tier: DiskTier, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier.save(key(1), FORM, tensors(1))
    (other,) = tier.root.rglob(f"{key(1)}.safetensors")
    saved.write_bytes(other.read_bytes())
    assert "another chunk" in assert_refused(tier, saved, caplog)


def test_reports_hold_no_content(tier: DiskTier, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = "the patient's name"
    saved.write_bytes(says(format=secret, secret=secret)(saved.read_bytes()) + secret.encode())
    assert secret not in assert_refused(tier, saved, caplog) + caplog.text


def test_a_file_that_cannot_be_removed_is_reported_once(
    tier: DiskTier, saved: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved.write_bytes(b"")
    monkeypatch.setattr(Path, "unlink", failing(errno.EROFS))
    assert not any(tier.contains(KEY) for _ in range(3))
    assert len(caplog.records) == 1


# ---------------------------------------------------------------- failing disks


def failing(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir", "write"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_full_or_broken_disk_is_reported_once_and_leaves_nothing(
    tier: DiskTier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    with monkeypatch.context() as broken:
        if call == "fsync":
            broken.setattr(os, "fsync", failing(code))
        elif call == "write":
            stock = Path.open
            broken.setattr(Full, "code", code)
            broken.setattr(
                Path, "open", lambda path, mode, **how: Full(path, mode) if "x" in mode else stock(path, mode, **how)
            )
        else:
            broken.setattr(Path, call, failing(code))
        assert not any(tier.save(key(number), FORM, tensors()) for number in range(3))
    assert [os.strerror(code) in record.message for record in caplog.records] == [True]
    assert not leftovers(tier)
    assert tier.usage() == Usage(0, 0)
    assert tier.save(KEY, FORM, tensors())
    assert tier.load(KEY, FORM).tobytes() == tensors().tobytes()


class Full(io.FileIO):
    """A file on a disk that takes half of what it is given, and then nothing."""

    code = errno.ENOSPC

    def write(self, part: memoryview) -> int:
        if self.tell():
            failing(self.code)()
        return super().write(part[: len(part) // 2])


def test_a_file_that_cannot_be_read_counts_as_damaged(
    tier: DiskTier, saved: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(disk, "_read_exactly", failing(errno.EIO))
        with pytest.raises(DamagedFileError, match="Input/output error"):
            tier.load(KEY, FORM)
    assert not saved.exists()
    assert len(caplog.records) == 1


def test_a_limit_on_file_size_ends_a_save_not_the_process(tmp_path: Path) -> None:
    """A real refusal of the operating system in the middle of a write, not an injected one."""
    code = (
        "import resource, signal, sys; from lazyrag.backend.tiers.disk import *;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000));"
        "form = Form(('a',), 'F32', (1000, 10, 100)); data = np.zeros(form.num_bytes, np.uint8);"
        "tier = DiskTier(sys.argv[1], 'ab' * 32);"
        "assert not tier.save('aa', form, data) and not tier.contains('aa')"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert "File too large" in run.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# ---------------------------------------------------------------- crashes and company

WRITER = """
import itertools, sys
from lazyrag.backend.tiers.disk import *
form = Form(("a", "b"), "F32", (64, 8, 64))
tier = DiskTier(sys.argv[1], "0123456789abcdef" * 4)
print("ready", flush=True)
for number in itertools.count():
    name = f"{number:032x}"
    tier.save(name, form, np.full(form.num_bytes, number % 256, np.uint8))
    print(name, flush=True)
"""
WRITER_FORM = Form(("a", "b"), "F32", (64, 8, 64))


def start_writer(root: Path) -> subprocess.Popen[str]:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, root], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


def test_a_killed_writer_leaves_whole_files_only_and_loses_none_it_acknowledged(tmp_path: Path) -> None:
    moments = random.Random(0)
    interrupted = 0
    for run in range(12):
        tier = DiskTier(tmp_path / str(run), FINGERPRINT)
        writer = start_writer(tier.root)
        time.sleep(moments.uniform(0, 0.05))
        writer.send_signal(signal.SIGKILL)
        acknowledged = writer.communicate()[0].split()
        found = {path.stem for path in tier.root.rglob("*.safetensors")}
        assert found >= set(acknowledged)
        for name in found:
            assert set(tier.load(name, WRITER_FORM)) == {int(name, 16) % 256}
        interrupted += len(leftovers(tier))
        tier.sweep()
        assert not leftovers(tier)
        assert {path.stem for path in tier.root.rglob("*.safetensors")} == found
        assert tier.save(key(2**64 + run), WRITER_FORM, tensors(form=WRITER_FORM))
    assert interrupted, "no writer was killed while it wrote"


def test_two_writers_share_a_store(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, FINGERPRINT)
    writers = [start_writer(tmp_path) for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None
        for number in range(20):
            assert writer.stdout.readline() == f"{key(number)}\n"
    for number in range(20):
        assert set(tier.load(key(number), WRITER_FORM)) == {number}
    tier.sweep()  # while both still write: it takes nothing from them
    for writer in writers:
        assert writer.stdout is not None
        for number in range(20, 40):
            assert writer.stdout.readline() == f"{key(number)}\n"
        writer.kill()
        writer.communicate()
    assert tier.counters["damaged"] == 0


@pytest.mark.parametrize(
    ("name", "age_s", "stays"),
    [
        (f".{disk._host()}-{os.getpid()}-00.tmp", 0, True),
        (f".{disk._host()}-{2**22 + 1}-00.tmp", 0, False),
        (".0badf00d-1-00.tmp", 0, True),
        (".0badf00d-1-00.tmp", disk.STALE_S + 60, False),
        (f".{disk._host()}-x.tmp", 0, True),
    ],
    ids=["a live process's", "a dead process's", "another host's", "another host's of yesterday", "a stranger's"],
)
def test_sweep_removes_what_nobody_writes_to(tier: DiskTier, saved: Path, name: str, age_s: float, stays: bool) -> None:
    leftover = saved.parent / name
    leftover.touch()
    os.utime(leftover, (time.time() - age_s,) * 2)
    tier.sweep()
    assert leftover.exists() == stays
    assert saved.exists()


# ---------------------------------------------------------------- budget


def with_room_for(chunks: float, root: Path) -> DiskTier:
    probe = DiskTier(root / "probe", FINGERPRINT)
    probe.save(KEY, FORM, tensors())
    return DiskTier(root / "kv", FINGERPRINT, int(chunks * probe.usage().num_bytes))


def test_the_chunks_used_longest_ago_go_first(tmp_path: Path) -> None:
    tier = with_room_for(4, tmp_path)
    for number in range(4):
        tier.save(key(number), FORM, tensors(number))
        (file,) = tier.root.rglob(f"{key(number)}.safetensors")
        os.utime(file, (number, number))
    tier.load(key(0), FORM)
    tier.save(key(4), FORM, tensors(4))
    kept = [number for number in range(5) if tier.contains(key(number))]
    assert kept == [0, 3, 4]
    assert tier.counters["evicted"] == 2


def test_a_store_never_exceeds_its_budget(tmp_path: Path) -> None:
    tier = with_room_for(5.5, tmp_path)
    assert tier.budget_bytes is not None
    for number in range(40):
        assert tier.save(key(number), FORM, tensors(number))
        assert tier.usage().num_bytes <= tier.budget_bytes
    assert tier.usage().num_files >= 4


def test_files_of_other_processes_models_and_namespaces_count(tmp_path: Path) -> None:
    tier = with_room_for(3, tmp_path)
    tier.save(key(0), FORM, tensors())
    other = DiskTier(tier.root, "f" * 64)
    for number in range(3):
        other.save(key(number), FORM, tensors(), namespace=str(number))
    for number in range(1, 4):
        tier.save(key(number), FORM, tensors())
    tier.sweep()
    assert tier.usage().num_bytes <= tier.budget_bytes


def test_a_smaller_budget_holds_from_the_next_start(tier: DiskTier, tmp_path: Path) -> None:
    for number in range(10):
        tier.save(key(number), FORM, tensors())
    smaller = DiskTier(tier.root, FINGERPRINT, tier.usage().num_bytes // 2)
    smaller.sweep()
    assert 0 < smaller.usage().num_files <= 5


def test_a_chunk_larger_than_the_budget_evicts_nothing(tmp_path: Path) -> None:
    tier = with_room_for(1.5, tmp_path)
    tier.save(KEY, FORM, tensors())
    large = Form(FORM.layers, "F32", (50, 2, 8))
    assert not tier.save(key(1), large, tensors(form=large))
    assert tier.contains(KEY)


def test_files_that_are_not_chunks_are_never_evicted(tmp_path: Path) -> None:
    tier = with_room_for(1, tmp_path)
    foreign = [tier.root / "model.safetensors", tier.root / "a/b/c/model.safetensors"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10_000))
    for number in range(3):
        tier.save(key(number), FORM, tensors())
    assert all(path.exists() for path in foreign)
    assert tier.usage().num_files == 1


# ---------------------------------------------------------------- quotas of namespaces


def test_a_namespace_keeps_to_its_quota_whatever_others_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path / "kv", FINGERPRINT)
    assert tier.save(key(0), FORM, tensors(), namespace="mine")
    size = tier.usage().num_bytes
    other_model = DiskTier(tmp_path / "kv", "f" * 64)
    assert other_model.save(key(0), FORM, tensors(), namespace="mine"), "counts, too"
    written = [tier.save(key(n), FORM, tensors(n), namespace="mine", quota=4 * size) for n in range(1, 6)]
    assert written == [True, True, False, False, False]
    assert tier.counters["over_quota"] == 3
    assert all(tier.save(key(n), FORM, tensors(n), namespace="theirs", quota=4 * size) for n in range(4))
    assert tier.save(key(5), FORM, tensors(), namespace="mine"), "no quota"
    (said,) = caplog.messages
    assert "quota" in said
    assert "mine" not in said


def test_what_others_delete_makes_room_in_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LOOK_SHARE", 0)
    tier, other = (DiskTier(tmp_path / "kv", FINGERPRINT) for _ in range(2))
    assert tier.save(key(0), FORM, tensors())
    size = tier.usage().num_bytes
    assert not tier.save(key(1), FORM, tensors(), quota=size)
    other.delete(key(0))
    assert tier.save(key(1), FORM, tensors(), quota=size)


def test_forgotten_names_are_removed_and_nothing_else(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", FINGERPRINT, ranks=2)
    other_rank = DiskTier(tmp_path / "kv", FINGERPRINT, rank=1, ranks=2)
    names = ["ab" * 32, "ab" * 31 + "cd", "cd" * 32]
    for name in names:
        for context in ("0" * 32, "1" * 32):
            for rank in (tier, other_rank):
                rank.save(name + context, FORM, tensors())
                rank.save(name + context, FORM, tensors(), namespace="theirs")
    folders = tier.forget({names[0], names[2]})
    assert {folder.name for folder in folders} == {"ab", "cd"}
    left = [name for name in names if tier.contains(name + "0" * 32) or tier.contains(name + "1" * 32)]
    assert left == [names[1]]
    assert all(tier.contains(name + "1" * 32, namespace="theirs") for name in names)
