"""An MSCCL++ execution plan, read as a program.

The plan is run once without data: puts travel with the next signal on their channel, waits take
them in the order of the signals, semaphores and barriers hold blocks back. The order found in this
way gives each rank's operations, and what must follow what is derived from the slots that they
use. Reading remote memory (``get``, ``rre``), packets and switches' multicast have no counterpart
in a program and are refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fivefold.collectives.lowering._lower import RankAction, blocks_of
from fivefold.collectives.lowering._mscclpp_out import PLAN_COLLECTIVES
from fivefold.collectives.lowering._order import ProgramError
from fivefold.collectives.lowering._program import Buffer, OpKind, Program, RankProgram
from fivefold.collectives.lowering._xml import MSCCL_NAMES, text_of
from fivefold.collectives.schedules import Collective, named_collective
from fivefold.errors import ConfigurationError, DataError, UnsupportedError
from fivefold.files import parse_json

Slot = tuple[Buffer, int]
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
    return named_collective(name, len(gpus), chunks=chunks[name])


@dataclass
class _Put:
    source: Slot
    target: Slot
    count: int


@dataclass
class _Channel:
    """One direction of a channel: what was put since the last signal, and signals not taken."""

    pending: list[_Put] = field(default_factory=list)
    signalled: list[list[_Put]] = field(default_factory=list)


class _Runner:
    """Runs all blocks of all ranks until each is at its end."""

    def __init__(self, gpus: list[dict[str, Any]]) -> None:
        self._gpus = gpus
        self._ends = [_channel_ends(gpus, rank) for rank in range(len(gpus))]
        self._channels: dict[tuple[int, int, str, int], _Channel] = defaultdict(_Channel)
        self._semaphores: dict[tuple[int, int], int] = {}
        self._barriers: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._passed: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._actions: list[list[RankAction]] = [[] for _ in gpus]
        self._scratch = [0] * len(gpus)
        for rank, gpu in enumerate(gpus):
            for number, semaphore in enumerate(gpu.get("semaphores", ())):
                self._semaphores[rank, number] = int(semaphore["init_value"])

    def run(self) -> tuple[list[list[RankAction]], list[int]]:
        blocks = [
            (rank, block, _flattened(block["ops"]))
            for rank, gpu in enumerate(self._gpus)
            for block in gpu["threadblocks"]
        ]
        places = [0] * len(blocks)
        moved = True
        while moved:
            moved = False
            for at, (rank, block, operations) in enumerate(blocks):
                while places[at] < len(operations):
                    if not self._carry_out(rank, block, operations[places[at]]):
                        break
                    places[at] += 1
                    moved = True
        for at, (rank, block, operations) in enumerate(blocks):
            if places[at] < len(operations):
                name = operations[places[at]]["name"]
                raise ProgramError(
                    f"the plan deadlocks: rank {rank} block {block['id']} operation {places[at]} "
                    f"({name}) waits for ever"
                )
        self._require_nothing_left()
        return self._actions, self._scratch

    def _require_nothing_left(self) -> None:
        for (rank, peer, _, _), channel in self._channels.items():
            if channel.pending or any(channel.signalled):
                raise ProgramError(
                    f"rank {rank} puts data to rank {peer} that is never signalled and waited for"
                )

    def _carry_out(self, rank: int, block: dict[str, Any], operation: dict[str, Any]) -> bool:
        name = operation["name"]
        if name in _SKIPPED:
            return True
        handlers: dict[str, Callable[[int, dict[str, Any], dict[str, Any]], bool]] = {
            "put": self._put,
            "pws": self._put_with_signal,
            "pwsf": self._put_with_signal,
            "copy": self._copy,
            "re": self._reduce,
            "res": self._reduce,
            "barrier": self._barrier,
            "sem_acquire": self._acquire,
            "sem_release": self._release,
            **dict.fromkeys(_SIGNALS, self._signal),
            **dict.fromkeys(_WAITS, self._wait),
        }
        if name not in handlers:
            raise UnsupportedError(
                f"the plan's operation {name!r} (rank {rank} block {block['id']}) has no "
                "counterpart in a program",
                hint="plans of put, signal, wait, copy, re, res, barriers and semaphores are read",
            )
        return handlers[name](rank, block, operation)

    # -- operations --------------------------------------------------------------------------

    def _put(self, rank: int, block: dict[str, Any], operation: dict[str, Any]) -> bool:
        self._put_chunks(rank, block, operation["src_buff"], operation["dst_buff"], operation)
        return True

    def _put_with_signal(self, rank: int, block: dict[str, Any], operation: dict[str, Any]) -> bool:
        self._put(rank, block, operation)
        return self._signal(rank, block, operation)

    def _put_chunks(
        self,
        rank: int,
        block: dict[str, Any],
        sources: list[dict[str, Any]],
        targets: list[dict[str, Any]],
        operation: dict[str, Any],
    ) -> None:
        kind = operation.get("channel_type", "memory")
        for source, target in zip(sources * len(targets), targets, strict=False):
            buffer = self._remote(rank, block, target["buffer_id"], kind)
            slot = (Buffer(buffer["type"]), int(target["index"]))
            put = _Put((Buffer(source["type"]), int(source["index"])), slot, int(target["size"]))
            self._channel_to(rank, int(buffer["rank"]), block, operation).pending.append(put)

    def _remote(self, rank: int, block: dict[str, Any], number: int, kind: str) -> dict[str, Any]:
        for group in block["remote_buffer_refs"]:
            if group["access_channel_type"] == kind:
                found: dict[str, Any] = self._gpus[rank]["remote_buffers"][
                    group["remote_buffer_ids"][number]
                ]
                return found
        raise DataError(f"rank {rank} block {block['id']} names no remote buffer {number}")

    def _channel_to(
        self, rank: int, peer: int, block: dict[str, Any], operation: dict[str, Any]
    ) -> _Channel:
        """Return the channel that a put's signal goes over: a memory put does not say it itself."""
        for key in self._keys(rank, block, operation.get("channel_ids"), operation):
            if key[1] == peer:
                return self._channels[key]
        for key in self._keys(rank, block, None, operation):
            if key[1] == peer:
                return self._channels[key]
        raise DataError(f"rank {rank} block {block['id']} has no channel to rank {peer}")

    def _keys(
        self,
        rank: int,
        block: dict[str, Any],
        numbers: list[int] | None,
        operation: dict[str, Any],
    ) -> list[tuple[int, int, str, int]]:
        kind = operation.get("channel_type", "memory")
        if kind == "switch":
            raise UnsupportedError(
                f"rank {rank} block {block['id']} uses a switch's multicast",
                hint="a program has only memory and port channels",
            )
        keys = []
        for group in block["channels"]:
            if group["channel_type"] == kind:
                listed = group["channel_ids"]
                chosen = listed if numbers is None else [listed[number] for number in numbers]
                for identity in chosen:
                    peer, ordinal = self._ends[rank][kind, identity]
                    keys.append((rank, peer, kind, ordinal))
        return keys

    def _signal(self, rank: int, block: dict[str, Any], operation: dict[str, Any]) -> bool:
        for key in self._keys(rank, block, operation["channel_ids"], operation):
            channel = self._channels[key]
            for put in channel.pending:
                self._act(rank, OpKind.SEND, put.source, None, put.count, key=("send", *key[1:]))
            channel.signalled.append(channel.pending)
            channel.pending = []
        return True

    def _wait(self, rank: int, block: dict[str, Any], operation: dict[str, Any]) -> bool:
        keys = self._keys(rank, block, operation["channel_ids"], operation)
        incoming = [self._channels[peer, rank, kind, number] for _, peer, kind, number in keys]
        if not all(channel.signalled for channel in incoming):
            return False
        for key, channel in zip(keys, incoming, strict=True):
            for put in channel.signalled.pop(0):
                way = ("receive", *key[1:])
                self._act(rank, OpKind.RECEIVE, None, put.target, put.count, key=way)
        return True

    def _copy(self, rank: int, block: dict[str, Any], operation: dict[str, Any]) -> bool:
        for source, target in zip(operation["src_buff"], operation["dst_buff"], strict=True):
            read = (Buffer(source["type"]), int(source["index"]))
            write = (Buffer(target["type"]), int(target["index"]))
            key = ("copy", -1, "memory", int(block["id"]))
            self._act(rank, OpKind.COPY, read, write, int(source["size"]), key=key)
        return True

    def _reduce(self, rank: int, block: dict[str, Any], operation: dict[str, Any]) -> bool:
        key = ("copy", -1, "memory", int(block["id"]))
        target, *remote = operation["dst_buff"]
        write, count = (Buffer(target["type"]), int(target["index"])), int(target["size"])
        reads = [(Buffer(part["type"]), int(part["index"])) for part in operation["src_buff"]]
        if write in reads:
            reads.remove(write)
        else:
            self._act(rank, OpKind.COPY, reads.pop(0), write, count, key=key)
        for read in reads:
            self._act(rank, OpKind.REDUCE, read, write, count, key=key)
        if remote:
            self._put_chunks(rank, block, [target], remote, operation)
        return True

    def _barrier(self, rank: int, block: dict[str, Any], operation: dict[str, Any]) -> bool:
        key, own = (rank, int(operation["barrier_id"])), int(block["id"])
        if own in self._passed[key]:
            self._passed[key].discard(own)
            return True
        self._barriers[key].add(own)
        if len(self._barriers[key]) < int(operation["num_threadblocks"]):
            return False
        self._passed[key] = self._barriers.pop(key) - {own}
        return True

    def _acquire(self, rank: int, _: dict[str, Any], operation: dict[str, Any]) -> bool:
        numbers = [(rank, int(number)) for number in operation["semaphore_ids"]]
        if any(self._semaphores[number] <= 0 for number in numbers):
            return False
        for number in numbers:
            self._semaphores[number] -= 1
        return True

    def _release(self, rank: int, _: dict[str, Any], operation: dict[str, Any]) -> bool:
        for number in operation["semaphore_ids"]:
            self._semaphores[rank, int(number)] += 1
        return True

    def _act(
        self,
        rank: int,
        kind: OpKind,
        read: Slot | None,
        write: Slot | None,
        count: int,
        *,
        key: tuple[str, int, str, int],
    ) -> None:
        way, peer, channel_type, number = key
        channel = 2 * number + (channel_type == "port")
        self._actions[rank].append(RankAction(kind, (way, peer, channel), read, write, count))
        for place in (read, write):
            if place is not None and place[0] is Buffer.SCRATCH:
                self._scratch[rank] = max(self._scratch[rank], place[1] + count)


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
