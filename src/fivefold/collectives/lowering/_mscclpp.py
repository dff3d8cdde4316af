"""A program as an MSCCL++ execution plan (JSON of release 0.9), and such a plan as a program.

MSCCL++ has no queues: a sender writes into a buffer of the receiver and signals. So every message
gets a place of its own to land in: its final slot where the receiver has not touched that slot
before, else a scratch slot from which the receiver takes it. Then no message can overwrite another
one's data, and the only handshake is one at the start of each queue, which says that the receiver
has begun. Waits between blocks of a rank become semaphores.

Limits of MSCCL++'s executor: 64 operations and 16 channels a thread block, 16 semaphores a rank.

To read a plan it is run once without data: puts travel with the next signal on their channel, waits
take them in the order of the signals, semaphores and barriers hold blocks back. The order found in
this way gives each rank's operations, and what must follow what is derived from the slots that they
use. Reading remote memory (``get``, ``rre``), packets and switches' multicast have no counterpart
in a program and are refused.

References: MSCCL++, arXiv 2504.09014; the fields are those that its ``execution_plan.cc`` reads.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.collectives.lowering._check import check_program
from fivefold.collectives.lowering._lower import RankAction, blocks_of
from fivefold.collectives.lowering._xml import MSCCL_NAMES, text_of
from fivefold.collectives.lowering.machine import Executed, ProgramError, run_order
from fivefold.collectives.lowering.program import (
    Buffer,
    Operation,
    OpKind,
    Program,
    RankProgram,
    ThreadBlock,
)
from fivefold.collectives.schedules import Collective, named_collective
from fivefold.errors import ConfigurationError, DataError, InfeasibleError, UnsupportedError
from fivefold.files import parse_json

Queue = tuple[int, int, int]  # sender, receiver, channel
Slot = tuple[Buffer, int]
PLAN_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_MAX_OPERATIONS, _MAX_CHANNELS, _MAX_SEMAPHORES = 64, 16, 16
_NO_LIMIT = (1 << 64) - 1
_SYNC = {"name": "nop"}  # all threads of the block have done what comes before


def to_mscclpp_json(
    program: Program, *, check_limits: bool = True, threads_per_block: int = 1024
) -> str:
    """Write the program, proved with :func:`check_program`, as an MSCCL++ execution plan.

    Args:
        program: The program.
        check_limits: Refuse what MSCCL++'s executor could not hold.
        threads_per_block: GPU threads of each thread block.

    Returns:
        The JSON text.

    Raises:
        UnsupportedError: MSCCL++ has no such collective.
        InfeasibleError: The program exceeds a limit of MSCCL++'s executor; names it.
        ProgramError: The program is wrong.

    Examples:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.lowering import lower
        >>> from fivefold.collectives.schedules import all_gather
        >>> plan = json.loads(to_mscclpp_json(lower(build_algorithm("ring", all_gather(2)))))
        >>> plan["collective"], [gpu["id"] for gpu in plan["gpus"]]
        ('allgather', [0, 1])
    """
    collective = program.collective
    if collective.name not in PLAN_COLLECTIVES:
        raise UnsupportedError(
            f"MSCCL++ plans have no collective {collective.name!r}",
            hint=f"they have {', '.join(PLAN_COLLECTIVES)}",
        )
    check_program(program)
    layout = _Layout(program)
    gpus = [_Gpu(program, rank, layout).to_dict() for rank in range(program.num_ranks)]
    if check_limits:
        _require_limits(gpus)
    # Ours: MSCCL++ does not read it, and its plans do not say it.
    root = {} if collective.root is None else {"root": collective.root}
    plan = {
        "name": program.name,
        "collective": MSCCL_NAMES[collective.name],
        **root,
        "protocol": "Simple",
        "inplace": program.in_place,
        "reuse_resources": False,
        "gpus": gpus,
        "num_threads_per_block": threads_per_block,
        "use_double_scratch_buffer": False,
        "buffer_alignment": 16,
        "min_message_size": program.min_bytes,
        "max_message_size": program.max_bytes or _NO_LIMIT,
    }
    return json.dumps(plan)


def _require_limits(gpus: list[dict[str, Any]]) -> None:
    for gpu in gpus:
        where = f"rank {gpu['id']}"
        found = [("semaphores", len(gpu["semaphores"]), _MAX_SEMAPHORES, where)]
        for block in gpu["threadblocks"]:
            of = f"{where} block {block['id']}"
            used = sum(len(group["channel_ids"]) for group in block["channels"])
            found.append(("operations", len(block["ops"]), _MAX_OPERATIONS, of))
            found.append(("channels", used, _MAX_CHANNELS, of))
        for what, value, limit, of in found:
            if value > limit:
                raise InfeasibleError(
                    f"MSCCL++ runs at most {limit} {what} there; {of} has {value}",
                    hint="use fewer chunks, or lower with fuse=False for more and shorter blocks",
                )


class _Layout:
    """What sender and receiver must agree on: queues' numbers and where each message lands."""

    def __init__(self, program: Program) -> None:
        self._program = program
        order = run_order(program)
        queues = sorted({queue for step in order if (queue := _sends_to(program, step))})
        self.queues_of: dict[int, list[Queue]] = defaultdict(list)
        # Channel k of one rank to another is joined with channel k of that one back: both list
        # their common queues in one order.
        for queue in sorted(queues, key=lambda q: (min(q[:2]), max(q[:2]), q)):
            self.queues_of[queue[0]].append(queue)
            self.queues_of[queue[1]].append(queue)
        self.scratch_slots = [rank.scratch_slots for rank in program.ranks]
        self.landing: dict[tuple[int, int, int], Slot] = {}  # of a receive
        self.destination: dict[tuple[int, int, int], Slot] = {}  # of a send
        touched: list[set[int]] = [set() for _ in program.ranks]
        for step in order:
            if step.operation.kind.receives:
                self._land(step, order[step.taken], touched[step.rank])
            touched[step.rank].update(_cells(program, step))

    def _land(self, step: Executed, sender: Executed, touched: set[int]) -> None:
        operation, rank = step.operation, step.rank
        cells = set(_cells(self._program, step))
        direct = not operation.kind.reduces and not cells & touched
        if direct:
            slot = (operation.target, operation.target_offset)
        else:
            slot = (Buffer.SCRATCH, self.scratch_slots[rank])
            self.scratch_slots[rank] += operation.count
        self.landing[rank, step.block, step.step] = slot
        self.destination[sender.rank, sender.block, sender.step] = slot

    def channel(self, rank: int, queue: Queue) -> int:
        """Return the number of the rank's channel that carries the queue."""
        return self.queues_of[rank].index(queue)


