"""A program as an MSCCL++ execution plan (JSON of release 0.9).

MSCCL++ has no queues, so every message gets a place of its own to land in: its final slot where
the receiver has not touched that before, else a scratch slot. The only handshake is one at the
start of each queue. Waits between blocks of a rank become semaphores.
References: MSCCL++, arXiv 2504.09014; the fields are those that its ``execution_plan.cc`` reads.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from fivefold.collectives.lowering._check import check_program
from fivefold.collectives.lowering._xml import MSCCL_NAMES
from fivefold.collectives.lowering.machine import Executed, run_order
from fivefold.collectives.lowering.program import Buffer, Operation, OpKind, Program, ThreadBlock
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


@dataclass
class _Block:
    """Operations, channels and buffers collected for one thread block."""

    operations: list[dict[str, Any]] = field(default_factory=list)
    channels: list[int] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)


class _Gpu:
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
        """Return the entry of the rank in the plan's JSON."""
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
        block, kind, count = self._blocks[number], operation.kind, operation.count
        target: Slot = (operation.target, operation.target_offset)
        if (number, step) in self._acquires:
            identity = self._semaphores[operation.wait_block, number]
            made.operations += [{"name": "sem_acquire", "semaphore_ids": [identity]}, _SYNC]
        result: Slot = (operation.source, operation.source_offset)
        if kind.receives:
            self._wait(made, (block.receive_peer, self._rank, block.channel))
            result = self._take(made, operation, self._layout.landing[self._rank, number, step])
        elif kind is OpKind.COPY:
            self._move(made, "copy", [result], target, count)
        elif kind is OpKind.REDUCE:
            self._move(made, "re", [target, result], target, count)
        if kind.sends:
            self._put(
                made, block, result, self._layout.destination[self._rank, number, step], count
            )
        for identity in self._releases.get((number, step), ()):
            made.operations += [_SYNC, {"name": "sem_release", "semaphore_ids": [identity]}]

    def _take(self, made: _Block, operation: Operation, landed: Slot) -> Slot:
        """Bring what has landed where the operation wants it; return where the result is then."""
        target = (operation.target, operation.target_offset)
        if not operation.kind.reduces:
            if landed != target:
                self._move(made, "copy", [landed], target, operation.count)
            return target
        own = (operation.source, operation.source_offset)
        result = target if operation.kind.writes_target else landed
        self._move(made, "re", [own, landed], result, operation.count)
        return result

    def _move(self, made: _Block, name: str, sources: list[Slot], target: Slot, count: int) -> None:
        operation = {"name": name, "src_buff": [_chunk(slot, count) for slot in sources]}
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
        local = _local(made.channels, self._layout.queues_of[self._rank].index(queue))
        return {"name": name, "channel_ids": [local], "channel_type": "memory"}


def _chunk(slot: Slot, count: int) -> dict[str, Any]:
    return {"type": slot[0].value, "index": slot[1], "size": count}


def _local(listed: list[int], value: int) -> int:
    """Return the place of a channel or buffer in its block's list, which operations name it by."""
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
