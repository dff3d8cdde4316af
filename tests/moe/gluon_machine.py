"""A machine that runs the source of the Gluon kernel without a GPU: threads and mbarriers.

Every role of every program is a thread, and only one of them moves at a time; whose turn it is is
drawn at random at every operation that others can notice. Copies and tensor-core products are
operations of their own: they happen at a random later time, when no wait forbids it, and read their
operands then. So a stage that is released too early, a parity that is off, a signal before its copy
or a wait in a circle gives a wrong result, an error, or a machine in which nothing can move.

Memory is sequentially consistent and a role is one thread: what warps of a role owe each other, and
the memory order of a GPU, are looked at in the machine code instead (``test_gluon_offline``).
"""
# ruff: noqa: ARG005, EM101, S311 - signatures of the language; chance that can be repeated

import random
import threading
import types

import numpy as np

MOST_POLLS = 500  # in a row: by then whoever could move has been drawn


class StuckError(Exception):
    """Nothing can move, or nothing comes of it."""


class MisuseError(Exception):
    """Something that the hardware forbids."""


class Tensor(np.ndarray):
    """An array with the two things of a device tensor that the kernel asks for."""

    type = types.SimpleNamespace(layout=None)

    def to(self, kind):
        return self.astype(kind)


def tensor(value):
    found = np.asarray(value)
    return found.view(Tensor) if found.ndim else found.item()


class Pointer:
    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other):
        return Pointer(self.memory, self.offset + other)


class Descriptor:
    def __init__(self, matrix, block):
        self.matrix, self.block = matrix, block

    def read(self, row, column):
        tile = np.zeros(self.block, self.matrix.dtype)
        part = self.matrix[row : row + self.block[0], column : column + self.block[1]]
        tile[: part.shape[0], : part.shape[1]] = part
        return tile


class Shared:
    def __init__(self, array):
        self.array = array

    def index(self, place):
        return Shared(self.array[place])

    def slice(self, first, length):
        return Shared(self.array[first : first + length])

    def permute(self, order):
        return Shared(self.array.transpose(order))

    def load(self, _layout):
        return tensor(self.array.copy())

    def store(self, value):
        self.array[:] = value


class Barrier:
    def __init__(self):
        self.expected = None

    def init(self, count):
        self.expected = self.left = count
        self.bytes = self.phase = 0

    def change(self, arrivals=0, more_bytes=0):
        self.left -= arrivals
        self.bytes += more_bytes
        if self.left < 0:
            raise MisuseError("more arrivals than the barrier was made for")
        if self.left == 0 and self.bytes == 0:
            self.phase += 1
            self.left = self.expected


class Barriers:
    def __init__(self, count):
        self.all = [Barrier() for _ in range(count)]

    def index(self, place):
        return self.all[place]


class Accumulator:
    def __init__(self, start):
        self.sum = np.array(start)
        self.pending = []

    def one(self):
        a, b = self.pending.pop(0)
        self.sum += a.array @ b.array


class Role:
    def __init__(self, machine, body, program):
        self.machine, self.program = machine, program
        self.turn = threading.Semaphore(0)
        self.ready = lambda: True
        self.done = False
        self.groups = [[]]  # of copies that have not happened, oldest first
        self.unfenced = False
        self.thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self.thread.start()

    def _run(self, body):
        self.turn.acquire()
        try:
            if not self.machine.failure:
                body()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that runs the test
            self.machine.failure = self.machine.failure or error
        self.done = True
        self.machine.turn.release()