def _sends_to(program: Program, step: Executed) -> Queue | None:
    if not step.operation.kind.sends:
        return None
    block = program.ranks[step.rank].blocks[step.block]
    return step.rank, block.send_peer, block.channel


def _cells(program: Program, step: Executed) -> list[int]:
    operation, slots = step.operation, program.slots(step.rank)
    cells: list[int] = []
    if operation.kind.reads_source:
        cells += slots[operation.source][operation.source_offset :][: operation.count].tolist()
    if operation.kind.writes_target:
        cells += slots[operation.target][operation.target_offset :][: operation.count].tolist()
    return cells


@dataclass
class _Block:
    """What is collected for one thread block."""

    operations: list[dict[str, Any]] = field(default_factory=list)
    channels: list[int] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)


class _Gpu:
    """The plan of one rank."""

    def __init__(self, program: Program, rank: int, layout: _Layout) -> None:
        self._program = program
        self._rank = rank
        self._layout = layout
        self._blocks = program.ranks[rank].blocks
        self._remote: list[tuple[int, Buffer]] = []
        # A semaphore for each pair of blocks of which one waits for the other.
        self._semaphores: dict[tuple[int, int], int] = {}
        self._releases: dict[tuple[int, int], list[int]] = defaultdict(list)
        # A semaphore counts: what was waited for once is not waited for again, nor what is before.
        self._acquires: set[tuple[int, int]] = set()
        awaited: dict[tuple[int, int], int] = {}
        for number, block in enumerate(self._blocks):
            for step, operation in enumerate(block.operations):
                pair = (operation.wait_block, number)
                if operation.wait_block >= 0 and operation.wait_step > awaited.get(pair, -1):
                    awaited[pair] = operation.wait_step
                    self._acquires.add((number, step))
                    identity = self._semaphores.setdefault(pair, len(self._semaphores))
                    self._releases[operation.wait_block, operation.wait_step].append(identity)

    def to_dict(self) -> dict[str, Any]:
        program, rank = self._program, self._rank
        blocks = [self._thread_block(number) for number in range(len(self._blocks))]
        peers = [
            queue[1] if queue[0] == rank else queue[0] for queue in self._layout.queues_of[rank]
        ]
        return {
            "id": rank,
            # Never 0: the executor divides by them, also on ranks without input or output.
            "input_chunks": max(sizes.input_slots for sizes in program.ranks),
            "output_chunks": max(sizes.output_slots for sizes in program.ranks),
            "scratch_chunks": self._layout.scratch_slots[rank],
            "threadblocks": blocks,
            "channels": [{"channel_type": "memory", "connected_to": peers}] if peers else [],
            "remote_buffers": [
                {"rank": peer, "type": buffer.value, "access_channel_types": ["memory"]}
                for peer, buffer in self._remote
            ],
            "semaphores": [{"init_value": 0} for _ in self._semaphores],
        }

    def _thread_block(self, number: int) -> dict[str, Any]:
        block, made = self._blocks[number], _Block()
        if block.receive_peer >= 0:
            self._signal(made, (block.receive_peer, self._rank, block.channel))
        if block.send_peer >= 0:
            self._wait(made, (self._rank, block.send_peer, block.channel))
        for step, operation in enumerate(block.operations):
            self._operation(made, number, step, operation)
        return {
            "id": number,
            "ops": _without_repeated_syncs(made.operations),
            "channels": [{"channel_type": "memory", "channel_ids": made.channels}]
            if made.channels
            else [],
            "remote_buffer_refs": [
                {"access_channel_type": "memory", "remote_buffer_ids": made.buffers}
            ]
            if made.buffers
            else [],
        }

    def _operation(self, made: _Block, number: int, step: int, operation: Operation) -> None:
        block, kind = self._blocks[number], operation.kind
        if (number, step) in self._acquires:
            identity = self._semaphores[operation.wait_block, number]
            made.operations += [{"name": "sem_acquire", "semaphore_ids": [identity]}, _SYNC]
        result: Slot = (operation.source, operation.source_offset)
        if kind.receives:
            self._wait(made, (block.receive_peer, self._rank, block.channel))
            result = self._take(made, operation, self._layout.landing[self._rank, number, step])
        elif kind is OpKind.COPY:
            self._copy(made, result, (operation.target, operation.target_offset), operation.count)
        elif kind is OpKind.REDUCE:
            target = (operation.target, operation.target_offset)
            self._reduce(made, [target, result], target, operation.count)
        if kind.sends:
            self._put(
                made,
                block,
                result,
                self._layout.destination[self._rank, number, step],
                operation.count,
            )
        for identity in self._releases.get((number, step), ()):
            made.operations += [_SYNC, {"name": "sem_release", "semaphore_ids": [identity]}]

    def _take(self, made: _Block, operation: Operation, landed: Slot) -> Slot:
        """Bring what has landed where the operation wants it; return where the result is then."""
        target = (operation.target, operation.target_offset)
        if not operation.kind.reduces:
            if landed != target:
                self._copy(made, landed, target, operation.count)
            return target
        own = (operation.source, operation.source_offset)
        result = target if operation.kind.writes_target else landed
        self._reduce(made, [own, landed], result, operation.count)
        return result

    def _copy(self, made: _Block, source: Slot, target: Slot, count: int) -> None:
        operation = {"name": "copy", "src_buff": [_chunk(source, count)]}
        made.operations += [_SYNC, operation | {"dst_buff": [_chunk(target, count)]}, _SYNC]

    def _reduce(self, made: _Block, sources: list[Slot], target: Slot, count: int) -> None:
        operation = {"name": "re", "src_buff": [_chunk(slot, count) for slot in sources]}
        made.operations += [_SYNC, operation | {"dst_buff": [_chunk(target, count)]}, _SYNC]

    def _put(
        self, made: _Block, block: ThreadBlock, source: Slot, target: Slot, count: int
    ) -> None:
        remote = (block.send_peer, target[0])
        if remote not in self._remote:
            self._remote.append(remote)
        buffer = _local(made.buffers, self._remote.index(remote))
        destination = {"buffer_id": buffer, "index": target[1], "size": count}
        operation = {"name": "put", "src_buff": [_chunk(source, count)], "dst_buff": [destination]}
        made.operations += [_SYNC, operation | {"channel_type": "memory"}, _SYNC]
        self._signal(made, (self._rank, block.send_peer, block.channel))

    def _signal(self, made: _Block, queue: Queue) -> None:
        made.operations.append(self._on_channel("signal", made, queue))

    def _wait(self, made: _Block, queue: Queue) -> None:
        made.operations += [self._on_channel("wait", made, queue), _SYNC]

    def _on_channel(self, name: str, made: _Block, queue: Queue) -> dict[str, Any]:
        local = _local(made.channels, self._layout.channel(self._rank, queue))
        return {"name": name, "channel_ids": [local], "channel_type": "memory"}


