"""Algorithms made for a topology: TACCL and its sketches, trees, matching, flows."""

from fivefold.collectives.synthesis._flow import all_to_all_flow, all_to_all_optimum
from fivefold.collectives.synthesis._matching import matching
from fivefold.collectives.synthesis._sketch import Sketch, SwitchSketch, published_sketch
from fivefold.collectives.synthesis._sketched import derive_sketch
from fivefold.collectives.synthesis._synthesize import (
    Synthesis,
    SynthesisOptions,
    synthesize,
)
from fivefold.collectives.synthesis._taccl import taccl
from fivefold.collectives.synthesis._trees import spanning_trees

__all__ = [
    "Sketch",
    "SwitchSketch",
    "Synthesis",
    "SynthesisOptions",
    "all_to_all_flow",
    "all_to_all_optimum",
    "derive_sketch",
    "matching",
    "published_sketch",
    "spanning_trees",
    "synthesize",
    "taccl",
]
