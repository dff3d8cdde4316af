"""The kernels compiled for sm_90a without a GPU: what is in the machine code, and what it takes."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

SHARED_LIMIT_BYTES = 227 * 1024  # of a program on an H100 or H200
FUSED = {  # variant: the tensor-core instruction that must be there, most registers
    "bf16 swiglu": ("HGMMA.64x128x16.F32.BF16", 255),
    "bf16 relu": ("HGMMA.64x256x16.F32.BF16", 255),
    "fp32 relu tf32": ("HGMMA.64x128x8.F32.TF32", 255),
    "fp32 swiglu tf32": ("HGMMA.64x64x8.F32.TF32", 255),
    "fp32 swiglu tf32x3": ("HGMMA.64x32x8.F32.TF32", 255),
    "fp32 relu ieee": (None, 255),
    "bf16 swiglu, odd sizes": ("HGMMA.64x32x16.F32.BF16", 255),
    "bf16 geglu, 128 experts, 8 each": ("HGMMA.64x128x16.F32.BF16", 255),
}
SPLIT = ["count_kernel", "place_kernel", "first_kernel", "second_kernel", "combine_kernel"]
RELEASE = r"(?:atom|red)\.global\.gpu\.release"
ACQUIRE = r"(?:ld|atom)\.global\.gpu\.acquire"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "offline.py"), "forward"],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["variant"]: line for line in lines}


@pytest.mark.parametrize("variant", [*FUSED, *SPLIT])
def test_fits_the_machine_without_spills(compiled, variant, record_property, capsys):
    found = compiled[variant]
    for name in ("registers", "spilled_bytes", "shared_bytes", "products"):
        record_property(name, found[name])
    with capsys.disabled():
        size = f"{found['registers']} registers, {found['shared_bytes']} bytes shared"
        sys.stdout.write(f"\n  {variant}: {size}, {' '.join(found['products'])} ")
    assert found["spilled_bytes"] == 0
    assert not {"STL", "LDL"} & set(found["instructions"])
    assert found["registers"] <= FUSED.get(variant, (None, 255))[1]
    assert found["shared_bytes"] <= SHARED_LIMIT_BYTES


@pytest.mark.parametrize("variant", FUSED)
def test_uses_tensor_cores_and_asynchronous_copies(compiled, variant):
    found, wanted = compiled[variant], FUSED[variant][0]
    if wanted is None:  # ieee float32 has no tensor core: ordinary multiply-adds
        assert not found["products"]
        assert found["instructions"]["FFMA"] > 500
    else:
        assert wanted in found["products"]
    odd = "odd" in variant
    assert ("UTMALDG" in found["instructions"]) is not odd  # weights
    if not odd:
        assert found["instructions"]["LDGSTS"] > 0  # gathered rows


@pytest.mark.parametrize("variant", FUSED)
def test_hands_data_over_by_release_and_acquire(compiled, variant):
    """A barrier stands between stores and the release, and between the acquire and loads."""
    lines = compiled[variant]["ptx"].splitlines()
    releases = [place for place, line in enumerate(lines) if re.search(RELEASE, line)]
    acquires = [place for place, line in enumerate(lines) if re.search(ACQUIRE, line)]
    assert len(releases) == 4  # counted, placed, first product, second product
    assert len(acquires) >= 4  # the waits for them
    before = r"bar\.sync|st\.global"
    after = r"bar\.sync|ld\.global(?!\.gpu\.acquire)|cp\.async\.c"
    for place in releases:
        near = next(line for line in reversed(lines[:place]) if re.search(before, line))
        assert "bar.sync" in near
    for place in acquires:
        near = next(line for line in lines[place + 1 :] if re.search(after, line))
        assert "bar.sync" in near
    assert "ld.global.nc" not in compiled[variant]["ptx"]  # may not see what this launch wrote