def _chunk(slot: Slot, count: int) -> dict[str, Any]:
    return {"type": slot[0].value, "index": slot[1], "size": count}


def _local(listed: list[int], value: int) -> int:
    """Operations name channels and buffers by their place in their block's list."""
    if value not in listed:
        listed.append(value)
    return listed.index(value)


def _without_repeated_syncs(operations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for operation in operations:
        if operation is _SYNC and kept and kept[-1] is _SYNC:
            continue
        kept.append(operation)
    while kept and kept[-1] is _SYNC:
        kept.pop()
    return kept


_NAMES = {MSCCL_NAMES[name]: name for name in PLAN_COLLECTIVES}
_SKIPPED = {"nop", "flush"}
_SIGNALS = {"signal", "rlxsignal"}
_WAITS = {"wait", "rlxwait"}


def from_mscclpp_json(source: str | Path, *, collective: Collective | None = None) -> Program:
    """Read an MSCCL++ execution plan.

    Args:
        source: A path, or the text itself (it begins with ``{``).
        collective: What the plan computes, where its name and chunk counts do not tell; None
            takes it from the plan.

    Returns:
        The program; :func:`check_program` says whether it computes its collective.

    Raises:
        DataError: The text is no plan, or it cannot be run to its end.
        UnsupportedError: It uses operations that a program does not have.

    Examples:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.lowering import check_program, lower, to_mscclpp_json
        >>> from fivefold.collectives.schedules import all_gather
        >>> plan = to_mscclpp_json(lower(build_algorithm("ring", all_gather(3))))
        >>> check_program(from_mscclpp_json(plan)).num_messages
        6
    """
    try:
        plan = parse_json(text_of(source, begins="{", what="plan"), where="the plan")
        return _program(plan, collective)
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"this is no MSCCL++ plan: {error!r}") from error
    except ConfigurationError as error:
        raise DataError(f"the plan is inconsistent: {error}") from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"this is no MSCCL++ plan: {error!r}") from error


