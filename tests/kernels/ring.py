"""The barriers of the Hopper kernel, run as Python under schedules drawn at random.

The kernel's own functions run, with Gluon replaced by what this file knows of it: shared memory, mbarriers, TMA and
asynchronous wgmma. Numbers do not matter, so arithmetic on tensors gives nothing (`Inert`); pointers into the tables,
and all that is computed of them, are real. Between any two events the next one is drawn among all that may come: a step
of a warpgroup, or the end of a TMA box that is on its way.

A race is a box that lands, or a store, where a product that was begun is still reading; or a product that begins where
another tile lies than it wants, or one that has not landed; or one of a query that has been turned by another line, or
in part. What is not modelled: fences between proxies, and whatever the compiler reorders.
"""

from __future__ import annotations

import inspect
import random
import textwrap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from types import FunctionType, SimpleNamespace
from typing import Any

from lazyrag.kernels import hopper


class Race(AssertionError):
    """Two events that must not meet have met."""


class Deadlock(AssertionError):
    """Nothing can happen any more, and somebody still waits."""


class Inert:
    """A tensor, a layout or a type: anything whose value does not matter here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        return self

    def __getitem__(self, key: Any) -> Inert:
        return self

    def __bool__(self) -> bool:
        return False

    def _with(self, other: Any) -> Inert:
        return other if isinstance(other, Turned) else INERT

    def __neg__(self) -> Inert:
        return self


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor")
for _name in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Inert, f"__{_name}__", lambda self, other: self._with(other))
INERT = Inert()


@dataclass(frozen=True, eq=False)
class Turned(Inert):
    """A line of the table of rotations, and what was turned by it."""

    line: int

    def _with(self, other: Any) -> Inert:
        return self


@dataclass(frozen=True)
class Turns:
    """A pointer into that table, whose lines have `width` numbers."""

    width: int
    offset: int = 0

    def __add__(self, other: Any) -> Any:
        return Turns(self.width, self.offset + other) if isinstance(other, int) else Turned(self.offset // self.width)


class Product(Inert):
    """What a wgmma gives: nothing, before it has been waited for."""

    done = False

    def _with(self, other: Any) -> Inert:
        if not self.done:
            raise Race("a product is used before it is done")
        return INERT


@dataclass(frozen=True)
class Pointer:
    table: Sequence[int]
    offset: int = 0

    def __add__(self, other: Any) -> Any:
        return Pointer(self.table, self.offset + other) if isinstance(other, int) else INERT


@dataclass(frozen=True)
class Description:
    """TMA's view of a tensor."""

    item_bytes: int
    dtype = layout = INERT


@dataclass(eq=False)
class Memory:
    """Shared memory: `shape[0]` boxes.

    Attributes:
        content: of each box, the coordinates that TMA brought it from.
        stored: of each cell of a box, what threads stored there.
    """

    shape: Sequence[int]
    machine: Machine
    dtype: Inert = INERT
    content: dict[int, Any] = field(default_factory=dict)
    stored: dict[tuple[int, int, int], Any] = field(default_factory=dict)

    def index(self, i: int) -> View:
        assert 0 <= i < self.shape[0], "outside of shared memory"
        return View(self, range(i, i + 1))


@dataclass(frozen=True, eq=False)
class View:
    """Some boxes of a buffer, or a rectangle of each."""

    memory: Memory
    boxes: range
    rows: range | None = None
    columns: range | None = None

    dtype = INERT

    @property
    def places(self) -> set[tuple[int, int]]:
        return {(id(self.memory), box) for box in self.boxes}

    @property
    def cells(self) -> set[tuple[int, int, int]]:
        """Of 8 rows and 32 columns."""
        rows, columns = self._rectangle()
        return {(box, row, column) for box in self.boxes for row in rows[::8] for column in columns[::32]}

    def _rectangle(self) -> tuple[range, range]:
        rows, columns = self.memory.shape[-2:]
        return self.rows or range(rows), self.columns or range(columns)

    def slice(self, start: int, length: int, dim: int) -> View:
        rows, columns = self._rectangle()
        part = slice(start, start + length)
        return View(self.memory, self.boxes, *((rows[part], columns) if dim == 0 else (rows, columns[part])))

    def permute(self, order: Any) -> View:
        return self

    def load(self, layout: Any) -> Inert:
        brought = self.memory.machine.read(self)
        return Turned(brought[0][0]) if brought else INERT  # TMA brings lines, but for what products read

    def store(self, value: Any) -> None:
        self.memory.machine.step()
        self.memory.machine.check_not_read(self)
        self.memory.stored.update(dict.fromkeys(self.cells, value))


