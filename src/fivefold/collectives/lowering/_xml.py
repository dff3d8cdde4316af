"""MSCCL XML out and in.

The element and attribute names are those that MSCCL's own parser asks for (the executor for NCCL
of 2024), which is stricter than older ones: it requires ``minBytes``, ``maxBytes``, ``inplace``
and ``outofplace``. Older files are read as well: ``op`` in place of ``step``, ``copy`` elements,
``reduce_scatter``. Files come from outside: document types and entities are refused, and every
error names the element and its line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn
from xml.parsers import expat
from xml.sax.saxutils import quoteattr

from fivefold.collectives.lowering._check import check_program
from fivefold.collectives.lowering.machine import ProgramError
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
from fivefold.files import read_text

MSCCL_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_to_all": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
_READ = {theirs: ours for ours, theirs in MSCCL_NAMES.items()}
_READ["reduce_scatter"] = "reduce_scatter"  # TACCL writes it so
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_ALLOWED = {
    "": {"algo"},
    "algo": {"gpu"},
    "gpu": {"tb", "copy"},
    "tb": {"step", "op"},
    "step": set(),
    "op": set(),
    "copy": set(),
}
_MAX_COUNT, _MAX_CHANNELS, _MAX_STEPS = 71, 32, 256
_MAX_BLOCKS_OF_CHANNEL, _MAX_BLOCKS, _MAX_NODES = 32, 1024, 4096
_LARGEST = 1 << 31
# Chunks that a queue holds: of NCCL's eight buffers a chunk takes four in Simple, else one.
_QUEUE_SLOTS = {"Simple": 2, "LL": 8, "LL128": 8}


# -- out -----------------------------------------------------------------------------------------


def to_msccl_xml(program: Program, *, check_limits: bool = True) -> str:
    """Write the program as an MSCCL XML file, proved with :func:`check_program` for its queues.

    Args:
        program: The program.
        check_limits: Refuse what MSCCL's interpreter could not load.

    Raises:
        UnsupportedError: MSCCL has no such collective.
        InfeasibleError: The program exceeds a limit of MSCCL's interpreter; names it.
        ProgramError: The program is wrong, or it deadlocks with the queues of its protocol.

    Examples:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.lowering import lower
        >>> from fivefold.collectives.schedules import all_gather
        >>> to_msccl_xml(lower(build_algorithm("ring", all_gather(2)))).splitlines()[1].strip()
        '<gpu id="0" i_chunks="1" o_chunks="2" s_chunks="0">'
    """
    collective = program.collective
    if collective.name not in MSCCL_NAMES:
        raise UnsupportedError(
            f"MSCCL has no collective {collective.name!r}", hint=f"it has {', '.join(MSCCL_NAMES)}"
        )
    if check_limits:
        _require_limits(program)
    check_program(program, queue_slots=_QUEUE_SLOTS[program.protocol])
    attributes: dict[str, object] = {
        "name": program.name,
        "nchunksperloop": _chunks_per_loop(collective),
        "nchannels": max(program.num_channels, 1),
        "ngpus": program.num_ranks,
        "proto": program.protocol,
        "coll": MSCCL_NAMES[collective.name],
        "redop": "sum" if collective.reducing else "nop",
        "inplace": int(program.in_place),
        "outofplace": int(not program.in_place),
        "minBytes": program.min_bytes,
        "maxBytes": program.max_bytes,
    }
    if collective.root is not None:
        attributes["root"] = collective.root  # ours: MSCCL's files do not say it
    lines = [_open("algo", attributes, level=0)]
    for rank in range(program.num_ranks):
        lines += _gpu_lines(program, rank)
    lines.append("</algo>")
    return "\n".join(lines) + "\n"


def _chunks_per_loop(collective: Collective) -> int:
    """Return the chunks that MSCCL divides a buffer into, before it multiplies them by N."""
    if collective.name in {"all_to_all", "gather", "scatter"}:
        chunks = collective.num_chunks // collective.num_ranks
        return max(chunks, 1)
    return collective.num_chunks


def _gpu_lines(program: Program, rank: int) -> list[str]:
    sizes = program.ranks[rank]
    slots = {"i": sizes.input_slots, "o": sizes.output_slots, "s": sizes.scratch_slots}
    lines = [_open("gpu", {"id": rank} | {f"{b}_chunks": n for b, n in slots.items()}, level=1)]
    awaited = {
        (operation.wait_block, operation.wait_step)
        for block in sizes.blocks
        for operation in block.operations
    }
    for number, block in enumerate(sizes.blocks):
        peers = {"send": block.send_peer, "recv": block.receive_peer, "chan": block.channel}
        lines.append(_open("tb", {"id": number} | peers, level=2))
        for step, operation in enumerate(block.operations):
            attributes = {
                "s": step,
                "type": operation.kind.value,
                "srcbuf": operation.source.value,
                "srcoff": operation.source_offset,
                "dstbuf": operation.target.value,
                "dstoff": operation.target_offset,
                "cnt": operation.count if operation.kind is not OpKind.NOP else 0,
                "depid": operation.wait_block,
                "deps": operation.wait_step,
                "hasdep": int((number, step) in awaited),
            }
            lines.append(_open("step", attributes, level=3, closed=True))
        lines.append("    </tb>")
    return [*lines, "  </gpu>"]


def _open(tag: str, attributes: Mapping[str, object], *, level: int, closed: bool = False) -> str:
    words = " ".join(f"{name}={quoteattr(str(value))}" for name, value in attributes.items())
    return f"{'  ' * level}<{tag} {words}{'/' if closed else ''}>"


def _require_limits(program: Program) -> None:
    found = [
        ("channels", program.num_channels, _MAX_CHANNELS, "use fewer channels or instances"),
        *_block_limits(program),
    ]
    for what, value, limit, remedy in found:
        if value > limit:
            raise InfeasibleError(
                f"MSCCL runs at most {limit} {what}; the program has {value}", hint=remedy
            )


def _block_limits(program: Program) -> Iterator[tuple[str, int, int, str]]:
    for rank, sizes in enumerate(program.ranks):
        where = f"of rank {rank}"
        yield f"thread blocks {where}", len(sizes.blocks), _MAX_BLOCKS, "use fewer channels"
        nodes = 2 + len(sizes.blocks) + sizes.num_operations
        yield f"XML elements {where}", nodes, _MAX_NODES, "use fewer chunks"
        users: dict[tuple[int, str], int] = {}
        for number, block in enumerate(sizes.blocks):
            steps = len(block.operations)
            yield f"steps in block {number} {where}", steps, _MAX_STEPS, "use fewer chunks"
            counts = max((operation.count for operation in block.operations), default=0)
            yield f"chunks in one step {where}", counts, _MAX_COUNT, "lower with max_count=64"
            for way, peer in (("sends", block.send_peer), ("receives", block.receive_peer)):
                if peer >= 0:
                    users[block.channel, way] = users.get((block.channel, way), 0) + 1
        for (channel, way), count in users.items():
            what = f"blocks with {way} on channel {channel} {where}"
            yield what, count, _MAX_BLOCKS_OF_CHANNEL, "use more channels"


# -- in ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Element:
    tag: str
    attributes: dict[str, str]
    line: int
    children: list[_Element] = field(default_factory=list)


def from_msccl_xml(source: str | Path, *, collective: Collective | None = None) -> Program:
    """Read an MSCCL XML file.

    Args:
        source: A path, or the text itself (it begins with ``<``).
        collective: What the file computes, where it does not say it or says it in a way that
            cannot be told from a name; None takes it from the file.

    Returns:
        The program, not yet checked: see :func:`check_program`.

    Raises:
        DataError: The file is damaged, or says something that is not allowed; names the element
            and its line.

    Examples:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.lowering import check_program, lower
        >>> from fivefold.collectives.schedules import all_gather
        >>> text = to_msccl_xml(lower(build_algorithm("ring", all_gather(3))))
        >>> check_program(from_msccl_xml(text)).num_messages
        6
    """
    given = isinstance(source, str) and source.lstrip().startswith("<")
    root = _parse(str(source) if given else read_text(source, what="program"))
    num_ranks = _integer(root, "ngpus", least=1, most=1 << 16)
    programs: dict[int, RankProgram] = {}
    for element in root.children:
        rank = _integer(element, "id", least=0, most=num_ranks - 1)
        if rank in programs:
            _fail(element, f"there are two gpus with id {rank}")
        programs[rank] = _rank_program(element, num_ranks)
    missing = sorted(set(range(num_ranks)) - set(programs))
    if missing:
        _fail(root, f"gpu {missing[0]} of {num_ranks} is missing")
    ranks = tuple(programs[rank] for rank in range(num_ranks))
    if collective is None:
        collective = _collective_of(root, ranks)
    in_place = _integer(root, "inplace", default=0) and not _integer(root, "outofplace", default=0)
    try:
        return Program(
            collective,
            _with_slots(collective, ranks),
            name=root.attributes.get("name", "program"),
            in_place=bool(in_place) and collective.name not in {"all_to_all", "gather", "scatter"},
            protocol=root.attributes.get("proto", "Simple"),
            min_bytes=_integer(root, "minBytes", default=0, most=1 << 62),
            max_bytes=max(_integer(root, "maxBytes", default=0, least=-1, most=1 << 62), 0),
        )
    except ConfigurationError as error:
        _fail(root, error.message)


def _parse(text: str) -> _Element:
    parser = expat.ParserCreate()
    top = _Element("", {}, 1)
    stack = [top]

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = _Element(tag, attributes, parser.CurrentLineNumber)
        if tag not in _ALLOWED[stack[-1].tag]:
            allowed = " or ".join(sorted(_ALLOWED[stack[-1].tag])) or "nothing"
            _fail(element, f"it may not stand here: '{stack[-1].tag or 'file'}' holds {allowed}")
        stack[-1].children.append(element)
        stack.append(element)

    def refuse(*_: object) -> None:
        raise DataError(
            f"line {parser.CurrentLineNumber}: a document type or an entity is declared",
            hint="an algorithm needs neither; remove the declaration",
        )

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: stack.pop()
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise DataError(f"line {error.lineno}: this is no XML: {error}") from error
    return top.children[0]


def _fail(element: _Element, what: str) -> NoReturn:
    raise ProgramError(f"line {element.line}, <{element.tag}>: {what}")


def _integer(
    element: _Element,
    name: str,
    *,
    default: int | None = None,
    least: int = 0,
    most: int = _LARGEST,
) -> int:
    text = element.attributes.get(name)
    if text is None:
        if default is None:
            _fail(element, f"the attribute '{name}' is missing")
        return default
    try:
        value = int(text)
    except ValueError:
        _fail(element, f"{name}={text!r} is no whole number")
    if not least <= value <= most:
        _fail(element, f"{name}={value} is not in {least} to {most}")
    return value


def _rank_program(gpu: _Element, num_ranks: int) -> RankProgram:
    sizes = [_integer(gpu, f"{b}_chunks", default=0, most=1 << 20) for b in "ios"]
    by_id: dict[int, ThreadBlock] = {}
    for element in gpu.children:
        if element.tag != "tb":
            continue
        number = _integer(element, "id", most=_MAX_BLOCKS * 4)
        if number in by_id:
            _fail(element, f"there are two thread blocks with id {number}")
        by_id[number] = _thread_block(element, num_ranks)
    if sorted(by_id) != list(range(len(by_id))):
        gap = next(number for number in range(len(by_id)) if number not in by_id)
        _fail(gpu, f"thread block {gap} is missing: ids count from 0")
    blocks = [by_id[number] for number in range(len(by_id))]
    copies = tuple(_copy(element) for element in gpu.children if element.tag == "copy")
    if copies:
        blocks.append(ThreadBlock(copies))
    return RankProgram(tuple(blocks), sizes[0], sizes[1], sizes[2])


def _copy(element: _Element) -> Operation:
    return Operation(
        OpKind.COPY,
        Buffer.INPUT,
        _integer(element, "i_off"),
        Buffer.OUTPUT,
        _integer(element, "o_off"),
        _integer(element, "cnt", default=1, least=1),
    )


def _thread_block(element: _Element, num_ranks: int) -> ThreadBlock:
    steps: dict[int, Operation] = {}
    for child in element.children:
        number = _integer(child, "s")
        if number in steps:
            _fail(child, f"there are two steps {number}")
        steps[number] = _operation(child)
    if sorted(steps) != list(range(len(steps))):
        gap = next(number for number in range(len(steps)) if number not in steps)
        _fail(element, f"step {gap} is missing: steps count from 0")
    return ThreadBlock(
        tuple(steps[number] for number in range(len(steps))),
        send_peer=_integer(element, "send", least=-1, most=num_ranks - 1),
        receive_peer=_integer(element, "recv", least=-1, most=num_ranks - 1),
        channel=_integer(element, "chan", default=0, most=1 << 10),
    )


def _operation(element: _Element) -> Operation:
    kind = element.attributes.get("type")
    if kind not in set(OpKind):
        _fail(element, f"type={kind!r} is none of {', '.join(OpKind)}")
    buffers = []
    for name in ("srcbuf", "dstbuf"):
        text = element.attributes.get(name, "i")
        if text not in set(Buffer):
            _fail(element, f"{name}={text!r} is none of i, o, s")
        buffers.append(Buffer(text))
    wait_block = _integer(element, "depid", default=-1, least=-1)
    wait_step = _integer(element, "deps", default=-1, least=-1)
    return Operation(
        OpKind(kind),
        buffers[0],
        _integer(element, "srcoff", default=0, least=-1),
        buffers[1],
        _integer(element, "dstoff", default=0, least=-1),
        max(_integer(element, "cnt", default=1), 1) if kind == "nop" else _integer(element, "cnt"),
        wait_block,
        wait_step if wait_block >= 0 else -1,
    )


def _collective_of(root: _Element, ranks: tuple[RankProgram, ...]) -> Collective:
    name = root.attributes.get("coll", "")
    if name not in _READ:
        _fail(
            root,
            f"coll={name!r} is none of {', '.join(sorted(_READ))}; pass collective=... to say it",
        )
    plain = _READ[name]
    count = len(ranks)
    inputs = max(rank.input_slots for rank in ranks)
    outputs = max(rank.output_slots for rank in ranks)
    chunks = _integer(root, "nchunksperloop", default=max(inputs, outputs), least=1, most=1 << 20)
    if plain in _ROOTED or plain == "all_reduce":
        start = _integer(root, "root", default=0, most=count - 1) if plain in _ROOTED else 0
        if plain in {"gather", "scatter"}:
            chunks = max(max(inputs, outputs) // count, 1)
        return named_collective(plain, count, chunks=chunks, root=start)
    if chunks % count:
        _fail(root, f"nchunksperloop={chunks} is no multiple of the {count} gpus")
    return named_collective(plain, count, chunks=max(chunks // count, 1))


def _with_slots(collective: Collective, ranks: tuple[RankProgram, ...]) -> tuple[RankProgram, ...]:
    """Give buffers the collective's size: files may leave out what a rank does not touch."""
    return tuple(
        replace(
            program,
            input_slots=max(program.input_slots, int(collective.input_slots[rank])),
            output_slots=max(program.output_slots, int(collective.output_slots[rank])),
        )
        for rank, program in enumerate(ranks)
    )
