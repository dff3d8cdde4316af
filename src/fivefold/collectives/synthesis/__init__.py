"""Algorithms made for a topology: sketches, trees, exact search, matching, flows."""

from fivefold.collectives.synthesis._flow import FlowOptimum, all_to_all_optimum
from fivefold.collectives.synthesis._flow_schedule import all_to_all_flow
from fivefold.collectives.synthesis._front import (
    Attempt,
    Synthesis,
    SynthesisOptions,
    synthesize,
)
from fivefold.collectives.synthesis._k_synchronous import (
    ParetoFront,
    ParetoPoint,
    k_synchronous,
    pareto_synthesis,
)
from fivefold.collectives.synthesis._matching import matching
from fivefold.collectives.synthesis._search_result import SearchResult
from fivefold.collectives.synthesis._sketch import (
    Sketch,
    SwitchSketch,
    published_sketch,
    published_sketch_names,
)
from fivefold.collectives.synthesis._sketched import derive_sketch
from fivefold.collectives.synthesis._slotted import SlotModel, slot_length_s, slotted
from fivefold.collectives.synthesis._taccl import TacclResult, taccl
from fivefold.collectives.synthesis._trees import SpanningTree, TreePacking, spanning_trees

__all__ = [
    "Attempt",
    "FlowOptimum",
    "ParetoFront",
    "ParetoPoint",
    "SearchResult",
    "Sketch",
    "SlotModel",
    "SpanningTree",
    "SwitchSketch",
    "Synthesis",
    "SynthesisOptions",
    "TacclResult",
    "TreePacking",
    "all_to_all_flow",
    "all_to_all_optimum",
    "derive_sketch",
    "k_synchronous",
    "matching",
    "pareto_synthesis",
    "published_sketch",
    "published_sketch_names",
    "slot_length_s",
    "slotted",
    "spanning_trees",
    "synthesize",
    "taccl",
]
