"""Public test tools: an in-memory world of ranks and a world of real processes.

They stand in for nothing that is being tested: ``run_world`` exchanges real tensors between
threads, ``run_processes`` starts real processes that talk over gloo.
"""

from __future__ import annotations

from fivefold.testing._processes import run_processes
from fivefold.testing._world import InMemoryTransport, run_world

__all__ = ["InMemoryTransport", "run_processes", "run_world"]
