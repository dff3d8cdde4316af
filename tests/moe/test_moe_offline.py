"""The kernels compiled for sm_90a without a GPU: what is in the machine code, and what it takes.

By 3.6.0, which the target machine has, where it lies unpacked in build/triton-3.6.0 (CI puts it
there) or in the folder that FIVEFOLD_TRITON_3_6 names, else by the installed triton. The forward in
bf16 in every run, everything by both every night.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from helpers.night import by_night
from oracles.children import environment

pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(900)  # compiling

SHARED_LIMIT_BYTES = 227 * 1024  # of a program on an H100 or H200
FORWARD = {  # variant: the tensor-core instruction that must be there
    "bf16 swiglu": "HGMMA.64x128x16.F32.BF16",
    "bf16 relu": "HGMMA.64x256x16.F32.BF16",
    "fp32 relu tf32": "HGMMA.64x128x8.F32.TF32",
    "fp32 swiglu tf32": "HGMMA.64x64x8.F32.TF32",
    "fp32 swiglu tf32x3": "HGMMA.64x32x8.F32.TF32",
    "fp32 relu ieee": None,
    "bf16 swiglu, odd sizes": "HGMMA.64x32x16.F32.BF16",
    "bf16 geglu, 128 experts, 8 each": "HGMMA.64x128x16.F32.BF16",
}
SPLIT = ["count_kernel", "place_kernel", "first_kernel", "second_kernel", "combine_kernel"]
BACKWARD = {
    "hidden": "HGMMA.64x128x16.F32.BF16",
    "d_hidden": "HGMMA.64x128x16.F32.BF16",
    "d_x": "HGMMA.64x256x16.F32.BF16",
    "d_w13": "HGMMA.64x256x16.F32.BF16",
    "d_w2": "HGMMA.64x256x16.F32.BF16",
    "d_hidden, bf16 geglu, 128 experts, 8 each": "HGMMA.64x128x16.F32.BF16",
    "d_x, bf16 geglu, 128 experts, 8 each": "HGMMA.64x256x16.F32.BF16",
    "d_w13, bf16 geglu, 128 experts, 8 each": "HGMMA.64x256x16.F32.BF16",
    "d_w2, bf16 geglu, 128 experts, 8 each": "HGMMA.64x256x16.F32.BF16",
    "d_hidden, bf16, weights on the input": "HGMMA.64x128x16.F32.BF16",
    "d_x, bf16, weights on the input": "HGMMA.64x256x16.F32.BF16",
    "d_w2, bf16, weights on the input": "HGMMA.64x256x16.F32.BF16",
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
    "d_hidden, fp32 ieee": None,
    "d_x, fp32 ieee": None,
    "d_w13, fp32 ieee": None,
    "d_w2, fp32 ieee": None,
}
SMALL = ["ranges", "rows of g", "rows of x", "d_b13", "d_b2", "d_weights"]
EXCHANGE = {
    "compact, bf16 swiglu, 8 ranks": "HGMMA.64x128x16.F32.BF16",
    "DeepSeek-V3, 8 ranks, with the gate": "HGMMA.64x128x16.F32.BF16",
    "capacity, bf16 relu, 8 ranks": "HGMMA.64x128x16.F32.BF16",
    "compact, fp32 swiglu in tf32, 4 virtual ranks": "HGMMA.64x128x8.F32.TF32",
}
CUT = [f"8 ranks, bf16, backward: {name}" for name in ("scatter_kernel", "gather_kernel")]
VARIANTS = {
    "forward": [*FORWARD, *SPLIT],
    "backward": [*BACKWARD, *SMALL],
    "one_sided": [*EXCHANGE, *CUT],
}
ROOT = Path(__file__).parents[2]
TARGET = Path(os.environ.get("FIVEFOLD_TRITON_3_6") or ROOT / "build" / "triton-3.6.0")
INSTALLED = ["installed", *(["3.6.0"] if (TARGET / "triton").is_dir() else [])]
*OTHERS, DAILY = INSTALLED
VERSIONS = by_night(INSTALLED, OTHERS)
QUICK = ("--quick", "forward")  # of the offline script: what is compiled by day
BY_DAY = {"bf16 swiglu", *SPLIT}
# Triton 3.9 puts 12 registers of the single kernel aside where it keeps what a backward takes, with
# 3 stages as with 4; the five launches, which are the default in 16 bits, spill nothing.
SPILLED_BYTES = {("installed", "forward that keeps"): 48}


def looked_at(wanted=lambda _variant: True):
    """Triton, part and variant; what takes long, and the second version, is for the night."""
    found = []
    for version in INSTALLED:
        for part, variants in VARIANTS.items():
            for variant in filter(wanted, variants):
                night = version != DAILY or variant not in BY_DAY
                marks = [pytest.mark.nightly] if night else []
                found.append(pytest.param(version, part, variant, marks=marks))
    return found


SPILLED_ON_100 = {
    ("installed", "compact, fp32 swiglu in tf32, 4 virtual ranks"): 8,
    ("installed", "8 ranks, bf16, backward: gather_kernel"): 8,
    ("3.6.0", "d_hidden, bf16, weights on the input"): 8,
    ("3.6.0", "compact, bf16 swiglu, 8 ranks"): 24,
    ("3.6.0", "DeepSeek-V3, 8 ranks, with the gate"): 24,
    ("3.6.0", "compact, fp32 swiglu in tf32, 4 virtual ranks"): 32,
}
RELEASE = r"(?:atom|red)\.global\.(?:gpu|sys)\.(?:release|acq_rel)"
ACQUIRE = r"(?:ld|atom)\.global\.(?:gpu|sys)\.(?:acquire|acq_rel)"


@cache
def lines_by_variant(version, *arguments):
    paths = [*([str(TARGET)] if version == "3.6.0" else []), str(ROOT / "src")]
    with tempfile.TemporaryDirectory() as folder:
        variables = {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": folder}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.moe.offline", *arguments],
            cwd=ROOT,
            env=environment(interpreted=False) | variables,
            capture_output=True,
            text=True,
            timeout=850,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return {line["variant"]: line for line in map(json.loads, done.stdout.splitlines())}


def compiled(version, part, variant):
    return lines_by_variant(version, *(QUICK if variant in BY_DAY else [part]))[variant]


@pytest.fixture(scope="module", autouse=True)
def compiled_by_day():
    """Compile once, before the first case, what all of the day look at."""
    lines_by_variant(DAILY, *QUICK)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_looked_at_by_day_is_compiled(version):
    assert set(lines_by_variant(version, *QUICK)) == BY_DAY


@pytest.mark.nightly
@pytest.mark.parametrize("version", INSTALLED)
@pytest.mark.parametrize("part", VARIANTS)
def test_every_variant_is_looked_at(version, part):
    assert set(lines_by_variant(version, part)) == set(VARIANTS[part])


@pytest.mark.nightly
@pytest.mark.parametrize("version", INSTALLED)
@pytest.mark.parametrize("part", VARIANTS)
def test_every_variant_compiles_for_sm_100_onto_its_tensor_cores(version, part):
    """By the compiler alone: nothing has run there. Its products are called UTC...MMA."""
    found = lines_by_variant(version, "--capability", "100", part)
    assert set(found) == set(VARIANTS[part])
    for name, line in found.items():
        assert line["spilled_bytes"] <= SPILLED_ON_100.get((version, name), 0), name
        assert line["shared_bytes"] <= SHARED_LIMIT_BYTES, name
        multiplies = name in {"first_kernel", "second_kernel"} or (
            (FORWARD | BACKWARD | EXCHANGE).get(name) is not None
        )
        assert any("UTC" in product for product in line["products"]) is multiplies, name


@pytest.mark.nightly
@pytest.mark.parametrize("version", INSTALLED)
def test_other_tiles_that_the_sweep_offers_fit_the_machine(version):
    found = lines_by_variant(version, "tiles")
    assert found["three stages"]["shared_bytes"] == 3 * (128 + 2 * 128) * 64 * 2 + 56
    for name, line in found.items():
        assert line["spilled_bytes"] == 0, name
        assert line["registers"] <= 255, name
        assert line["shared_bytes"] <= SHARED_LIMIT_BYTES, name
        assert any(product.startswith("HGMMA.64x") for product in line["products"]), name


@pytest.mark.parametrize("version", VERSIONS)
def test_the_sum_loads_16_bytes_at_a_time(version):
    """Two bytes at a time, it took a third of a forward on an H200."""
    moved = compiled(version, "forward", "combine_kernel")["moved"]
    assert {"LDG.E.128", "STG.E.128"} <= set(moved)
    assert not any(instruction.endswith(".U16") for instruction in moved)


@pytest.mark.parametrize(("version", "part", "variant"), looked_at())
def test_fits_the_machine_without_spills(version, part, variant, record_property, capsys):
    found = compiled(version, part, variant)
    for name in ("registers", "spilled_bytes", "shared_bytes", "products"):
        record_property(name, found[name])
    with capsys.disabled():
        size = f"{found['registers']} registers, {found['shared_bytes']} bytes shared"
        sys.stdout.write(f"\n  {version}, {variant}: {size}, {' '.join(found['products'])} ")
    spilled = found["spilled_bytes"]
    assert spilled <= SPILLED_BYTES.get((version, variant), 0)
    assert spilled or not {"STL", "LDL"} & set(found["instructions"])
    assert found["registers"] <= (64 if variant in SMALL else 255)
    assert found["shared_bytes"] <= SHARED_LIMIT_BYTES
    assert "ld.global.nc" not in found["ptx"]  # may not see what this launch wrote


@pytest.mark.parametrize(
    ("version", "part", "variant"),
    looked_at(lambda variant: variant in FORWARD | BACKWARD | EXCHANGE),
)
def test_uses_tensor_cores_and_asynchronous_copies(version, part, variant):
    found, wanted = compiled(version, part, variant), (FORWARD | BACKWARD | EXCHANGE)[variant]
    if wanted is None:  # ieee float32 has no tensor core: ordinary multiply-adds
        assert not found["products"]
        assert found["instructions"]["FFMA"] > (500 if part == "forward" else 200)
    else:
        assert wanted in found["products"]
    if "odd" in variant:
        assert "UTMALDG" not in found["instructions"]
    elif wanted is not None:
        assert "UTMALDG" in found["instructions"]
        looks_up = not variant.startswith(("d_w13", "d_w2"))  # gathered or received rows
        assert (found["instructions"].get("LDGSTS", 0) > 0) is looks_up


@pytest.mark.parametrize(
    ("version", "part", "variant"), looked_at(lambda variant: variant in FORWARD)
)
def test_hands_data_over_by_release_and_acquire(version, part, variant):
    ptx = compiled(version, part, variant)["ptx"]
    releases, acquires = check_barriers(ptx)
    assert releases == 5  # counted, placed, first product, second product; left
    assert acquires >= 5  # the waits for them
    assert "globaltimer" not in ptx  # nothing looks at the clock


@pytest.mark.nightly
@pytest.mark.parametrize("version", INSTALLED)
def test_the_backward_adds_nothing_up_atomically(version):
    for variant, found in lines_by_variant(version, "backward").items():
        assert not {"ATOMG", "ATOM", "RED", "REDG"} & set(found["instructions"]), variant


@pytest.mark.parametrize(
    ("version", "part", "variant"), looked_at(lambda variant: variant in EXCHANGE)
)
def test_rows_move_in_wide_accesses(version, part, variant):
    ptx = compiled(version, part, variant)["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?(0x[0-9a-f]+)", ptx)
    if "tf32" in variant:  # rounded in registers: 3.6.0 copies their weights by elements
        assert "0x10" in copies
    else:
        assert set(copies) == {"0x10"}  # 16 bytes each
    assert len(re.findall(r"st\.global\.v4", ptx)) >= 8  # dispatched and returned rows


@pytest.mark.parametrize(
    ("version", "part", "variant"), looked_at(lambda variant: variant in [*EXCHANGE, *CUT])
)
def test_ranks_hand_over_at_system_scope(version, part, variant):
    ptx = compiled(version, part, variant)["ptx"]
    check_barriers(ptx)
    assert "globaltimer" in ptx  # waits end
    assert "nanosleep" in ptx
    assert len(re.findall(r"st\.global\.v4", ptx)) >= 1  # rows, 16 bytes at a time
    words = len(re.findall(r"atom\.global\.sys\.release\.exch\.b64", ptx))
    polls = len(re.findall(r"atom\.global\.sys\.acquire\.add\.u64", ptx))
    returns = len(re.findall(r"(?:red|atom)\.global\.sys\.release\.add\.u32", ptx))
    back = len(re.findall(r"atom\.global\.sys\.acquire\.add\.u32", ptx))
    if "gather" not in variant:
        assert words >= 2  # announced, dispatched
        assert polls >= (2 if "capacity" in variant else 4)  # counts, rows: and in a loop
    if "scatter" not in variant:
        assert returns >= 2  # a source's first and second row tile
        assert back >= 2


def check_barriers(ptx):
    """A barrier stands between stores and the release, and between the acquire and loads."""
    lines = ptx.splitlines()
    releases = [place for place, line in enumerate(lines) if re.search(RELEASE, line)]
    acquires = [place for place, line in enumerate(lines) if re.search(ACQUIRE, line)]
    before = r"bar\.sync|st\.global|st\.shared"
    after = r"bar\.sync|ld\.global(?!\.gpu|\.sys)|cp\.async\.c"
    for place in releases:
        near = next(line for line in reversed(lines[:place]) if re.search(before, line))
        assert "bar.sync" in near, lines[place]
    for place in acquires:
        near = next(line for line in lines[place + 1 :] if re.search(after, line))
        assert "bar.sync" in near, lines[place]
    return len(releases), len(acquires)