def _program(plan: dict[str, Any], collective: Collective | None) -> Program:
    gpus = sorted(plan["gpus"], key=lambda gpu: int(gpu["id"]))
    if [gpu["id"] for gpu in gpus] != list(range(len(gpus))):
        ids = [gpu["id"] for gpu in gpus]
        raise DataError(f"the gpus of the plan have the ids {ids}, not 0 to {len(gpus) - 1}")
    if collective is None:
        collective = _collective_of(plan, gpus)
    actions, scratch = _Runner(gpus).run()
    ranks = tuple(
        RankProgram(
            (),
            int(collective.input_slots[rank]),
            int(collective.output_slots[rank]),
            max(int(gpus[rank]["scratch_chunks"]), scratch[rank]),
        )
        for rank in range(len(gpus))
    )
    largest = int(plan.get("max_message_size", 0))
    shape = Program(
        collective,
        ranks,
        name=str(plan["name"]),
        in_place=bool(plan["inplace"]) and collective.name != "all_to_all",
        min_bytes=int(plan.get("min_message_size", 0)),
        max_bytes=0 if largest >= 1 << 63 else largest,
    )
    return blocks_of(shape, actions)


def _collective_of(plan: dict[str, Any], gpus: list[dict[str, Any]]) -> Collective:
    name = _NAMES.get(str(plan["collective"]))
    if name is None:
        raise DataError(
            f"the plan's collective {plan['collective']!r} is none of {', '.join(_NAMES)}",
            hint="pass collective=... to say what it computes",
        )
    inputs = max(int(gpu["input_chunks"]) for gpu in gpus)
    chunks = {
        "all_reduce": inputs,
        "all_gather": inputs,
        "broadcast": inputs,
        "reduce_scatter": max(inputs // len(gpus), 1),
        "all_to_all": max(inputs // len(gpus), 1),
    }
    return named_collective(name, len(gpus), chunks=chunks[name], root=int(plan.get("root", 0)))


@dataclass(frozen=True, slots=True)
class _Put:
    source: Slot
    target: Slot
    count: int


_Channel = tuple[int, int, str, int]  # rank, peer, kind, number among those between the two


class _Step(NamedTuple):
    """An operation of a plan, and where it stands."""

    rank: int
    block: dict[str, Any]
    operation: dict[str, Any]

    @property
    def kind(self) -> str:
        """Return the kind of channel that it uses."""
        return str(self.operation.get("channel_type", "memory"))

    @property
    def where(self) -> str:
        return f"rank {self.rank} block {self.block['id']}"


class _Runner:
    """Runs all blocks of all ranks until each is at its end."""

    def __init__(self, gpus: list[dict[str, Any]]) -> None:
        self._gpus = gpus
        self._ends = [_channel_ends(gpus, rank) for rank in range(len(gpus))]
        # What was put since the last signal, by channel; a memory put, which names none, by its
        # peer, and by its block where that signals the peer itself.
        self._pending: dict[tuple[Any, ...], list[_Put]] = defaultdict(list)
        self._signalled: dict[_Channel, deque[list[_Put]]] = defaultdict(deque)
        self._semaphores: dict[tuple[int, int], int] = {}
        self._barriers: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._passed: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._actions: list[list[RankAction]] = [[] for _ in gpus]
        self._scratch = [0] * len(gpus)
        for rank, gpu in enumerate(gpus):
            for number, semaphore in enumerate(gpu.get("semaphores", ())):
                self._semaphores[rank, number] = int(semaphore["init_value"])
        self._handlers: dict[str, Callable[[_Step], bool]] = {
            "put": self._put,
            "pws": self._put_with_signal,
            "pwsf": self._put_with_signal,
            "copy": self._copy,
            "re": self._reduce,
            "res": self._reduce,
            "barrier": self._barrier,
            "sem_acquire": self._acquire,
            "sem_release": self._release,
            **dict.fromkeys(_SKIPPED, lambda _: True),
            **dict.fromkeys(_SIGNALS, self._signal),
            **dict.fromkeys(_WAITS, self._wait),
        }

    def run(self) -> tuple[list[list[RankAction]], list[int]]:
        blocks = [
            deque(_Step(rank, block, operation) for operation in _flattened(block["ops"]))
            for rank, gpu in enumerate(self._gpus)
            for block in gpu["threadblocks"]
        ]
        moved = True
        while moved:
            moved = False
            for steps in blocks:
                while steps and self._carry_out(steps[0]):
                    steps.popleft()
                    moved = True
        for step in (steps[0] for steps in blocks if steps):
            raise ProgramError(
                f"the plan deadlocks: {step.where} waits for ever at its operation "
                f"{step.operation['name']}"
            )
        unread = {(*key, "signalled"): puts for key, puts in self._signalled.items() if any(puts)}
        for rank, peer, *_ in (*(key for key, puts in self._pending.items() if puts), *unread):
            raise ProgramError(
                f"rank {rank} puts data to rank {peer} that is never signalled and waited for"
            )
        return self._actions, self._scratch

    def _carry_out(self, step: _Step) -> bool:
        name = step.operation["name"]
        if name not in self._handlers:
            raise UnsupportedError(
                f"the plan's operation {name!r} ({step.where}) has no counterpart in a program",
                hint="plans of put, signal, wait, copy, re, res, barriers and semaphores are read",
            )
        return self._handlers[name](step)

    # -- operations --------------------------------------------------------------------------

    def _put(self, step: _Step) -> bool:
        self._put_chunks(step, step.operation["src_buff"], step.operation["dst_buff"])
        return True

    def _put_with_signal(self, step: _Step) -> bool:
        return self._put(step) and self._signal(step)

    def _put_chunks(
        self, step: _Step, sources: list[dict[str, Any]], targets: list[dict[str, Any]]
    ) -> None:
        for source, target in zip(sources * len(targets), targets, strict=False):
            buffer = self._remote(step, target["buffer_id"])
            slot = (Buffer(buffer["type"]), int(target["index"]))
            put = _Put(_slot(source), slot, int(target["size"]))
            self._pending[self._put_key(step, int(buffer["rank"]))].append(put)

    def _remote(self, step: _Step, number: int) -> dict[str, Any]:
        for group in step.block["remote_buffer_refs"]:
            if group["access_channel_type"] == step.kind:
                listed = self._gpus[step.rank]["remote_buffers"]
                found: dict[str, Any] = listed[group["remote_buffer_ids"][number]]
                return found
        raise DataError(f"{step.where} names no remote buffer {number}")

    def _put_key(self, step: _Step, peer: int) -> tuple[Any, ...]:
        """Return where a put waits for its signal."""
        numbers = step.operation.get("channel_ids")
        for key in self._keys(step, numbers) if numbers else ():
            if key[1] == peer:
                return key
        if any(key[1] == peer for key in self._keys(step, None)):
            return step.rank, peer, step.kind, "block", self._signaller(step, peer)
        raise DataError(f"{step.where} has no channel to rank {peer}")

    def _signaller(self, step: _Step, peer: int) -> int | None:
        """Return the block where it signals the peer itself; None where another one does."""
        others = [step._replace(operation=each) for each in _flattened(step.block["ops"])]
        signals = any(
            key[1] == peer
            for other in others
            if other.kind == step.kind and other.operation["name"] in (*_SIGNALS, "pws", "pwsf")
            for key in self._keys(other, other.operation["channel_ids"])
        )
        return int(step.block["id"]) if signals else None

    def _keys(self, step: _Step, numbers: list[int] | None) -> list[_Channel]:
        if step.kind == "switch":
            raise UnsupportedError(
                f"{step.where} uses a switch's multicast",
                hint="a program has only memory and port channels",
            )
        keys = []
        for group in step.block["channels"]:
            if group["channel_type"] == step.kind:
                listed = group["channel_ids"]
                for identity in listed if numbers is None else [listed[at] for at in numbers]:
                    peer, ordinal = self._ends[step.rank][step.kind, identity]
                    keys.append((step.rank, peer, step.kind, ordinal))
        return keys

    def _signal(self, step: _Step) -> bool:
        for key in self._keys(step, step.operation["channel_ids"]):
            by_block = (*key[:3], "block")
            places = key, (*by_block, int(step.block["id"])), (*by_block, None)
            puts = [put for place in places for put in self._pending.pop(place, [])]
            for put in puts:
                self._act(step, OpKind.SEND, put.source, None, put.count, key=("send", *key[1:]))
            self._signalled[key].append(puts)
        return True

    def _wait(self, step: _Step) -> bool:
        keys = self._keys(step, step.operation["channel_ids"])
        incoming = [self._signalled[peer, rank, kind, number] for rank, peer, kind, number in keys]
        if not all(incoming):
            return False
        for key, signals in zip(keys, incoming, strict=True):
            for put in signals.popleft():
                way = ("receive", *key[1:])
                self._act(step, OpKind.RECEIVE, None, put.target, put.count, key=way)
        return True

    def _copy(self, step: _Step) -> bool:
        buffers = step.operation["src_buff"], step.operation["dst_buff"]
        for source, target in zip(*buffers, strict=True):
            self._act(step, OpKind.COPY, _slot(source), _slot(target), int(source["size"]))
        return True

    def _reduce(self, step: _Step) -> bool:
        target, *remote = step.operation["dst_buff"]
        write, count = _slot(target), int(target["size"])
        reads = [_slot(part) for part in step.operation["src_buff"]]
        if write in reads:
            reads.remove(write)
        else:
            self._act(step, OpKind.COPY, reads.pop(0), write, count)
        for read in reads:
            self._act(step, OpKind.REDUCE, read, write, count)
        if remote:
            self._put_chunks(step, [target], remote)
        return True

    def _barrier(self, step: _Step) -> bool:
        key, own = (step.rank, int(step.operation["barrier_id"])), int(step.block["id"])
        if own in self._passed[key]:
            self._passed[key].discard(own)
            return True
        self._barriers[key].add(own)
        if len(self._barriers[key]) < int(step.operation["num_threadblocks"]):
            return False
        self._passed[key] = self._barriers.pop(key) - {own}
        return True

    def _acquire(self, step: _Step) -> bool:
        numbers = [(step.rank, int(number)) for number in step.operation["semaphore_ids"]]
        if any(self._semaphores[number] <= 0 for number in numbers):
            return False
        for number in numbers:
            self._semaphores[number] -= 1
        return True

    def _release(self, step: _Step) -> bool:
        for number in step.operation["semaphore_ids"]:
            self._semaphores[step.rank, int(number)] += 1
        return True

    def _act(
        self,
        step: _Step,
        kind: OpKind,
        read: Slot | None,
        write: Slot | None,
        count: int,
        *,
        key: tuple[str, int, str, int] | None = None,
    ) -> None:
        way, peer, channel_type, number = key or ("copy", -1, "memory", int(step.block["id"]))
        block = (way, peer, 2 * number + (channel_type == "port"))
        self._actions[step.rank].append(RankAction(kind, block, read, write, count))
        for place in (read, write):
            if place is not None and place[0] is Buffer.SCRATCH:
                self._scratch[step.rank] = max(self._scratch[step.rank], place[1] + count)


def _slot(chunk: dict[str, Any]) -> Slot:
    return Buffer(chunk["type"]), int(chunk["index"])


def _channel_ends(gpus: list[dict[str, Any]], rank: int) -> dict[tuple[str, int], tuple[int, int]]:
    """Find each channel's peer, and its number among the channels between the two."""
    ends: dict[tuple[str, int], tuple[int, int]] = {}
    numbers: dict[str, int] = defaultdict(int)
    ordinals: dict[tuple[str, int], int] = defaultdict(int)
    for group in gpus[rank]["channels"]:
        kind = group["channel_type"]
        for peer in group.get("connected_to", ()):
            ends[kind, numbers[kind]] = (int(peer), ordinals[kind, peer])
            numbers[kind] += 1
            ordinals[kind, peer] += 1
    return ends


def _flattened(operations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give a pipeline's inner operations once: it repeats them over parts of the same chunks."""
    flat: list[dict[str, Any]] = []
    for operation in operations:
        flat += _flattened(operation["ops"]) if operation["name"] == "pipeline" else [operation]
    return flat
