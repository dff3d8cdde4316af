"""MSCCL XML out and in.

Names are those that MSCCL's own parser asks for (the executor for NCCL of 2024). Older files are
read as well: ``op`` in place of ``step``, ``copy`` elements, ``reduce_scatter``. Files come from
outside: document types and entities are refused, and errors name the element and its line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree as ET

from fivefold.collectives.lowering._check import check_program
from fivefold.collectives.lowering.machine import ProgramError
from fivefold.collectives.lowering.program import (
    MSCCL_TARGETS,
    Buffer,
    Operation,
    OpKind,
    Program,
    RankProgram,
    Target,
    ThreadBlock,
)
from fivefold.collectives.schedules import Collective, named_collective
from fivefold.errors import (
    ConfigurationError,
    InfeasibleError,
    UnsupportedError,
    require_one_of,
)
from fivefold.files import XmlElement, parse_xml, read_text

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
_MAX_COUNT, _MAX_CHANNELS, _MAX_BLOCKS_OF_CHANNEL = 71, 32, 32
_MAX_NODES = 4095  # one less than the parser's table, for it looks for room before each end tag
_MAX_AWAITED, _MAX_SLOTS = 127, 1 << 15  # blocks waited for in 8 bits, offsets in 16, with signs
_LARGEST = 1 << 31


# Chunks that a queue holds: of NCCL's eight buffers a chunk takes four in Simple, else one.
_QUEUE_SLOTS = {"Simple": 2, "LL": 8, "LL128": 8}


# -- out -----------------------------------------------------------------------------------------


def to_msccl_xml(program: Program, *, check_limits: bool = True, target: str = "executor") -> str:
    """Write the program as an MSCCL XML file, proved with :func:`check_program` for its queues.

    Args:
        program: The program.
        check_limits: Refuse what MSCCL's interpreter could not load.
        target: The build whose limits are meant, one of `MSCCL_TARGETS`.

    Raises:
        ConfigurationError: There is no such target.
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
    require_one_of(target, MSCCL_TARGETS, f"there is no target {target!r}")
    if check_limits:
        _require_limits(program, MSCCL_TARGETS[target])
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
    algorithm = ET.Element("algo", _texts(attributes))
    for rank, sizes in enumerate(program.ranks):
        _add_gpu(algorithm, rank, sizes)
    ET.indent(algorithm)
    return ET.tostring(algorithm, encoding="unicode") + "\n"