class Machine:
    """Programs of a grid with their roles, and whose turn it is."""

    def __init__(self, seed, programs):
        self.random = random.Random(seed)
        self.programs = programs
        self.roles, self.events = [], []
        self.turn = threading.Semaphore(0)
        self.polls = 0
        self.patience = self.random.choice([0.0, 0.9, 0.99])  # how long operations tend to take
        self.failure = None

    def start(self, body, program):
        role = Role(self, body, program)
        self.roles.append(role)
        return role

    def pause(self, ready=lambda: True, *, polls=False):
        """Let others move, until it may be this role's turn again."""
        role = self.current
        self.polls = self.polls + 1 if polls else 0
        role.ready = ready
        self.turn.release()
        role.turn.acquire()
        self.current = role
        if self.failure:
            raise StuckError("another role has failed")

    def run(self):
        while any(not role.done for role in self.roles):
            movers = [role for role in self.roles if not role.done and role.ready()]
            waiting = not movers or self.polls > MOST_POLLS
            if self.failure or (waiting and not self.events):
                return self._stop()
            self._move(movers, happens=waiting or self.random.random() > self.patience)
        return self._stop() if self.failure else None

    def _move(self, movers, happens):
        chosen = self.random.choice([*movers, *self.events] if happens else movers)
        if chosen in self.events:
            self.events.remove(chosen)
            self.polls = 0
            chosen()
        else:
            self.current = chosen
            chosen.turn.release()
            self.turn.acquire()

    def _stop(self):
        self.failure = self.failure or StuckError("no role can move")
        found = self.failure
        for role in self.roles:
            while not role.done:
                role.turn.release()
                self.turn.acquire()
        raise found


class Anything:
    """A layout, or how to make one: nothing here depends on it."""

    def __getattr__(self, _name):
        return self

    def __call__(self, *_arguments, **_options):
        return self


class Language:
    """What the kernel calls, under Gluon's names and Triton's."""

    int32, int64, float32 = np.int32, np.int64, np.float32
    BlockedLayout = SliceLayout = NVMMADistributedLayout = SwizzledSharedLayout = Anything()
    NVMMASharedLayout = PropagateNan = Anything()
    static_range = staticmethod(range)

    def __init__(self, machine):
        self.machine = machine

    def static_assert(self, *_condition):
        """The tests break what is asserted on purpose."""

    def num_programs(self, _axis):
        return self.machine.programs

    def barrier(self):
        self.machine.pause()

    debug_barrier = barrier

    @staticmethod
    def arange(first, last, _layout=None):
        return tensor(np.arange(first, last))

    @staticmethod
    def full(shape, value, kind, _layout=None):
        return tensor(np.full(shape, value, kind))

    def zeros(self, shape, kind, layout=None):
        return self.full(shape, 0, kind, layout)

    @staticmethod
    def where(condition, left, right):
        if np.ndim(condition) == 0:
            return left if condition else right
        return tensor(np.where(condition, left, right))

    minimum = staticmethod(lambda a, b: tensor(np.minimum(a, b)))
    maximum = staticmethod(lambda a, b, propagate_nan=None: tensor(np.maximum(a, b)))
    sum = staticmethod(lambda a, axis=None: tensor(np.sum(a, axis)))
    max = staticmethod(lambda a, axis=None: tensor(np.max(a, axis)))
    cumsum = staticmethod(lambda a, axis: tensor(np.cumsum(a, axis)))
    gather = staticmethod(lambda source, index, _axis: tensor(source[index]))
    sigmoid = staticmethod(lambda a: tensor(1.0 / (1.0 + np.exp(-a))))
    reshape = staticmethod(lambda a, shape: a.reshape(shape))
    permute = staticmethod(lambda a, order: a.transpose(order))
    split = staticmethod(lambda a: (a[..., 0], a[..., 1]))
    convert_layout = staticmethod(lambda a, _layout: a)

    @staticmethod
    def histogram(values, bins, *, mask, layout):
        del layout
        return tensor(np.bincount(values[mask], minlength=bins))

    @staticmethod
    def _places(pointer, mask):
        places = np.asarray(pointer.offset)
        wanted = np.broadcast_to(True if mask is None else mask, places.shape)
        if np.any(wanted & ((places < 0) | (places >= pointer.memory.size))):
            raise MisuseError("an access outside its buffer")
        return places, wanted

    def load(self, pointer, mask=None, other=0):
        places, wanted = self._places(pointer, mask)
        found = pointer.memory[np.where(wanted, places, 0)]
        return tensor(np.where(wanted, found, other))

    def store(self, pointer, value, mask=None):
        self.machine.pause()
        places, wanted = self._places(pointer, mask)
        pointer.memory[places[wanted]] = np.broadcast_to(value, places.shape)[wanted]

    def atomic_add(self, pointer, value, mask=None, sem=None, scope=None):
        assert scope == "gpu"
        assert sem in {"acquire", "release", "relaxed", "acq_rel"}
        self.machine.pause(polls=value == 0)
        places, wanted = self._places(pointer, mask)
        found = pointer.memory[np.where(wanted, places, 0)].copy()
        pointer.memory[places[wanted]] += value
        return tensor(found)

    @staticmethod
    def allocate_shared_memory(kind, shape, _layout):
        if kind is np.int64:
            return Barriers(shape[0])
        garbage = np.nan if np.issubdtype(kind, np.floating) else -77
        return Shared(np.full(shape, garbage, kind))

    def warp_specialize(self, roles, _warps, _registers):
        machine = self.machine
        program = machine.current.program
        mine = [
            machine.start(lambda f=function, given=arguments: f(*given), program)
            for function, arguments in roles
        ]
        machine.pause(lambda: all(role.done for role in mine))


