"""The backward's kernels compiled for sm_90a without a GPU: what is in the machine code."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

SHARED_LIMIT_BYTES = 227 * 1024  # of a program on an H100 or H200
TENSOR_CORES = {  # variant: the instruction that must be there
    "hidden": "HGMMA.64x128x16.F32.BF16",
    "d_hidden": "HGMMA.64x128x16.F32.BF16",
    "d_x": "HGMMA.64x256x16.F32.BF16",
    "d_w13": "HGMMA.64x256x16.F32.BF16",
    "d_w2": "HGMMA.64x256x16.F32.BF16",
    "d_hidden, bf16 geglu, 128 experts, 8 each": "HGMMA.64x128x16.F32.BF16",
    "d_hidden, bf16, weights on the input": "HGMMA.64x128x16.F32.BF16",
    "d_w13, bf16, weights on the input": "HGMMA.64x256x16.F32.BF16",
    "d_hidden, fp32 tf32": "HGMMA.64x64x8.F32.TF32",
    "d_x, fp32 tf32": "HGMMA.64x128x8.F32.TF32",
    "d_w13, fp32 tf32": "HGMMA.64x128x8.F32.TF32",
    "d_w2, fp32 tf32": "HGMMA.64x128x8.F32.TF32",
    "d_hidden, bf16, odd sizes": "HGMMA.64x32x16.F32.BF16",
    "d_x, bf16, odd sizes": "HGMMA.64x32x16.F32.BF16",
    "d_w13, bf16, odd sizes": "HGMMA.64x32x16.F32.BF16",
    "d_w2, bf16, odd sizes": "HGMMA.64x32x16.F32.BF16",
    "forward that keeps": "HGMMA.64x128x16.F32.BF16",
}
ORDINARY = ["d_hidden, fp32 ieee", "d_x, fp32 ieee", "d_w13, fp32 ieee", "d_w2, fp32 ieee"]
SMALL = ["ranges", "d_b13", "d_b2", "d_weights"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "offline.py"), "backward"],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["variant"]: line for line in lines}


@pytest.mark.parametrize("variant", [*TENSOR_CORES, *ORDINARY, *SMALL])
def test_fits_the_machine_without_spills(compiled, variant, record_property, capsys):
    found = compiled[variant]
    for name in ("registers", "spilled_bytes", "shared_bytes", "products"):
        record_property(name, found[name])
    with capsys.disabled():
        size = f"{found['registers']} registers, {found['shared_bytes']} bytes shared"
        sys.stdout.write(f"\n  {variant}: {size}, {' '.join(found['products'])} ")
    assert found["spilled_bytes"] == 0
    assert not {"STL", "LDL"} & set(found["instructions"])
    assert found["registers"] <= (64 if variant in SMALL else 255)
    assert found["shared_bytes"] <= SHARED_LIMIT_BYTES


@pytest.mark.parametrize("variant", TENSOR_CORES)
def test_uses_tensor_cores_and_asynchronous_copies(compiled, variant):
    found = compiled[variant]
    assert TENSOR_CORES[variant] in found["products"]
    if "odd" in variant:
        return
    by_descriptor = not variant.startswith(("d_w13", "d_w2"))  # those read rows only
    assert ("UTMALDG" in found["instructions"]) is by_descriptor
    assert found["instructions"]["LDGSTS"] > 0  # rows


@pytest.mark.parametrize("variant", ORDINARY)
def test_ieee_is_ordinary_arithmetic(compiled, variant):
    assert not compiled[variant]["products"]
    assert compiled[variant]["instructions"]["FFMA"] > 200


def test_adds_nothing_up_atomically_and_reads_nothing_past_what_it_wrote(compiled):
    for variant, found in compiled.items():
        if variant != "forward that keeps":  # tickets and flags
            assert not {"ATOMG", "ATOM", "RED", "REDG"} & set(found["instructions"]), variant
        assert "ld.global.nc" not in found["ptx"], variant  # d_hidden works in place


def test_every_variant_is_looked_at(compiled):
    assert set(compiled) == {*TENSOR_CORES, *ORDINARY, *SMALL}