def _chunks_per_loop(collective: Collective) -> int:
    """Return the chunks that MSCCL divides a buffer into, before it multiplies them by N."""
    if collective.name in {"all_to_all", "gather", "scatter"}:
        return max(collective.num_chunks // collective.num_ranks, 1)
    return collective.num_chunks


def _add_gpu(algorithm: ET.Element, rank: int, sizes: RankProgram) -> None:
    slots = {
        "i_chunks": sizes.input_slots,
        "o_chunks": sizes.output_slots,
        "s_chunks": sizes.scratch_slots,
    }
    gpu = ET.SubElement(algorithm, "gpu", _texts({"id": rank} | slots))
    awaited = {
        (operation.wait_block, operation.wait_step)
        for block in sizes.blocks
        for operation in block.operations
    }
    for number, block in enumerate(sizes.blocks):
        peers = {"send": block.send_peer, "recv": block.receive_peer, "chan": block.channel}
        one = ET.SubElement(gpu, "tb", _texts({"id": number} | peers))
        for step, operation in enumerate(block.operations):
            attributes = {
                "s": step,
                "type": operation.kind,
                "srcbuf": operation.source,
                "srcoff": operation.source_offset,
                "dstbuf": operation.target,
                "dstoff": operation.target_offset,
                "cnt": operation.count if operation.kind is not OpKind.NOP else 0,
                "depid": operation.wait_block,
                "deps": operation.wait_step,
                "hasdep": int((number, step) in awaited),
            }
            ET.SubElement(one, "step", _texts(attributes))


def _texts(attributes: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in attributes.items()}


def _require_limits(program: Program, target: Target) -> None:
    for what, value, limit, remedy in _limits(program, target):
        if value > limit:
            raise InfeasibleError(
                f"MSCCL ({target.name}) runs at most {limit} {what}; the program has {value}",
                hint=remedy,
            )


def _limits(program: Program, target: Target) -> Iterator[tuple[str, int, int, str]]:
    yield "channels", program.num_channels, _MAX_CHANNELS, "use fewer channels or instances"
    fewer = "use fewer chunks; another --target may have larger limits"
    for rank, sizes in enumerate(program.ranks):
        where = f"of rank {rank}"
        yield f"thread blocks {where}", len(sizes.blocks), target.most_blocks, "use fewer channels"
        # The file's other ranks are elements, too, without what is in them.
        nodes = 1 + program.num_ranks + len(sizes.blocks) + sizes.num_operations
        yield f"XML elements {where}", nodes, _MAX_NODES, "use fewer chunks"
        slots = max(sizes.input_slots, sizes.output_slots, sizes.scratch_slots)
        yield f"chunks in a buffer {where}", slots, _MAX_SLOTS, "use fewer chunks"
        waits = (operation.wait_block for block in sizes.blocks for operation in block.operations)
        what = f"as the number of a block that is waited for {where}"
        yield what, max(waits, default=-1), _MAX_AWAITED, "use fewer channels"
        users: Counter[tuple[int, str]] = Counter()
        for number, block in enumerate(sizes.blocks):
            steps = len(block.operations)
            yield f"steps in block {number} {where}", steps, target.most_steps, fewer
            counts = max((operation.count for operation in block.operations), default=0)
            yield f"chunks in one step {where}", counts, _MAX_COUNT, "lower with max_count=64"
            users[block.channel, "sends"] += block.send_peer >= 0
            users[block.channel, "receives"] += block.receive_peer >= 0
        for (channel, way), count in users.items():
            what = f"blocks with {way} on channel {channel} {where}"
            yield what, count, _MAX_BLOCKS_OF_CHANNEL, "use more channels"


# -- in ------------------------------------------------------------------------------------------


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
    text = str(source) if given else read_text(source, what="program")
    root = parse_xml(text, where="the algorithm", check=_check_place)
    num_ranks = _integer(root, "ngpus", least=1, most=1 << 16)
    gpus = _numbered(root, root.children, "id", "gpu", most=num_ranks - 1)
    if len(gpus) != num_ranks:
        _fail(root, f"gpu {len(gpus)} of {num_ranks} is missing")
    ranks = tuple(_rank_program(gpu, num_ranks) for gpu in gpus)
    if collective is None:
        collective = _collective_of(root, ranks)
    in_place = _integer(root, "inplace", default=0) and not _integer(root, "outofplace", default=0)
    ranks = tuple(
        replace(  # files may leave out what a rank does not touch
            program,
            input_slots=max(program.input_slots, int(collective.input_slots[rank])),
            output_slots=max(program.output_slots, int(collective.output_slots[rank])),
        )
        for rank, program in enumerate(ranks)
    )
    try:
        return Program(
            collective,
            ranks,
            name=root.attributes.get("name", "program"),
            in_place=bool(in_place) and collective.name not in {"all_to_all", "gather", "scatter"},
            protocol=root.attributes.get("proto", "Simple"),
            min_bytes=_integer(root, "minBytes", default=0, most=1 << 62),
            max_bytes=max(_integer(root, "maxBytes", default=0, least=-1, most=1 << 62), 0),
        )
    except ConfigurationError as error:
        _fail(root, error.message)


def _check_place(element: XmlElement, parent: XmlElement) -> None:
    if element.tag not in _ALLOWED[parent.tag]:
        allowed = " or ".join(sorted(_ALLOWED[parent.tag])) or "nothing"
        _fail(element, f"it may not stand here: '{parent.tag or 'file'}' holds {allowed}")


def _fail(element: XmlElement, what: str) -> NoReturn:
    raise ProgramError(f"line {element.line}, <{element.tag}>: {what}")


def _integer(
    element: XmlElement,
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


def _numbered(
    parent: XmlElement,
    children: list[XmlElement],
    attribute: str,
    what: str,
    *,
    most: int = 1 << 16,
) -> list[XmlElement]:
    """Return elements in the order of their numbers, which count from 0."""
    found: dict[int, XmlElement] = {}
    for child in children:
        number = _integer(child, attribute, most=most)
        if number in found:
            _fail(child, f"there are two {what}s with {attribute} {number}")
        found[number] = child
    for number in range(len(found)):
        if number not in found:
            _fail(parent, f"{what} {number} is missing: they count from 0")
    return [found[number] for number in range(len(found))]


def _rank_program(gpu: XmlElement, num_ranks: int) -> RankProgram:
    sizes = [_integer(gpu, f"{b}_chunks", default=0, most=1 << 20) for b in "ios"]
    blocks = [child for child in gpu.children if child.tag == "tb"]
    blocks = _numbered(gpu, blocks, "id", "thread block")
    programs = [_thread_block(block, num_ranks) for block in blocks]
    copies = tuple(_copy(element) for element in gpu.children if element.tag == "copy")
    if copies:
        programs.append(ThreadBlock(copies))
    return RankProgram(tuple(programs), *sizes)


def _copy(element: XmlElement) -> Operation:
    return Operation(
        OpKind.COPY,
        Buffer.INPUT,
        _integer(element, "i_off"),
        Buffer.OUTPUT,
        _integer(element, "o_off"),
        _integer(element, "cnt", default=1, least=1),
    )


def _thread_block(element: XmlElement, num_ranks: int) -> ThreadBlock:
    return ThreadBlock(
        tuple(_operation(step) for step in _numbered(element, element.children, "s", "step")),
        send_peer=_integer(element, "send", least=-1, most=num_ranks - 1),
        receive_peer=_integer(element, "recv", least=-1, most=num_ranks - 1),
        channel=_integer(element, "chan", default=0, most=1 << 10),
    )


def _operation(element: XmlElement) -> Operation:
    kind = element.attributes.get("type")
    if kind not in set(OpKind):
        _fail(element, f"type={kind!r} is none of {', '.join(OpKind)}")
    for name in ("srcbuf", "dstbuf"):
        if (text := element.attributes.get(name, "i")) not in set(Buffer):
            _fail(element, f"{name}={text!r} is none of i, o, s")
    wait_block = _integer(element, "depid", default=-1, least=-1)
    wait_step = _integer(element, "deps", default=-1, least=-1)
    return Operation(
        OpKind(kind),
        Buffer(element.attributes.get("srcbuf", "i")),
        _integer(element, "srcoff", default=0, least=-1),
        Buffer(element.attributes.get("dstbuf", "i")),
        _integer(element, "dstoff", default=0, least=-1),
        max(_integer(element, "cnt", default=1), 1) if kind == "nop" else _integer(element, "cnt"),
        wait_block,
        wait_step if wait_block >= 0 else -1,
    )


def _collective_of(root: XmlElement, ranks: tuple[RankProgram, ...]) -> Collective:
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
