"""A program as an MSCCL++ execution plan (JSON of release 0.9).

MSCCL++ has no queues, so every message gets a place of its own to land in: its final slot where
the receiver has not touched that before, else a scratch slot. The only handshake is one at the
start of each queue. Waits between blocks of a rank become semaphores. Between hosts messages go
through ``port`` channels, whose puts the network adapter carries out later: what is written again
afterwards is flushed, and so is the last message of each block.
References: MSCCL++, arXiv 2504.09014; the fields are those that its ``execution_plan.cc`` reads,
what an operation does is in its ``execution_kernel.hpp``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

from fivefold.collectives.lowering._check import check_program
from fivefold.collectives.lowering._lower import lower
from fivefold.collectives.lowering._xml import MSCCL_NAMES
from fivefold.collectives.lowering.machine import Executed, run_order
from fivefold.collectives.lowering.program import Buffer, Operation, OpKind, Program
from fivefold.collectives.schedules import Schedule
from fivefold.errors import ConfigurationError, InfeasibleError, UnsupportedError

Queue = tuple[int, int, int]  # sender, receiver, channel
Slot = tuple[Buffer, int]
Place = tuple[int, int, int]  # rank, block, step
PLAN_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_MAX_OPERATIONS, _MAX_CHANNELS, _MAX_SEMAPHORES = 64, 16, 16
_MOST_PUTS = 8  # messages in one operation
_MOST_LOWERED_CHANNELS = 64
_NO_LIMIT = (1 << 64) - 1
_SYNC = {"name": "nop"}  # all threads of the block have done what comes before
_TYPES = ("memory", "port")  # of channels, in the order in which the executor connects them


def to_mscclpp_json(
    algorithm: Program | Schedule,
    *,
    in_place: bool = False,
    hosts: Sequence[Hashable] | None = None,
    check_limits: bool = True,
) -> str:
    """Write a program, proved with :func:`check_program`, as an MSCCL++ execution plan.

    Args:
        algorithm: The program; or a schedule, which is lowered with as many channels as its blocks
            need to hold their operations.
        in_place: Of a schedule: whether input and output are one memory.
        hosts: Host of each rank. Those of different ones are joined by ``port`` channels, through
            the network; None takes the hosts of a schedule's topology, for a program one host.
        check_limits: Refuse what MSCCL++'s executor could not hold.

    Raises:
        ConfigurationError: There is not one host for each rank.
        UnsupportedError: MSCCL++ has no such collective.
        InfeasibleError: The program exceeds a limit of MSCCL++'s executor; names it.
        ProgramError: The program is wrong.

    Examples:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.schedules import all_gather
        >>> plan = json.loads(to_mscclpp_json(build_algorithm("ring", all_gather(2))))
        >>> plan["collective"], [gpu["id"] for gpu in plan["gpus"]]
        ('allgather', [0, 1])
    """
    collective = algorithm.collective
    if collective.name not in PLAN_COLLECTIVES:
        raise UnsupportedError(
            f"MSCCL++ plans have no collective {collective.name!r}",
            hint=f"they have {', '.join(PLAN_COLLECTIVES)}",
        )
    if hosts is not None and len(hosts) != collective.num_ranks:
        raise ConfigurationError(
            f"there are {len(hosts)} hosts for {collective.num_ranks} ranks",
            hint="name the host of each rank, in their order",
        )
    if isinstance(algorithm, Program):
        check_program(algorithm)
        return json.dumps(_plan(algorithm, hosts, check_limits=check_limits))
    if hosts is None and algorithm.topology is not None:
        hosts = [algorithm.topology.host_of(rank) for rank in range(collective.num_ranks)]
    channels = 1
    while True:
        program = lower(algorithm, channels=channels, in_place=in_place, queue_slots=None)
        try:
            return json.dumps(_plan(program, hosts, check_limits=check_limits))
        except InfeasibleError:
            channels *= 2
            if channels > min(_MOST_LOWERED_CHANNELS, 2 * collective.num_chunks):
                raise


def _plan(
    program: Program, hosts: Sequence[Hashable] | None, *, check_limits: bool
) -> dict[str, Any]:
    collective = program.collective
    layout = _Layout(program, hosts)
    gpus = [_Gpu(program, rank, layout).to_dict() for rank in range(program.num_ranks)]
    if check_limits:
        _require_limits(gpus)
    # Ours: MSCCL++ does not read it, and its plans do not say it.
    root = {} if collective.root is None else {"root": collective.root}
    return {
        "name": program.name,
        "collective": MSCCL_NAMES[collective.name],
        **root,
        "protocol": "Simple",
        "inplace": program.in_place,
        "reuse_resources": False,
        "gpus": gpus,
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": False,
        "buffer_alignment": 16,
        "min_message_size": program.min_bytes,
        "max_message_size": program.max_bytes or _NO_LIMIT,
    }


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
                    hint="use fewer chunks; a program: lower it with more channels, for more and "
                    "shorter blocks",
                )


class _Layout:
    """Agreement of senders and receivers: queues' numbers, where each message lands, and when."""

    def __init__(self, program: Program, hosts: Sequence[Hashable] | None) -> None:
        self._program, self._hosts = program, hosts
        order = run_order(program)
        queues = {
            (rank, block.send_peer, block.channel)
            for rank, _, block in program.blocks()
            if any(operation.kind.sends for operation in block.operations)
        }
        # By rank and type of channel.
        self.queues_of: dict[tuple[int, str], list[Queue]] = defaultdict(list)
        # Channel k of one rank to another is joined with channel k of that one back: both list
        # their common queues in one order.
        for queue in sorted(queues, key=lambda q: (min(q[:2]), max(q[:2]), q)):
            for rank in queue[:2]:
                self.queues_of[rank, self.type_of(*queue[:2])].append(queue)
        self.scratch_slots = [rank.scratch_slots for rank in program.ranks]
        self.landing: dict[Place, Slot] = {}  # of a receive
        self.destination: dict[Place, Slot] = {}  # of a send
        self.joined = self._find_joined()  # what is put and signalled with an earlier send
        self.unannounced: set[Place] = set()  # receives that an earlier one has waited for
        touched: list[set[int]] = [set() for _ in program.ranks]
        for step in order:
            if step.operation.kind.receives:
                self._land(step, order[step.taken], touched[step.rank])
            touched[step.rank].update(_cells(program, step))
        self.flushed = self._find_flushed(order)

    def type_of(self, rank: int, peer: int) -> str:
        """Return the type of the channels between two ranks."""
        apart = self._hosts is not None and self._hosts[rank] != self._hosts[peer]
        return "port" if apart else "memory"

    def _land(self, step: Executed, sender: Executed, touched: set[int]) -> None:
        operation, rank = step.operation, step.rank
        if not operation.kind.reduces and touched.isdisjoint(_cells(self._program, step)):
            slot = (operation.target, operation.target_offset)
        else:
            slot = (Buffer.SCRATCH, self.scratch_slots[rank])
            self.scratch_slots[rank] += operation.count
        self.landing[rank, step.block, step.step] = slot
        self.destination[sender.rank, sender.block, sender.step] = slot
        if (sender.rank, sender.block, sender.step) in self.joined:
            self.unannounced.add((rank, step.block, step.step))

    def _find_joined(self) -> set[Place]:
        """Find sends that follow one another and wait for nothing: one operation puts several."""
        joined: set[Place] = set()
        for rank, number, block in self._program.blocks():
            if block.send_peer < 0 or self.type_of(rank, block.send_peer) == "port":
                continue
            together = 1
            for step, (before, one) in enumerate(pairwise(block.operations), start=1):
                follows = before.kind is one.kind is OpKind.SEND and before.source is one.source
                if follows and one.wait_block < 0 and together < _MOST_PUTS:
                    joined.add((rank, number, step))
                    together += 1
                else:
                    together = 1
        return joined

    def _find_flushed(self, order: Sequence[Executed]) -> set[Place]:
        """Find the messages of ports whose source is written again, and the last of each block."""
        flushed: set[Place] = set()
        written: list[set[int]] = [set() for _ in self._program.ranks]
        ended: set[tuple[int, int]] = set()
        for step in reversed(order):
            operation, slots = step.operation, self._program.slots[step.rank]
            target = slots[operation.target][operation.target_offset :][: operation.count]
            if operation.kind.sends:
                sent = slots[operation.source][operation.source_offset :][: operation.count]
                sent = target if operation.kind.writes_target else sent
                # What landed in a scratch slot is never written again.
                kept = operation.kind.receives and not operation.kind.writes_target
                again = not kept and not written[step.rank].isdisjoint(sent.tolist())
                if again or (step.rank, step.block) not in ended:
                    flushed.add((step.rank, step.block, step.step))
                ended.add((step.rank, step.block))
            if operation.kind.writes_target:
                written[step.rank].update(target.tolist())
        return flushed


