"""Replicas on different processors have the same bits, though their kernels round differently.

Vector widths, fused multiply-adds, numbers of threads, alignments and sizes of pieces differ
between the ranks of one world, as they do between the machines of a mixed cluster.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.testing import free_port

RANK = Path(__file__).parent / "kernel_rank.py"
PROCESSORS = {
    "no vectors": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OMP_NUM_THREADS": "1",
        "PIECE_ELEMENTS": "262144",
        "FIRST_ELEMENT": "0",
    },
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OMP_NUM_THREADS": "2",
        "PIECE_ELEMENTS": "1000",
        "FIRST_ELEMENT": "3",
    },
    "its own": {"OMP_NUM_THREADS": "1", "PIECE_ELEMENTS": "4096", "FIRST_ELEMENT": "1"},
}


@pytest.mark.nightly
@pytest.mark.distributed
def test_ranks_with_different_kernels_have_the_same_bits():
    port = str(free_port())
    path = os.pathsep.join([str(RANK.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    ranks = [
        subprocess.Popen(
            [sys.executable, RANK, str(rank), str(len(PROCESSORS)), port],
            env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, settings in enumerate(PROCESSORS.values())
    ]
    try:
        outputs = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, error) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, error[-2000:]
    found = [json.loads(out) for out, _ in outputs]
    assert found[0]["capability"] == "DEFAULT"
    assert len({rank["capability"] for rank in found}) > 1, "this processor has no vectors"
    assert found[0]["digests"] == found[1]["digests"] == found[2]["digests"]
