"""The exchange compiled for sm_90a without a GPU: what is in the code, and what it takes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_LIMIT_BYTES = 227 * 1024
VARIANTS = {
    "compact, bf16 swiglu, 8 ranks": "HGMMA.64x128x16.F32.BF16",
    "DeepSeek-V3, 8 ranks, with the gate": "HGMMA.64x128x16.F32.BF16",
    "capacity, bf16 relu, 8 ranks": "HGMMA.64x128x16.F32.BF16",
    "compact, fp32 swiglu in tf32, 4 virtual ranks": "HGMMA.64x128x8.F32.TF32",
}
CUT = ("scatter_kernel", "gather_kernel")
BACKWARD = "8 ranks, bf16, backward: "
RELEASE = r"(?:atom|red)\.global\.{scope}\.(?:release|acq_rel)"
ACQUIRE = r"(?:ld|atom)\.global\.{scope}\.(?:acquire|acq_rel)"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "offline.py"), "exchange"],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {line["variant"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_every_variant_is_looked_at(compiled):
    assert set(compiled) == {*VARIANTS, *(BACKWARD + kernel for kernel in CUT)}


@pytest.mark.parametrize("variant", [*VARIANTS, *(BACKWARD + kernel for kernel in CUT)])
def test_fits_the_machine_without_spills(compiled, variant, record_property, capsys):
    found = compiled[variant]
    for name in ("registers", "spilled_bytes", "shared_bytes", "products"):
        record_property(name, found[name])
    with capsys.disabled():
        size = f"{found['registers']} registers, {found['shared_bytes']} bytes shared"
        sys.stdout.write(f"\n  {variant}: {size}, {' '.join(found['products'])} ")
    assert found["spilled_bytes"] == 0
    assert not {"STL", "LDL"} & set(found["instructions"])
    assert found["registers"] <= 255
    assert found["shared_bytes"] <= SHARED_LIMIT_BYTES


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_move_in_wide_accesses_and_products_use_tensor_cores(compiled, variant):
    found = compiled[variant]
    assert VARIANTS[variant] in found["products"]
    assert found["instructions"]["UTMALDG"] > 0  # weights
    assert found["instructions"]["LDGSTS"] > 0  # received rows
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?(0x[0-9a-f]+)", found["ptx"])
    assert set(copies) == {"0x10"}  # 16 bytes each
    assert len(re.findall(r"st\.global\.v4", found["ptx"])) >= 8  # dispatched and returned rows


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_hand_over_by_release_and_acquire_at_system_scope(compiled, variant):
    lines = compiled[variant]["ptx"].splitlines()
    compact = "capacity" not in variant
    words = [line for line in lines if re.search(r"atom\.global\.sys\.release\.exch\.b64", line)]
    returns = [line for line in lines if re.search(r"red\.global\.sys\.release\.add\.u32", line)]
    polls = [line for line in lines if re.search(r"atom\.global\.sys\.acquire\.add\.u64", line)]
    back = [line for line in lines if re.search(r"atom\.global\.sys\.acquire\.add\.u32", line)]
    assert len(words) >= 2  # announced, dispatched
    assert len(returns) >= 2  # a source's first and second row tile
    assert len(polls) >= (4 if compact else 2)  # counts, rows: each before and in a loop
    assert len(back) >= 2
    check_barriers(compiled[variant]["ptx"])


@pytest.mark.parametrize("kernel", CUT)
def test_the_halves_of_a_backward_hand_over_likewise(compiled, kernel):
    ptx = compiled[BACKWARD + kernel]["ptx"]
    check_barriers(ptx)
    if kernel == "scatter_kernel":  # announced, dispatched; counts and rows awaited
        assert len(re.findall(r"atom\.global\.sys\.release\.exch\.b64", ptx)) >= 2
        assert len(re.findall(r"atom\.global\.sys\.acquire\.add\.u64", ptx)) >= 4
    else:  # a source's first and second row tile; rows that come back awaited
        assert len(re.findall(r"red\.global\.sys\.release\.add\.u32", ptx)) >= 2
        assert len(re.findall(r"atom\.global\.sys\.acquire\.add\.u32", ptx)) >= 2
    assert len(re.findall(r"st\.global\.v4", ptx)) >= 1  # rows, 16 bytes at a time


def check_barriers(ptx):
    """A barrier stands between stores and the release, and between the acquire and loads."""
    lines = ptx.splitlines()
    before = r"bar\.sync|st\.global|st\.shared"
    after = r"bar\.sync|ld\.global(?!\.gpu|\.sys)|cp\.async\.c"
    for scope in ("gpu", "sys"):
        for place, line in enumerate(lines):
            if re.search(RELEASE.format(scope=scope), line):
                near = next(line for line in reversed(lines[:place]) if re.search(before, line))
                assert "bar.sync" in near, line
            if re.search(ACQUIRE.format(scope=scope), line):
                near = next(line for line in lines[place + 1 :] if re.search(after, line))
                assert "bar.sync" in near, line
    assert "ld.global.nc" not in ptx  # may not see what this launch wrote
    assert "globaltimer" in ptx  # waits end
    assert "nanosleep" in ptx
