"""The worker's half of the tiers: copies chunks between the KV cache, host memory and disk, beside the model.

    load    disk -> host memory (a reader's thread) -> blocks       or        host memory -> blocks
    fetch   disk -> host memory
    save    blocks -> host memory -> disk (the writer's thread)

All that a device does is submitted by the engine's own thread and runs on streams of its own (`Lanes`), behind all
that was submitted before it and beside all that comes later: a layer after the other, so that a copy over the bus
overlaps with the scattering of the layer before it. Nobody waits for a copy but those that it is for: `poll` looks what
has ended. Without a device's streams (on a CPU) each copy has ended when it was submitted; the rest is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from lazyrag.backend.tiers.disk import DiskTier, Form
from lazyrag.backend.tiers.host import HostMemory
from lazyrag.backend.tiers.policy import READERS
from lazyrag.backend.tiers.transfers import COPIED, DONE, Progress, Transfer, Transfers
from lazyrag.errors import StoreError
from lazyrag.types import DISK, HOST

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint8: "U8",
}
"""Of the cache tensor, by safetensors' names."""

WORD = torch.int64
"""What is copied at a time; a row of K and V is a whole number of them."""
MOST_UNWRITTEN_BYTES = 1 << 30
"""Saves that wait for the disk; whoever adds to more waits, too."""
MOST_BURST_BYTES = 1 << 30
"""Read from disk, after which their speed is reported even though more is being read."""
NAP_S = 2e-4
"""When the engine has nothing else to do: for how long to leave the interpreter to the threads."""

Ended: TypeAlias = Callable[[], float | None]
"""Seconds that a copy took, None if it has not ended."""


