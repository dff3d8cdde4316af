"""Schedules as programs of thread blocks; files of other runtimes; an interpreter."""

from fivefold.collectives.lowering._check import check_program
from fivefold.collectives.lowering._lower import lower
from fivefold.collectives.lowering._mscclpp import to_mscclpp_json
from fivefold.collectives.lowering._xml import from_msccl_xml, to_msccl_xml
from fivefold.collectives.lowering.machine import ProgramError, interpret
from fivefold.collectives.lowering.program import Program

__all__ = [
    "Program",
    "ProgramError",
    "check_program",
    "from_msccl_xml",
    "interpret",
    "lower",
    "to_msccl_xml",
    "to_mscclpp_json",
]
