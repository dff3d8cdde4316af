"""Public test tools: an in-memory world of ranks and a world of real processes.

They stand in for nothing that is being tested: ``run_world`` exchanges real tensors between
threads, ``run_processes`` starts real processes that talk over gloo, and ``free_port`` names a port
for a server that is started a moment later.
"""

from __future__ import annotations

from fivefold.testing._ranks import InMemoryTransport, free_port, run_processes, run_world

__all__ = ["InMemoryTransport", "free_port", "run_processes", "run_world"]
