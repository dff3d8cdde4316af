"""A program as an MSCCL++ execution plan (JSON of release 0.9).

MSCCL++ has no queues, so every message gets a place of its own to land in: its final slot where
the receiver has not touched that before, else a scratch slot. The only handshake is one at the
start of each queue. Waits between blocks of a rank become semaphores.
References: MSCCL++, arXiv 2504.09014; the fields are those that its ``execution_plan.cc`` reads.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from fivefold.collectives.lowering._check import check_program
from fivefold.collectives.lowering._xml import MSCCL_NAMES
from fivefold.collectives.lowering.machine import Executed, run_order
from fivefold.collectives.lowering.program import Buffer, Operation, OpKind, Program
from fivefold.errors import InfeasibleError, UnsupportedError

Queue = tuple[int, int, int]  # sender, receiver, channel
Slot = tuple[Buffer, int]
PLAN_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_MAX_OPERATIONS, _MAX_CHANNELS, _MAX_SEMAPHORES = 64, 16, 16
_NO_LIMIT = (1 << 64) - 1
_SYNC = {"name": "nop"}  # all threads of the block have done what comes before


def to_mscclpp_json(program: Program, *, check_limits: bool = True) -> str:
    """Write the program, proved with :func:`check_program`, as an MSCCL++ execution plan.

    Args:
        program: The program.
        check_limits: Refuse what MSCCL++'s executor could not hold.

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
        "num_threads_per_block": 1024,
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
    """Agreement of senders and receivers: queues' numbers and where each message lands."""

    def __init__(self, program: Program) -> None:
        self._program = program
        order = run_order(program)
        queues = {
            (rank, block.send_peer, block.channel)
            for rank, _, block in program.blocks()
            if any(operation.kind.sends for operation in block.operations)
        }
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
        if not operation.kind.reduces and touched.isdisjoint(_cells(self._program, step)):
            slot = (operation.target, operation.target_offset)
        else:
            slot = (Buffer.SCRATCH, self.scratch_slots[rank])
            self.scratch_slots[rank] += operation.count
        self.landing[rank, step.block, step.step] = slot
        self.destination[sender.rank, sender.block, sender.step] = slot


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
        ranks, own = self._program.ranks, self.layout.queues_of[self.rank]
        peers = [target if source == self.rank else source for source, target, _ in own]
        return {
            "id": self.rank,
            # Never 0: the executor divides by them, also on ranks without input or output.
            "input_chunks": max(sizes.input_slots for sizes in ranks),
            "output_chunks": max(sizes.output_slots for sizes in ranks),
            "scratch_chunks": self.layout.scratch_slots[self.rank],
            "threadblocks": [_Block(self, number).to_dict() for number in range(len(self.blocks))],
            "channels": [{"channel_type": "memory", "connected_to": peers}] if peers else [],
            "remote_buffers": [
                {"rank": peer, "type": buffer.value, "access_channel_types": ["memory"]}
                for peer, buffer in self.remote
            ],
            "semaphores": [{"init_value": 0} for _ in self.semaphores],
        }


class _Block:
    """One thread block; operations name channels and buffers by their places in its lists."""

    def __init__(self, gpu: _Gpu, number: int) -> None:
        self._gpu, self._number, self._block = gpu, number, gpu.blocks[number]
        self._operations: list[dict[str, Any]] = []
        self._channels: dict[int, int] = {}
        self._buffers: dict[int, int] = {}
        self._receives = (self._block.receive_peer, gpu.rank, self._block.channel)
        self._sends = (gpu.rank, self._block.send_peer, self._block.channel)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the block in the plan's JSON."""
        if self._block.receive_peer >= 0:
            self._add(self._on("signal", self._receives))
        if self._block.send_peer >= 0:
            self._add(self._on("wait", self._sends), _SYNC)
        for step, operation in enumerate(self._block.operations):
            self._operation((self._number, step), operation)
        if self._operations and self._operations[-1] is _SYNC:
            self._operations.pop()
        channels = {"channel_type": "memory", "channel_ids": list(self._channels)}
        buffers = {"access_channel_type": "memory", "remote_buffer_ids": list(self._buffers)}
        return {
            "id": self._number,
            "ops": self._operations,
            "channels": [channels] if self._channels else [],
            "remote_buffer_refs": [buffers] if self._buffers else [],
        }

    def _add(self, *operations: dict[str, Any]) -> None:
        for operation in operations:
            if operation is not _SYNC or not self._operations or self._operations[-1] is not _SYNC:
                self._operations.append(operation)

    def _operation(self, place: tuple[int, int], operation: Operation) -> None:
        gpu, kind, count = self._gpu, operation.kind, operation.count
        source: Slot = (operation.source, operation.source_offset)
        target: Slot = (operation.target, operation.target_offset)
        if place in gpu.acquires:
            identity = gpu.semaphores[operation.wait_block, self._number]
            self._add({"name": "sem_acquire", "semaphore_ids": [identity]}, _SYNC)
        result = source
        if kind.receives:  # what has landed goes where the operation wants it
            self._add(self._on("wait", self._receives), _SYNC)
            landed = gpu.layout.landing[gpu.rank, *place]
            result = target if kind.writes_target else landed
            if kind.reduces:
                self._move("re", [source, landed], result, count)
            elif landed != target:
                self._move("copy", [landed], target, count)
        elif kind is OpKind.COPY:
            self._move("copy", [source], target, count)
        elif kind is OpKind.REDUCE:
            self._move("re", [target, source], target, count)
        if kind.sends:
            self._put(result, gpu.layout.destination[gpu.rank, *place], count)
        for identity in gpu.releases.get(place, ()):
            self._add(_SYNC, {"name": "sem_release", "semaphore_ids": [identity]})

    def _move(self, name: str, sources: list[Slot], target: Slot, count: int) -> None:
        operation = {"name": name, "src_buff": [_chunk(slot, count) for slot in sources]}
        self._add(_SYNC, operation | {"dst_buff": [_chunk(target, count)]}, _SYNC)

    def _put(self, source: Slot, target: Slot, count: int) -> None:
        remote = self._gpu.remote
        number = remote.setdefault((self._block.send_peer, target[0]), len(remote))
        buffer = self._buffers.setdefault(number, len(self._buffers))
        destination = {"buffer_id": buffer, "index": target[1], "size": count}
        operation = {"name": "put", "src_buff": [_chunk(source, count)], "dst_buff": [destination]}
        self._add(_SYNC, operation | {"channel_type": "memory"}, _SYNC)
        self._add(self._on("signal", self._sends))

    def _on(self, name: str, queue: Queue) -> dict[str, Any]:
        channel = self._gpu.layout.queues_of[self._gpu.rank].index(queue)
        local = self._channels.setdefault(channel, len(self._channels))
        return {"name": name, "channel_ids": [local], "channel_type": "memory"}


def _chunk(slot: Slot, count: int) -> dict[str, Any]:
    return {"type": slot[0].value, "index": slot[1], "size": count}