@dataclass
class Barrier:
    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals than a phase has"
        assert self.bytes >= 0, "more bytes than were announced"
        if self.pending == self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count


@dataclass
class Actor:
    """A warpgroup or the producer's warp.

    Attributes:
        may_go: whether what it waits for has happened.
        products: that are under way, and the places that each of them reads.
        seen: what its products have read, in order: the line that a query was turned by, and from where TMA had brought
            keys and values.
    """

    run: Callable[[], None]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    may_go: Callable[[], bool] = lambda: True
    products: list[tuple[Product, set[tuple[int, int]]]] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    done: bool = False


class Machine:
    """Runs one thread block of the kernel under one schedule."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._back = threading.Semaphore(0)
        self._actor: Actor | None = None
        self._barriers: dict[tuple[int, int], Barrier] = {}
        self._flying: list[tuple[View, tuple[int, ...], Barrier, int]] = []
        self._failure: BaseException | None = None
        self.actors: list[Actor] = []

    # ------------------------------------------------------------ events

    def step(self, may_go: Callable[[], bool] = lambda: True) -> None:
        """Let others go first, until it is this actor's turn again and `may_go` holds."""
        actor = self._actor
        if actor is None:  # before the warps part ways
            return
        actor.may_go = may_go
        self._back.release()
        actor.turn.acquire()
        if self._failure is not None:
            raise SystemExit

    def check_not_read(self, view: View) -> None:
        for actor in self.actors:
            if any(view.places & reads for _, reads in actor.products):
                raise Race("written while a product reads it")

    def copy(self, desc: Description, coordinates: list[int], barrier: View, target: View) -> None:
        """TMA: begins here, lands when the schedule says so."""
        self.step()
        self.check_not_read(target)
        (box,) = target.boxes
        target.memory.content[box] = None
        size = desc.item_bytes * prod(target.memory.shape[1:])
        self._flying.append((target, tuple(coordinates), self._barrier(barrier), size))

    def read(self, view: View) -> list[tuple[int, ...]]:
        """At once: from where TMA brought what lies there; nothing if threads stored it."""
        self.step()
        found = [view.memory.content[box] for box in view.boxes if box in view.memory.content]
        if None in found:
            raise Race("read before it has landed")
        if not found and not view.cells <= view.memory.stored.keys():
            raise Race("read before it has been stored")
        return found

    def multiply(self, a: Any, b: View, acc: Any, use_acc: bool = True, is_async: bool = False) -> Inert:
        brought = self.read(b)
        assert is_async
        assert self._actor is not None
        if isinstance(a, Turned):  # in registers
            self._actor.seen.append(a.line)
        if isinstance(a, View):
            lines = {a.memory.stored[cell].line if cell in a.memory.stored else None for cell in a.cells}
            if len(lines) > 1:
                raise Race("a query is turned in part")
            self._actor.seen += lines
        self._actor.seen.append(brought)
        product = Product()
        self._actor.products.append((product, b.places | (a.places if isinstance(a, View) else set())))
        return product

    def wait_for_products(self, pending: int, deps: Sequence[Any]) -> Any:
        self.step()
        assert self._actor is not None
        while len(self._actor.products) > pending:
            self._actor.products.pop(0)[0].done = True
        (result,) = deps
        return result

    def _barrier(self, view: View) -> Barrier:
        (place,) = view.places
        return self._barriers[place]

    def init(self, view: View, count: int) -> None:
        (place,) = view.places
        self._barriers[place] = Barrier(count, count)

    def expect(self, view: View, num_bytes: int) -> None:
        self.step()
        barrier = self._barrier(view)
        barrier.bytes += num_bytes
        barrier.pending -= 1
        barrier.settle()

    def arrive(self, view: View, count: int) -> None:
        self.step()
        barrier = self._barrier(view)
        barrier.pending -= count
        barrier.settle()

    def wait(self, view: View, phase: int) -> None:
        barrier = self._barrier(view)
        self.step(lambda: barrier.phase != phase)

    # ------------------------------------------------------------ schedule

    def part(self, calls: list[tuple[Callable[..., None], tuple[Any, ...]]], *options: Any) -> None:
        """`gl.warp_specialize`: all of them at once, to their ends."""
        self.actors = [Actor(lambda call=call: call[0](*call[1])) for call in calls]
        threads = [threading.Thread(target=self._live, args=(actor,), daemon=True) for actor in self.actors]
        for thread in threads:
            thread.start()
        paces = self._draw_paces()
        while self._failure is None and not all(actor.done for actor in self.actors):
            able = [actor for actor in self.actors if not actor.done and actor.may_go()]
            if not able and not self._flying:
                self._failure = Deadlock("somebody waits for ever")
                break
            if self._random.random() < 0.01:
                paces = self._draw_paces()
            weights = [*(paces[self.actors.index(actor)] for actor in able), *[paces[-1]] * len(self._flying)]
            (chosen,) = self._random.choices(range(len(weights)), weights)
            if chosen < len(able):
                self._actor = able[chosen]
                self._actor.turn.release()
                self._back.acquire()
            else:
                self._land(chosen - len(able))
        for actor in self.actors:  # after a failure: all threads end
            actor.turn.release()
        for thread in threads:
            thread.join()
        self._actor = None
        if self._failure is not None:
            raise self._failure

    def _draw_paces(self) -> list[float]:
        """Of each actor, and of boxes on their way: some are far slower than others, or late steps were never tried."""
        return [10 ** self._random.uniform(-4, 0) for _ in range(len(self.actors) + 1)]

    def _live(self, actor: Actor) -> None:
        actor.turn.acquire()
        try:
            if self._failure is None:
                actor.run()
        except SystemExit:
            return
        except BaseException as failure:
            self._failure = failure
        actor.done = True
        self._back.release()

    def _land(self, number: int) -> None:
        target, coordinates, barrier, size = self._flying.pop(number)
        try:
            self.check_not_read(target)
            (box,) = target.boxes
            target.memory.content[box] = coordinates
            barrier.bytes -= size
            barrier.settle()
        except AssertionError as failure:
            self._failure = failure


