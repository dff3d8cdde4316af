"""Run PyTorch's own tests of a distributed backend in forked ranks: ``torch_suite.py BACKEND [TEST...]``.

Prints one JSON object: the outcome of each test by name, ``"passed"``, ``"skipped"``, or the last
line of what went wrong. Under ``fivefold`` every collective with algorithms of its own is forced to
take one. Torch decides by the backend's name what a backend can do, when its tests are imported:
they are imported under gloo's, and run under the one asked for.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
import unittest
from unittest import mock

ALGORITHMS = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "all_to_all": "pairwise",
    "broadcast": "binary_tree",
}


def _imported():
    """Torch's module of tests, which asks the environment what it tests."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "4", "TEMP_DIR": tempfile.mkdtemp()}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    if "expecttest" not in sys.modules:  # torch's base class wants it; none of these tests uses it
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def _under(module, backend):
    """Let the tests run on another backend than the one that they were imported for."""
    import torch.distributed as dist

    from fivefold.collectives.execution import configure

    configure(algorithms=ALGORITHMS)
    module.BACKEND = backend
    # Not for sends and receives, which are gloo's, and so are their events.
    module.PROFILING_SUPPORTED_BACKENDS.append(backend)
    c10d, monitored = dist.distributed_c10d, dist.monitored_barrier

    def monitored_barrier(*args, **kwargs):  # torch asks for gloo's name, not for the method
        with mock.patch.object(c10d, "get_backend", lambda *_: "gloo"):
            return monitored(*args, **kwargs)

    dist.monitored_barrier = monitored_barrier


def _case(module):
    import torch

    class Case(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Case


def main(backend, names):
    """Run the tests; all of them where none is named."""
    module = _imported()
    if backend != "gloo":
        _under(module, backend)
    case = _case(module)
    outcomes = {}
    for name in names or unittest.TestLoader().getTestCaseNames(case):
        result = unittest.TestResult()
        with mock.patch.object(sys, "stdout", sys.stderr):
            case(name).run(result)
        wrong = [text for _, text in (*result.errors, *result.failures)]
        outcomes[name] = (
            wrong[0].strip().splitlines()[-1][:300]
            if wrong
            else ("skipped" if result.skipped else "passed")
        )
        print(name, outcomes[name], file=sys.stderr, flush=True)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