def _cells(program: Program, step: Executed) -> list[int]:
    operation, slots = step.operation, program.slots[step.rank]
    cells: list[int] = []
    if operation.kind.reads_source:
        cells += slots[operation.source][operation.source_offset :][: operation.count].tolist()
    if operation.kind.writes_target:
        cells += slots[operation.target][operation.target_offset :][: operation.count].tolist()
    return cells


class _Gpu:
    """The plan of one rank."""

    def __init__(self, program: Program, rank: int, layout: _Layout) -> None:
        self.rank, self.layout, self.blocks = rank, layout, program.ranks[rank].blocks
        self._program = program
        self.remote: dict[tuple[int, Buffer], int] = {}
        # A semaphore for each pair of blocks of which one waits for the other.
        self.semaphores: dict[tuple[int, int], int] = {}
        self.releases: dict[tuple[int, int], list[int]] = defaultdict(list)
        # A semaphore counts: what was waited for once is not waited for again, nor what is before.
        self.acquires: set[tuple[int, int]] = set()
        awaited: dict[tuple[int, int], int] = {}
        for number, block in enumerate(self.blocks):
            for step, operation in enumerate(block.operations):
                pair = (operation.wait_block, number)
                if operation.wait_block >= 0 and operation.wait_step > awaited.get(pair, -1):
                    awaited[pair] = operation.wait_step
                    self.acquires.add((number, step))
                    identity = self.semaphores.setdefault(pair, len(self.semaphores))
                    self.releases[operation.wait_block, operation.wait_step].append(identity)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the rank in the plan's JSON."""
        ranks = self._program.ranks
        queues = {kind: self.layout.queues_of[self.rank, kind] for kind in _TYPES}
        return {
            "id": self.rank,
            # Never 0: the executor divides by them, also on ranks without input or output.
            "input_chunks": max(sizes.input_slots for sizes in ranks),
            "output_chunks": max(sizes.output_slots for sizes in ranks),
            "scratch_chunks": self.layout.scratch_slots[self.rank],
            "threadblocks": [_Block(self, number).to_dict() for number in range(len(self.blocks))],
            "channels": [
                {
                    "channel_type": kind,
                    "connected_to": [a + b - self.rank for a, b, _ in own],  # the other one
                }
                for kind, own in queues.items()
                if own
            ],
            "remote_buffers": [
                {
                    "rank": peer,
                    "type": buffer.value,
                    "access_channel_types": [self.layout.type_of(self.rank, peer)],
                }
                for peer, buffer in self.remote
            ],
            "semaphores": [{"init_value": 0} for _ in self.semaphores],
        }