class Lanes:
    """Streams of a device beside the one that computes; none on a CPU.

    Args:
        device: of the KV cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[Any] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]

    @contextmanager
    def copying(self) -> Iterator[_Copying]:
        """Submit copies; they run behind all that was submitted before."""
        copying = _Copying(self._device, self._streams)
        yield copying
        copying.close()


class _Copying:
    """Copies that are being submitted. Layers take turns on the streams: one is scattered while the next is copied."""

    def __init__(self, device: torch.device, streams: list[Any]) -> None:
        self._streams = streams
        self._start = time.perf_counter()
        self._events: list[Any] = []
        self._seconds: float | None = None
        if streams:
            compute = torch.cuda.current_stream(device)
            for stream in streams:
                stream.wait_stream(compute)
            self._events.append(streams[0].record_event(_event()))

    @contextmanager
    def layer(self, number: int) -> Iterator[None]:
        """What is submitted inside belongs to this layer."""
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[number % len(self._streams)]):
            yield

    def close(self) -> None:
        """All has been submitted."""
        self._seconds = time.perf_counter() - self._start
        for stream in self._streams:
            self._events.append(stream.record_event(_event()))

    def ended(self) -> float | None:
        """See `Ended`."""
        if not self._streams:
            return self._seconds
        if not all(event.query() for event in self._events):
            return None
        start, *ends = self._events
        return max(float(start.elapsed_time(end)) for end in ends) / 1e3


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _Copy:
    """A copy between blocks and host memory that was submitted.

    Attributes:
        kept: what it uses and nobody else refers to.
    """

    transfer: Transfer
    buffer: torch.Tensor
    ended: Ended
    kept: Any


class Mover:
    """Does what `Transfers` say. For the engine's own thread.

    Args:
        caches: the cache tensor of each layer.
        block_size: tokens of a block, as the scheduler counts.
        disk: None if there is none.
        host_bytes: of host memory, 0 for none.
    """

    def __init__(
        self, caches: Mapping[str, torch.Tensor], block_size: int, disk: DiskTier | None, host_bytes: int
    ) -> None:
        self._caches, self._block_size, self._disk = caches, block_size, disk
        cache = next(iter(caches.values()))
        self._device = cache.device
        self._rows = [token_rows(cache).view(WORD) for cache in caches.values()]
        self._dtype = DTYPES[cache.dtype]
        self._row = token_rows(cache).shape[2:]
        self._memory = HostMemory(host_bytes, self._device)
        self._lanes = Lanes(self._device)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="lazyrag-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="lazyrag-write")
        self._reading: list[tuple[Transfer, torch.Tensor, Future[None]]] = []
        self._burst_s, self._burst_bytes = 0.0, 0
        """Since when the readers are busy, or were last reported, and what they have read since."""
        self._loading: list[_Copy] = []
        self._saving: list[_Copy] = []
        self._writing: list[tuple[Transfer, int, Future[bool]]] = []
        self._progress = Progress()
        self._arrived: set[str] = set()
        self._unreadable: set[int] = set()

    @property
    def is_busy(self) -> bool:
        """Something is under way."""
        return bool(self._reading or self._loading or self._saving or self._writing)

    # ------------------------------------------------------------ begin

    @torch.inference_mode()
    def read(self, transfers: Transfers) -> None:
        """Begin what touches no block: reads from disk."""
        for offset, num_bytes in transfers.clears:
            self._memory.at(offset, num_bytes).zero_()
        if transfers.pinned is not None and self._disk is not None:
            self._disk.pinned = transfers.pinned
        for transfer in (*transfers.loads, *transfers.fetches):
            if transfer.from_host:
                continue
            form = self._form(transfer)
            buffer = self._buffer(transfer, form)
            if not self._reading:
                self._burst_s, self._burst_bytes = time.perf_counter(), 0
            self._reading.append((transfer, buffer, self._readers.submit(self._read, transfer, form, buffer)))

    @torch.inference_mode()
    def begin(self, transfers: Transfers) -> None:
        """Begin the rest but the saves, which must wait for the step's forward pass to be submitted."""
        if transfers.wipes:
            self._wipe(transfers.wipes)
        for load in transfers.loads:
            if load.from_host:
                form = self._form(load)
                self._copy_in(load, form, self._buffer(load, form))

    @torch.inference_mode()
    def save(self, saves: list[Transfer]) -> None:
        """Begin saves; the forward pass that computes the chunks has been submitted."""
        for save in saves:
            form = self._form(save)
            self._copy_out(save, form, self._buffer(save, form))
        while sum(size for _, size, _ in self._writing) > MOST_UNWRITTEN_BYTES:
            wait([future for _, _, future in self._writing[:1]])
            self.poll()

    def _wipe(self, block_ids: list[int]) -> None:
        slots = torch.tensor(block_ids)[:, None] * self._block_size + torch.arange(self._block_size)
        places = self._on_device(*self._split(slots.flatten()))
        for rows in self._rows:
            rows[places] = 0

    def _read(self, transfer: Transfer, form: Form, buffer: torch.Tensor) -> None:
        """In a reader's thread: the file's content, verified."""
        assert self._disk is not None
        self._disk.load(transfer.key, form, namespace=transfer.namespace, out=buffer.numpy())

    def _copy_in(self, load: Transfer, form: Form, buffer: torch.Tensor) -> None:
        places = self._places(load)
        with self._lanes.copying() as copying:
            for number, (rows, layer) in enumerate(zip(self._rows, self._layers(form, buffer), strict=True)):
                with copying.layer(number):
                    rows[places] = layer[load.first_token :].to(self._device, non_blocking=True)
        self._loading.append(_Copy(load, buffer, copying.ended, places))

    def _copy_out(self, save: Transfer, form: Form, buffer: torch.Tensor) -> None:
        places = self._places(save)
        with self._lanes.copying() as copying:
            for number, (rows, layer) in enumerate(zip(self._rows, self._layers(form, buffer), strict=True)):
                with copying.layer(number):
                    layer.copy_(rows[places], non_blocking=True)
        self._saving.append(_Copy(save, buffer, copying.ended, places))

    # ------------------------------------------------------------ end

    @torch.inference_mode()
    def poll(self, *, is_idle: bool = False) -> None:
        """See what has ended, and go on with it.

        Args:
            is_idle: the engine computes nothing now.
        """
        if is_idle and self.is_busy:
            time.sleep(NAP_S)
        self._end_reads()
        self._end_loads()
        self._end_saves()
        self._end_writes()

    def take_arrived(self) -> set[str]:
        """The children whose loads have ended since the last call, well or not."""
        arrived, self._arrived = self._arrived, set()
        return arrived

    def take_progress(self) -> Progress | None:
        """What has been done since the last call, None if nothing."""
        progress, self._progress = self._progress, Progress()
        return progress if progress.steps or progress.loaded else None

    def take_unreadable(self) -> set[int]:
        """The blocks of the loads that failed since the last call."""
        unreadable, self._unreadable = self._unreadable, set()
        return unreadable

    def close(self) -> None:
        """Wait until what was saved is on disk, and nothing is under way; the threads end."""
        self._readers.shutdown(cancel_futures=True)
        self._reading.clear()  # there is nobody to load it for
        while self.is_busy:
            self.poll(is_idle=True)
        self._writer.shutdown()
        self._memory.close()

    def _end_reads(self) -> None:
        for transfer, buffer, future in _ended(self._reading):
            form = self._form(transfer)
            try:
                future.result()
            except StoreError:
                self._end_load(transfer, is_well=False)
                continue
            self._burst_bytes += form.num_bytes
            if transfer.request_id:
                self._copy_in(transfer, form, buffer)
            else:
                self._end_load(transfer, is_well=True)
        # Of all readers together: how long one file took says little, for the others took their share meanwhile.
        if self._burst_bytes and (not self._reading or self._burst_bytes >= MOST_BURST_BYTES):
            now = time.perf_counter()
            self._progress.loaded.append((DISK, self._burst_bytes, now - self._burst_s))
            self._burst_s, self._burst_bytes = now, 0

    def _end_loads(self) -> None:
        for copy in [copy for copy in self._loading if copy.ended() is not None]:
            self._loading.remove(copy)
            seconds = copy.ended()
            assert seconds is not None
            num_bytes = self._form(copy.transfer).num_bytes
            self._progress.loaded.append((HOST, num_bytes, seconds))
            self._end_load(copy.transfer, is_well=True)

    def _end_load(self, load: Transfer, *, is_well: bool) -> None:
        self._progress.steps.append((load.job, DONE, is_well))
        if load.request_id:
            self._arrived.add(load.request_id)
            if not is_well:
                self._unreadable.update(load.block_ids)

    def _end_saves(self) -> None:
        for copy in [copy for copy in self._saving if copy.ended() is not None]:
            self._saving.remove(copy)
            save = copy.transfer
            self._progress.steps.append((save.job, COPIED, True))
            if save.to_disk:
                form = self._form(save)
                future = self._writer.submit(self._write, save, form, copy.buffer)
                self._writing.append((save, form.num_bytes, future))
            else:
                self._progress.steps.append((save.job, DONE, True))

    def _write(self, save: Transfer, form: Form, buffer: torch.Tensor) -> bool:
        """In the writer's thread."""
        assert self._disk is not None
        return self._disk.save(save.key, form, buffer.numpy(), namespace=save.namespace, quota=save.quota)

    def _end_writes(self) -> None:
        for save, _, future in _ended(self._writing):
            self._progress.steps.append((save.job, DONE, future.result()))

    # ------------------------------------------------------------ shapes

    def _form(self, transfer: Transfer) -> Form:
        heads, row = self._row
        return Form(tuple(self._caches), self._dtype, (transfer.num_tokens, heads, row))

    def _buffer(self, transfer: Transfer, form: Form) -> torch.Tensor:
        if transfer.offset is None:
            return self._memory.temporary(form.num_bytes)
        return self._memory.at(transfer.offset, form.num_bytes)

    def _layers(self, form: Form, buffer: torch.Tensor) -> torch.Tensor:
        """A chunk's bytes as [layers, tokens, heads, words of a row]."""
        tokens, heads, _ = form.shape
        return buffer.view(WORD).view(len(form.layers), tokens, heads, -1)

    def _places(self, transfer: Transfer) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and offset in a cache tensor of each token that is moved, both [tokens], on the device."""
        tokens = torch.arange(transfer.num_tokens - transfer.first_token)
        blocks = torch.tensor(transfer.block_ids)
        slots = blocks[tokens // self._block_size] * self._block_size + tokens % self._block_size
        return self._on_device(*self._split(slots))

    def _split(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots as the cache tensor counts, whose blocks may be smaller: an attention backend may split them."""
        size = self._rows[0].shape[1]
        return slots // size, slots % size

    def _on_device(self, blocks: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._device.type == "cpu":
            return blocks, offsets
        both = torch.stack((blocks, offsets)).pin_memory().to(self._device, non_blocking=True)
        return both[0], both[1]


def token_rows(cache: torch.Tensor) -> torch.Tensor:
    """A layer's cache, [blocks, heads, tokens of a block, row], as [blocks, tokens of a block, heads, row].

    A row is K and V of one token and head side by side, in the attention backend's order. This is the layout of vLLM's
    FlashAttention and Triton backends and of our CPU one. (vLLM's own CPU backend mixes the tokens of a block.)
    """
    return cache.transpose(1, 2)


def _ended(under_way: list[Any]) -> list[Any]:
    """Take those out of a list whose future, their last item, is done."""
    are_done = [item[-1].done() for item in under_way]
    ended = [item for item, is_done in zip(under_way, are_done, strict=True) if is_done]
    under_way[:] = [item for item, is_done in zip(under_way, are_done, strict=True) if not is_done]
    return ended
