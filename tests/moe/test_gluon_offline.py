"""The Gluon kernel compiled for sm_90a without a GPU: instructions, registers, hand-overs."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fivefold.moe._gluon import missing_gluon

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if "written for triton" in (missing_gluon(torch.device("cpu")) or ""):
    pytest.skip("another triton than the kernel is written for", allow_module_level=True)

VARIANTS = {  # and the tensor-core instruction that must be there
    "paper's shape, bf16 relu, biases": "HGMMA.64x256x16.F32.BF16",
    "Qwen3-30B-A3B, bf16 swiglu": "HGMMA.64x256x16.F32.BF16",
    "Qwen3-30B-A3B, bf16 geglu, biases": "HGMMA.64x256x16.F32.BF16",
    "one expert each, fp16 swiglu, weight on input": "HGMMA.64x256x16.F32",
}
SHARED_LIMIT_BYTES = 227 * 1024  # of a program on an H100 or H200
RING_BYTES = 4 * (128 + 256) * 64 * 2
RELEASE = r"(?:atom|red)\.global\.gpu\.release"
ACQUIRE = r"(?:ld|atom)\.global\.gpu\.acquire"
BARRIER = r"bar\.sync|bar\.warp\.sync|barrier\.sync"
ARRIVE = r"mbarrier\.arrive\.shared"
ANNOUNCE = r"mbarrier\.arrive\.expect_tx"
COPY_ENGINE = r"cp\.async\.bulk\.tensor\.2d\.shared"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "gluon_offline_cases.py")],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["variant"]: line for line in lines}


def nearest(lines, pattern):
    """The nearest of some lines in which a pattern is found."""
    return next(line for line in lines if re.search(pattern, line))


def places(lines, pattern):
    return [place for place, line in enumerate(lines) if re.search(pattern, line)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_fits_the_machine_without_spills(compiled, variant, record_property, capsys):
    found = compiled[variant]
    for name in ("registers", "spilled_bytes", "shared_bytes", "products"):
        record_property(name, found[name])
    with capsys.disabled():
        size = f"{found['registers']} registers, {found['shared_bytes']} bytes shared"
        sys.stdout.write(f"\n  gluon, {variant}: {size}, {' '.join(found['products'])} ")
    assert found["spilled_bytes"] == 0
    assert not {"STL", "LDL"} & set(found["instructions"])
    assert found["registers"] <= 168  # times 384 threads is what a multiprocessor has
    assert RING_BYTES < found["shared_bytes"] <= SHARED_LIMIT_BYTES


@pytest.mark.parametrize("variant", VARIANTS)
def test_roles_trade_registers(compiled, variant):
    """The products role has 216 registers a thread, the two others 72: 64,512 in all."""
    wanted = set(map(int, re.findall(r"setmaxnreg\.\w+\.\S+\s+(\d+)", compiled[variant]["ptx"])))
    assert {216, 72} <= wanted
    assert 216 * 256 + 72 * 128 <= 65_536
    assert compiled[variant]["instructions"]["USETMAXREG"] >= 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_multiplies_in_warp_groups_from_an_asynchronous_ring(compiled, variant):
    found = compiled[variant]
    assert any(product.startswith(VARIANTS[variant]) for product in found["products"])
    assert found["instructions"]["HGMMA"] == 4  # one main loop: a depth of 64 in steps of 16
    assert found["instructions"]["UTMALDG"] >= 2  # weights of both products
    assert found["instructions"]["LDGSTS"] > 0  # gathered rows
    assert found["instructions"]["SYNCS"] > 0  # mbarriers
    assert "HMMA" not in found["instructions"]
    # Asynchronous products, one of them in flight while the next operands are awaited.
    left = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", found["ptx"])
    assert set(left) == {"0", "1"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_programs_hand_over_by_release_and_acquire(compiled, variant):
    """A barrier of the role stands between stores and the release, and after the acquire."""
    lines = compiled[variant]["ptx"].splitlines()
    releases, acquires = places(lines, RELEASE), places(lines, ACQUIRE)
    assert len(releases) == 4  # counted, placed, first product, second product
    assert len(acquires) >= 4  # the waits for them
    for place in releases:
        assert re.search(BARRIER, nearest(reversed(lines[:place]), rf"{BARRIER}|st\.global"))
    after = rf"{BARRIER}|ld\.global(?!\.gpu\.acquire)|cp\.async\.c"
    for place in acquires:
        assert re.search(BARRIER, nearest(lines[place + 1 :], after))
    assert "ld.global.nc" not in compiled[variant]["ptx"]  # may not see what this launch wrote


@pytest.mark.parametrize("variant", VARIANTS)
def test_roles_hand_over_by_barriers(compiled, variant):
    """All warps of a role are through before one thread of it arrives at an mbarrier."""
    lines = compiled[variant]["ptx"].splitlines()
    arrivals = places(lines, ARRIVE)
    work = r"wgmma\.(?:mma|wait)|cp\.async\.(?:cg|wait)|fence\.proxy|[sl][td]\.shared"
    assert arrivals
    for place in arrivals:
        assert re.search(BARRIER, nearest(reversed(lines[:place]), rf"{BARRIER}|{work}"))
    waits = places(lines, r"cp\.async\.wait_group")
    assert waits
    for place in waits:  # copies that have ended are made known to the async proxy first
        assert "fence.proxy.async" in nearest(lines[place:], rf"fence\.proxy\.async|{ARRIVE}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_are_announced_before_the_copy_engine_is_asked(compiled, variant):
    lines = compiled[variant]["ptx"].splitlines()
    announced = [int(lines[p].split(",")[-1].strip(" ;")) for p in places(lines, ANNOUNCE)]
    assert announced == [256 * 64 * 2] * 2
    for place in places(lines, COPY_ENGINE):
        assert re.search(ANNOUNCE, nearest(reversed(lines[:place]), rf"{ANNOUNCE}|{ARRIVE}"))