class _Block:
    """One thread block; operations name channels and buffers by their places in its lists."""

    def __init__(self, gpu: _Gpu, number: int) -> None:
        self._gpu, self._number, self._block = gpu, number, gpu.blocks[number]
        self._operations: list[dict[str, Any]] = []
        self._under_way = False  # whether threads may be at different operations that matter
        self._channels: dict[str, dict[int, int]] = {kind: {} for kind in _TYPES}
        self._buffers: dict[int, int] = {}
        self._receives = (self._block.receive_peer, gpu.rank, self._block.channel)
        self._sends = (gpu.rank, self._block.send_peer, self._block.channel)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the block in the plan's JSON."""
        if self._block.receive_peer >= 0:
            self._tell(self._on("signal", self._receives))
        if self._block.send_peer >= 0:
            self._wait(self._on("wait", self._sends))
        for step, operation in enumerate(self._block.operations):
            self._operation((self._gpu.rank, self._number, step), operation)
        buffers = {
            "access_channel_type": self._type_of(self._sends),
            "remote_buffer_ids": list(self._buffers),
        }
        return {
            "id": self._number,
            "ops": self._operations,
            "channels": [
                {"channel_type": kind, "channel_ids": list(own)}
                for kind, own in self._channels.items()
                if own
            ],
            "remote_buffer_refs": [buffers] if self._buffers else [],
        }

    # All threads carry out every operation, each at its own pace: what moves data and what tells
    # others of it must come after a nop, on which the threads meet.

    def _wait(self, operation: dict[str, Any]) -> None:
        self._operations.append(operation)
        self._under_way = True

    def _tell(self, operation: dict[str, Any]) -> None:
        if self._under_way:
            self._operations.append(_SYNC)
        self._operations.append(operation)
        self._under_way = False

    def _move(self, operation: dict[str, Any]) -> None:
        self._tell(operation)
        self._under_way = True

    def _operation(self, place: Place, operation: Operation) -> None:
        gpu, kind = self._gpu, operation.kind
        if place[1:] in gpu.acquires:
            identity = gpu.semaphores[operation.wait_block, self._number]
            self._wait({"name": "sem_acquire", "semaphore_ids": [identity]})
        if kind.receives and place not in gpu.layout.unannounced:
            self._wait(self._on("wait", self._receives))
        through = self._type_of(self._sends) if kind.sends else ""
        result = self._compute(place, operation, through)
        if through == "port":
            self._port(place, result, operation.count)
        elif through and place not in gpu.layout.joined:
            if not kind.reduces:
                self._put(place)
            self._tell(self._on("signal", self._sends))
        for identity in gpu.releases.get(place[1:], ()):
            self._tell({"name": "sem_release", "semaphore_ids": [identity]})

    def _compute(self, place: Place, operation: Operation, through: str) -> Slot:
        """Add or copy what has landed; return where the result is. Sums are put at once."""
        kind, count = operation.kind, operation.count
        source: Slot = (operation.source, operation.source_offset)
        target: Slot = (operation.target, operation.target_offset)
        other = self._gpu.layout.landing[place] if kind.receives else target
        result = target if kind.writes_target else other if kind.receives else source
        if kind.reduces:
            summed = _local("re", [source, other], result, count)
            if through == "memory":
                there = self._remote(self._gpu.layout.destination[place], count)
                summed |= {"name": "res", "channel_type": through}
                summed["dst_buff"].append(there)
            self._move(summed)
        elif kind is OpKind.COPY:
            self._move(_local("copy", [source], target, count))
        elif kind.receives and other != target:
            self._move(_local("copy", [other], target, count))
        return result

    def _put(self, place: Place) -> None:
        """Put a message through memory, and those that go with it."""
        rank, number, step = place
        sources: list[dict[str, Any]] = []
        targets: list[dict[str, Any]] = []
        while not sources or (rank, number, step) in self._gpu.layout.joined:
            one = self._block.operations[step]
            slot = (
                (one.target, one.target_offset)
                if one.kind.receives
                else (one.source, one.source_offset)
            )
            sources.append(_chunk(slot, one.count))
            there = self._gpu.layout.destination[rank, number, step]
            targets.append(self._remote(there, one.count))
            step += 1
        put = {"name": "put", "src_buff": sources, "dst_buff": targets, "channel_type": "memory"}
        self._move(put)

    def _port(self, place: Place, source: Slot, count: int) -> None:
        """Hand a message and its signal to the network; wait for its end where that must be."""
        flush = place in self._gpu.layout.flushed
        there = self._remote(self._gpu.layout.destination[place], count)
        put = self._on("pwsf" if flush else "pws", self._sends)
        self._tell(put | {"src_buff": [_chunk(source, count)], "dst_buff": [there]})
        self._under_way = flush

    def _remote(self, target: Slot, count: int) -> dict[str, Any]:
        remote = self._gpu.remote
        number = remote.setdefault((self._block.send_peer, target[0]), len(remote))
        buffer = self._buffers.setdefault(number, len(self._buffers))
        return {"buffer_id": buffer, "index": target[1], "size": count}

    def _type_of(self, queue: Queue) -> str:
        return "memory" if min(queue) < 0 else self._gpu.layout.type_of(*queue[:2])

    def _on(self, name: str, queue: Queue) -> dict[str, Any]:
        kind = self._type_of(queue)
        own = self._channels[kind]
        channel = self._gpu.layout.queues_of[self._gpu.rank, kind].index(queue)
        local = own.setdefault(channel, len(own))
        return {"name": name, "channel_ids": [local], "channel_type": kind}


def _local(name: str, sources: list[Slot], target: Slot, count: int) -> dict[str, Any]:
    return {
        "name": name,
        "src_buff": [_chunk(slot, count) for slot in sources],
        "dst_buff": [_chunk(target, count)],
    }


def _chunk(slot: Slot, count: int) -> dict[str, Any]:
    return {"type": slot[0].value, "index": slot[1], "size": count}
