"""Schedules as programs of thread blocks; files of other runtimes; an interpreter."""

from fivefold.collectives.lowering._check import ProgramReport, check_program
from fivefold.collectives.lowering._lower import lower
from fivefold.collectives.lowering._machine import Machine, interpret
from fivefold.collectives.lowering._mscclpp_in import from_mscclpp_json
from fivefold.collectives.lowering._mscclpp_out import to_mscclpp_json
from fivefold.collectives.lowering._order import Arrival, Executed, ProgramError, run_order
from fivefold.collectives.lowering._program import (
    Buffer,
    Operation,
    OpKind,
    Program,
    RankProgram,
    ThreadBlock,
)
from fivefold.collectives.lowering._xml import from_msccl_xml, to_msccl_xml

__all__ = [
    "Arrival",
    "Buffer",
    "Executed",
    "Machine",
    "OpKind",
    "Operation",
    "Program",
    "ProgramError",
    "ProgramReport",
    "RankProgram",
    "ThreadBlock",
    "check_program",
    "from_msccl_xml",
    "from_mscclpp_json",
    "interpret",
    "lower",
    "run_order",
    "to_msccl_xml",
    "to_mscclpp_json",
]