class SharedMemory:
    """mbarriers, the copy engine, cp.async and the tensor cores."""

    def __init__(self, machine):
        self.machine = machine
        self.mbarrier = types.SimpleNamespace(
            init=lambda bar, count: bar.init(count),
            wait=self.wait,
            arrive=self.arrive,
            expect=self.expect,
            MBarrierLayout=Anything(),
        )
        self.tma = types.SimpleNamespace(async_load=self.tma_load)
        self.async_copy = types.SimpleNamespace(
            async_load=self.copy, commit_group=self.commit, wait_group=self.wait_group
        )

    def wait(self, bar, parity):
        self.machine.pause(lambda: bar.phase & 1 != parity)

    def arrive(self, bar, count):
        role = self.machine.current
        if role.unfenced:
            raise MisuseError("a signal for the async proxy without a fence before it")
        self.machine.pause()
        bar.change(arrivals=count)

    def expect(self, bar, count_bytes):
        self.machine.pause()
        bar.change(more_bytes=count_bytes)
        bar.change(arrivals=1)

    def tma_load(self, descriptor, place, bar, into):
        def arrives():
            tile = descriptor.read(*place)
            assert into.array.shape == tile.shape
            into.array[:] = tile
            bar.change(more_bytes=-2 * tile.size)  # of bfloat16

        self.machine.events.append(arrives)
        self.machine.pause()

    def copy(self, into, pointer):
        role = self.machine.current

        def arrives():
            into.array[:] = Language(self.machine).load(pointer)
            role.unfenced = True

        self.machine.events.append(arrives)
        role.groups[-1].append(arrives)
        self.machine.pause()

    def commit(self):
        self.machine.current.groups.append([])

    def wait_group(self, most):
        role = self.machine.current
        waited = role.groups[: len(role.groups) - 1 - most]
        events = self.machine.events
        self.machine.pause(lambda: not any(event in events for group in waited for event in group))
        role.groups = role.groups[len(waited) :]

    def fence_async_shared(self):
        self.machine.current.unfenced = False

    def warpgroup_mma(self, a, b, total, is_async):
        assert is_async
        if not isinstance(total, Accumulator):
            total = Accumulator(total)
        total.pending.append((a, b))
        self.machine.events.append(total.one)
        self.machine.pause()
        return total

    def warpgroup_mma_wait(self, most, deps):
        (total,) = deps
        self.machine.pause(lambda: len(total.pending) <= most)
        return total if most else tensor(total.sum)


class Compiled:
    """The kernel's functions as ordinary Python, over a machine."""

    def __init__(self, machine, replaced=None):
        self.language = Language(machine)
        memory = SharedMemory(machine)
        self.known = {"gl": self.language, "tl": self.language, "mbarrier": memory.mbarrier}
        self.known |= {"tma": memory.tma, "async_copy": memory.async_copy}
        for name in ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait"):
            self.known[name] = getattr(memory, name)
        self.known |= replaced or {}

    def __call__(self, function):
        """A function of the kernel, by ``function``'s own source."""
        if function.__name__ in self.known:
            return self.known[function.__name__]
        source = function.fn
        names = {"__builtins__": __builtins__}
        made = types.FunctionType(source.__code__, names, source.__name__, source.__defaults__)
        self.known[function.__name__] = made
        for name in source.__code__.co_names:
            if name in self.known:
                names[name] = self.known[name]
            elif name in source.__globals__:
                value = source.__globals__[name]
                names[name] = (
                    self(value) if hasattr(value, "fn") else getattr(value, "value", value)
                )
        return made
