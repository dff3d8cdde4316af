"""Algorithms made for a topology: sketches, trees, exact search, matching, flows."""

from fivefold.collectives.synthesis._k_synchronous import (
    ParetoFront,
    ParetoPoint,
    k_synchronous,
    pareto_synthesis,
)
from fivefold.collectives.synthesis._search_result import SearchResult
from fivefold.collectives.synthesis._sketch import Sketch, SwitchSketch
from fivefold.collectives.synthesis._sketched import derive_sketch
from fivefold.collectives.synthesis._slotted import SlotModel, slot_length_s, slotted
from fivefold.collectives.synthesis._taccl import TacclResult, taccl

__all__ = [
    "ParetoFront",
    "ParetoPoint",
    "SearchResult",
    "Sketch",
    "SlotModel",
    "SwitchSketch",
    "TacclResult",
    "derive_sketch",
    "k_synchronous",
    "pareto_synthesis",
    "slot_length_s",
    "slotted",
    "taccl",
]