# ---------------------------------------------------------------- the kernel as Python


@dataclass(frozen=True)
class Sizes:
    """Of a variant, and of the slice of work that is walked."""

    stages: int
    raw: bool
    block_m: int
    tile: int = 64
    page: int = 32
    head_size: int = 128
    begin: int = 3
    num_tiles: int = 7


def gluon(machine: Machine) -> SimpleNamespace:
    """What the kernel uses of Gluon's language."""

    def either(one: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **_: one(*args) if all(isinstance(x, int) for x in args) else INERT

    def load(pointer: Any, **_: Any) -> Any:
        if isinstance(pointer, Pointer):
            return pointer.table[pointer.offset]
        return pointer if isinstance(pointer, Turned) else INERT

    def join(a: Any, b: Any) -> Any:
        lines = [x.line if isinstance(x, Turned) else None for x in (a, b)]
        if lines[0] != lines[1]:
            raise Race("a query is turned in part")
        return a

    names = ("arange", "zeros", "full", "max", "min", "sum", "exp2", "store", "float32", "int64")
    layouts = ("NVMMASharedLayout", "NVMMADistributedLayout", "BlockedLayout", "SliceLayout", "DotOperandLayout")
    return SimpleNamespace(
        **dict.fromkeys((*names, *layouts), INERT),
        static_range=range,
        minimum=either(min),
        maximum=either(max),
        where=either(lambda condition, a, b: a if condition else b),
        load=load,
        join=join,
        convert_layout=lambda x, layout: x,
        program_id=lambda axis: 0,
        num_programs=lambda axis: 1,
        allocate_shared_memory=lambda dtype, shape, layout: Memory(shape, machine),
        warp_specialize=machine.part,
    )


def explore(sizes: Sizes, schedules: int, change: tuple[str, str, str] | None = None) -> None:
    """Run one slice under so many schedules; arguments and errors as of `run`."""
    for seed in range(schedules):
        run(sizes, seed, change)


def run(sizes: Sizes, seed: int, change: tuple[str, str, str] | None = None) -> None:
    """Run one slice under one schedule.

    Args:
        sizes: of the kernel and the slice.
        seed: of the schedule.
        change: (function, text, other text) to be changed in the kernel's source.

    Raises:
        AssertionError: a `Race`, a `Deadlock`, or a product that has read another tile than it should.
        LookupError: `change` cannot be made.
    """
    machine = Machine(seed)
    per_tile, columns = sizes.tile // sizes.page, sizes.head_size // 64
    end = sizes.begin + sizes.num_tiles
    lines = random.Random(seed).choices(range(3), k=end + 2)
    tiles = [n for i in range(end + 2) for n in (sizes.tile, lines[i], 0, i * sizes.tile)]
    pages = [100 + i * per_tile + p for i in range(end + 2) for p in range(per_tile)]
    work = [0, 1, sizes.begin, end, 0, -1]

    def stacked(boxes: Memory, entries: int, tile: int, head_size: int) -> Any:
        each = boxes.shape[0] // entries
        return SimpleNamespace(index=lambda stage: View(boxes, range(stage * each, (stage + 1) * each)))

    environment: dict[str, Any] = {
        **vars(hopper),
        "gl": gluon(machine),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=INERT, init=machine.init, expect=machine.expect, arrive=machine.arrive, wait=machine.wait
        ),
        "_load_box": machine.copy,
        "warpgroup_mma": machine.multiply,
        "warpgroup_mma_wait": machine.wait_for_products,
        **dict.fromkeys(("fence_async_shared", "gdc_launch_dependents"), INERT),
        **{name: getattr(hopper, name).value for name in ("BOX", "NO_LIMIT", "REGISTERS", "SUFFIX")},
    }
    for name, value in vars(hopper).items():
        if hasattr(value, "fn"):
            environment[name] = FunctionType(value.fn.__code__, environment, name)
    if change is not None:
        name, text, other = change
        source = textwrap.dedent(inspect.getsource(getattr(hopper, name).fn)).partition("\n")[2]
        if source.count(text) != 1:
            raise LookupError(f"{name} has changed, {text!r} stands there {source.count(text)} times")
        code = compile(source.replace(text, other), name, "exec", flags=annotations.compiler_flag)
        exec(code, environment)
    environment["_stacked"] = stacked
    environment["_attend"](
        Description(2),
        Description(4),
        *(INERT,) * 4,
        Turns(sizes.head_size),
        Pointer(work),
        Pointer(tiles),
        Pointer(pages),
        *(INERT,) * 4,
        GROUP=4,
        BLOCK_M=sizes.block_m,
        TILE=sizes.tile,
        PAGE=sizes.page,
        D=sizes.head_size,
        R=sizes.head_size,
        NEOX=True,
        STAGES=sizes.stages,
        RAW=sizes.raw,
    )
    # What a consumer multiplies: its query with the keys of a tile, and then with the values of the one before.
    expected: list[Any] = []
    for i in range(sizes.begin, end + 1):
        for kind, number in ((0, i), (1, i - 1)):
            if not sizes.begin <= number < end:
                continue
            if kind == 0:
                expected.append(lines[i])
            first = kind * sizes.head_size
            expected.append(
                [(pages[number * per_tile + p], 0, first + c * 64) for c in range(columns) for p in range(per_tile)]
            )
    for consumer in machine.actors[: sizes.block_m // 64]:
        assert consumer.seen == expected, "a product has read another tile, or a query of another turn"
