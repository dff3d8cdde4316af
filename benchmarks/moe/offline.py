# mypy: ignore-errors
"""Compile the kernels for a GPU that is not there, by the host's own launches.

    python -m benchmarks.moe.offline [--quick] [forward|backward|one_sided|tiles ...]
    python -m benchmarks.moe.offline table --triton build/triton-3.6.0 [--part tiles] --out FILE

The first prints one line of JSON per kernel. ptxas and the disassembler are in triton's wheel, so
the machine code, its registers, spills and shared memory, and the spelling of its synchronisation
can be looked at on any machine. Operands lie on torch's device "meta"; a launch is compiled instead
of started. The second makes a table of results: of the installed triton and of those unpacked in
folders (``pip install --no-deps --target FOLDER triton==3.6.0``). This says nothing about speed.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fivefold.moe import ACTIVATIONS, OneSidedConfig, OneSidedGroup, Router, VirtualHeap, fused_moe
from fivefold.moe.kernels import launch as launches
from fivefold.moe.kernels.arguments import Tiles
from fivefold.moe.kernels.launch import backward_fused, forward_fused, forward_split
from fivefold.moe.operator.fused import Backend
from fivefold.moe.parallel import _one_sided as one_sided
from fivefold.moe.parallel._heaps import SymmetricHeap

BF16, FP32 = {"dtype": torch.bfloat16}, {"dtype": torch.float32}
ODD = {"hidden": 1001, "intermediate": 333}
MANY = {"activation": "geglu", "intermediate": 768, "experts": 128, "top_k": 8}
QUICK = {"bf16 swiglu", "", "compact, bf16 swiglu, 8 ranks"}  # one of each part
FORWARD: dict[str, dict[str, Any]] = {
    "bf16 swiglu": BF16,
    "bf16 relu": BF16 | {"activation": "relu"},
    "fp32 relu tf32": FP32 | {"activation": "relu", "precision": "tf32"},
    "fp32 swiglu tf32": FP32 | {"precision": "tf32"},
    "fp32 swiglu tf32x3": FP32 | {"precision": "tf32x3"},
    "fp32 relu ieee": FP32 | {"activation": "relu"},
    "bf16 swiglu, odd sizes": BF16 | ODD,
    "bf16 geglu, 128 experts, 8 each": BF16 | MANY | {"biases": False},
}
BACKWARD: dict[str, dict[str, Any]] = {
    "": BF16,
    ", bf16 geglu, 128 experts, 8 each": BF16 | MANY,
    ", bf16, weights on the input": BF16 | {"weight_on_input": True, "top_k": 1},
    ", fp32 tf32": FP32 | {"precision": "tf32"},
    ", fp32 ieee": FP32,
    ", bf16, odd sizes": BF16 | ODD,
}
USUAL = Tiles(rows=128, columns=128, second_columns=256, depth=64, stages=4)  # of bf16 swiglu
NARROW = Tiles(rows=64, columns=128, second_columns=256, depth=64, warps=4)
TILES = {  # offered by the sweep beside the usual ones
    "three stages": replace(USUAL, stages=3),
    "second product of 128 columns": replace(USUAL, second_columns=128),
    "for few tokens: 64 rows, three stages": NARROW,
}
LAUNCHES = ["count", "place", "ranges", "hidden", "d_hidden", "rows of g", "d_w2", "rows of x"]
LAUNCHES += ["d_w13", "d_x", "d_b2", "d_b13", "d_weights", "combine"]
SIZES = {"hidden": 2048, "intermediate": 2048, "top_k": 2, "max_tokens": 8192}
EXCHANGE: dict[str, dict[str, Any]] = {
    "compact, bf16 swiglu, 8 ranks": {"ranks": 8, "experts": 64},
    "DeepSeek-V3, 8 ranks, with the gate": {
        "ranks": 8,
        "experts": 256,
        "hidden": 7168,
        "top_k": 8,
    },
    "capacity, bf16 relu, 8 ranks": {
        "ranks": 8,
        "experts": 64,
        "activation": "relu",
        "capacity": 1024,
    },
    "compact, fp32 swiglu in tf32, 4 virtual ranks": {
        "ranks": 4,
        "experts": 8,
        "dtype": torch.float32,
        "precision": "tf32",
    },
}
GATE = Router(top_k=8, score="sigmoid", groups=8, top_groups=4, group_score="top2_sum", scale=2.5)


NOBODY = Backend(  # computes the experts between the two halves of a one-sided call
    name="nobody",
    forward=lambda x, *_operands, **_options: x,
    backward=lambda _g, x, w13, w2, _ids, weight, *, b13, b2, **_: (x, w13, w2, weight, b13, b2),
    missing=lambda _device: None,
)


FUSED = replace(NOBODY, name="fused")  # one launch; asked of no device


class Absent:
    """As much of a driver as a compilation needs."""

    capability = 90  # of an H100 or H200; 100 of a B200 or GB200

    def get_current_target(self) -> GPUTarget:
        """Return the GPU that is compiled for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Return the only one."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """Return none."""
        return 0


@contextlib.contextmanager
def compiled_instead() -> Iterator[list[tuple[str, Any]]]:
    """Compile what is launched within.

    Yields:
        Name of the kernel and the compiled kernel, in the order of the launches.
    """
    found = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        made = start(kernel, *args, grid=grid, warmup=True, **options)
        found.append((kernel.__name__, made))

    start = triton.JITFunction.run
    driver.set_active(Absent())
    with (
        mock.patch.object(triton.JITFunction, "run", run),
        mock.patch.object(launches, "multiprocessors", return_value=132),
        # No kernel runs, so its control words cannot be looked at.
        mock.patch.object(launches, "debugging", return_value=False),
        mock.patch.object(one_sided, "debugging", return_value=False),
        mock.patch.object(one_sided, "multiprocessors", return_value=132),
        mock.patch.object(one_sided, "missing_fused", return_value=None),
    ):
        yield found


def show(name: str, kernel: Any) -> None:
    """Print what is in a compiled kernel."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        usage, code = (
            subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    instructions = re.findall(
        r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE
    )
    line = {
        "variant": name,
        "registers": numbers["REG"],
        "spilled_bytes": numbers["STACK"] + numbers["LOCAL"],
        "shared_bytes": int(kernel.metadata.shared),
        "instructions": Counter(instruction.split(".")[0] for instruction in instructions),
        "moved": sorted({i for i in instructions if i.startswith(("LDG.E", "STG.E"))}),
        "products": sorted(
            {i for i in instructions if i.startswith(("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA"))}
        ),
        "ptx": kernel.asm["ptx"],
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def operands(sizes: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """A call's operands by place, and its options."""
    sizes = {"hidden": 2048, "intermediate": 2048, "experts": 32, "top_k": 2} | sizes
    kind = ACTIVATIONS[sizes.get("activation", "swiglu")]
    hidden, inner, experts, top_k = (
        sizes[name] for name in ("hidden", "intermediate", "experts", "top_k")
    )
    rows, tokens = kind.width(inner), 4096

    def empty(*shape: int, dtype: torch.dtype = sizes["dtype"]) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    positional = [
        empty(tokens, hidden),
        empty(experts, rows, hidden),
        empty(experts, hidden, inner),
        empty(tokens, top_k, dtype=torch.int64),
        empty(tokens, top_k, dtype=torch.float32),
    ]
    options = {name: sizes[name] for name in ("precision", "weight_on_input") if name in sizes}
    if sizes.get("biases", True):
        options |= {"b13": empty(experts, rows), "b2": empty(experts, hidden)}
    return positional, options | {"activation": kind}


def forward(chosen: set[str]) -> None:
    """The single kernel, and the same tasks as launches of their own."""
    for name in [name for name in FORWARD if name in chosen]:
        sizes = FORWARD[name]
        given, options = operands(sizes)
        with compiled_instead() as found:
            forward_fused(*given, **options)
        show(name, found[0][1])
    given, options = operands(BF16)
    with compiled_instead() as found:
        forward_split(*given, **options)
    for name, kernel in found:
        show(name, kernel)


def backward(chosen: set[str]) -> None:
    """The launches of the backward, and the forward that keeps for it."""
    shown = {"d_hidden", "d_x", "d_w13", "d_w2"}
    for title in [title for title in BACKWARD if title in chosen]:
        sizes = BACKWARD[title]
        given, options = operands(sizes)
        with compiled_instead() as found:
            backward_fused(given[0], *given, **options)
        for name, (_, kernel) in zip(LAUNCHES, found, strict=True):
            if name in shown or (not title and name not in {"count", "place", "combine"}):
                show(name + title, kernel)
    if chosen == QUICK:
        return
    given, options = operands(BF16)
    kept = torch.empty(given[3].numel(), len(given[1][0]), dtype=torch.bfloat16, device="meta")
    with compiled_instead() as found:
        forward_fused(*given, hidden=kept, **options)
    show("forward that keeps", found[0][1])


def tiles(chosen: set[str]) -> None:
    """The single kernel for bf16 and swiglu with other tiles."""
    given, options = operands(BF16)
    for name in [name for name in TILES if name in chosen]:
        with compiled_instead() as found:
            forward_fused(*given, **options, tiles=TILES[name])
        show(name, found[0][1])


def group_of(config: OneSidedConfig, *, virtual: bool) -> tuple[OneSidedGroup, Any, Any]:
    """A group on a heap that is not there, its operands and biases."""
    if virtual:
        heap = VirtualHeap(config.ranks, nbytes=config.heap_bytes(), device="meta")
    else:
        own = torch.empty(1, config.heap_bytes(), dtype=torch.uint8, device="meta")
        heap = SymmetricHeap(own, [0] * config.ranks, first_rank=0)
    made = OneSidedGroup(config, heap)
    here = config.local_experts * heap.num_local
    sizes = {"experts": here, "hidden": config.hidden, "intermediate": config.intermediate}
    more = {"dtype": config.dtype, "activation": config.activation, "top_k": config.top_k}
    given, options = operands(sizes | more)
    return made, given, {name: options[name] for name in ("b13", "b2")}


def one_sided_group(chosen: set[str]) -> None:
    """The kernel over several ranks, and the two that its backward uses."""
    for name in [name for name in EXCHANGE if name in chosen]:
        sizes = EXCHANGE[name]
        with compiled_instead() as found:
            config = OneSidedConfig(**(SIZES | sizes))
            made, given, biases = group_of(config, virtual="virtual" in name)
            if "gate" in name:
                gate = torch.empty(config.experts, config.hidden, dtype=config.dtype, device="meta")
                bias = torch.empty(config.experts, device="meta")
                made.routed(*given[:3], gate, GATE, selection_bias=bias, **biases)
            else:
                with mock.patch.object(one_sided, "backend_for", return_value=FUSED):
                    made.fused_moe(*given, **biases)
        show(name, found[0][1])
    with compiled_instead() as found:
        config = OneSidedConfig(**SIZES, ranks=8, experts=64, training=True)
        made, given, biases = group_of(config, virtual=False)
        leaves = [t.requires_grad_(t.is_floating_point()) for t in given]
        with mock.patch.object(one_sided, "backend_for", return_value=NOBODY):
            fused_moe(*leaves, **biases, group=made).sum().backward()
    kernels = dict(found)
    for name in ("scatter_kernel", "gather_kernel"):
        show(f"8 ranks, bf16, backward: {name}", kernels[name])


PARTS = {"forward": forward, "backward": backward, "one_sided": one_sided_group, "tiles": tiles}


def lines(folder: str | None, part: str) -> list[dict[str, Any]]:
    """What a part prints, in a child with the triton of a folder; None: the installed one."""
    paths = [folder, str(Path.cwd() / "src"), os.environ.get("PYTHONPATH")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, "-m", "benchmarks.moe.offline", part]
    with tempfile.TemporaryDirectory() as cache:
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRITON_CACHE_DIR": cache}
        done = subprocess.run(
            command, env=kept | variables, capture_output=True, text=True, check=True
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


def table(folders: list[str], parts: list[str], path: Path) -> None:
    """Write registers, spilled and shared bytes of the parts' kernels as a results file."""
    from benchmarks.results_file import BenchmarkRow, write_results  # noqa: PLC0415 - pydantic

    versions = {importlib.metadata.version("triton"): None}
    for folder in folders:
        (found,) = Path(folder).glob("triton-*.dist-info")
        versions[found.name.removeprefix("triton-").removesuffix(".dist-info")] = str(folder)
    newest, *others = versions
    seen = {
        version: {line["variant"]: line for part in parts for line in lines(folder, part)}
        for version, folder in versions.items()
    }
    rows = []
    for variant, line in seen[newest].items():
        for metric, unit, limit in (
            ("registers", "registers", 255.0),
            ("spilled_bytes", "bytes", 0.0),
            ("shared_bytes", "bytes", 227.0 * 1024),
        ):
            peers = {f"triton {other}": float(seen[other][variant][metric]) for other in others}
            rows.append(
                BenchmarkRow(
                    case=variant, metric=metric.replace("_", " "), unit=unit,
                    ours=float(line[metric]), peers=peers, limit=limit,
                )
            )  # fmt: skip
    write_results(path, topic=f"moe/{path.stem}", rows=rows, versions={"triton": newest})


def main() -> None:
    """Parse, and compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; or table")
    parser.add_argument("--quick", action="store_true", help="a few variants; all parts by default")
    parser.add_argument("--triton", action="append", default=[], help="folder of another triton")
    parser.add_argument("--part", dest="of_table", action="append", choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/moe/compiled.json"))
    parser.add_argument("--capability", type=int, choices=(90, 100), default=90)
    given = parser.parse_args()
    Absent.capability = given.capability
    unknown = {*given.parts} - {*PARTS, "table"}
    if unknown or not (given.parts or given.quick):
        parser.error(f"parts are {', '.join(PARTS)}; or table alone; got {given.parts}")
    if given.parts == ["table"]:
        table(given.triton, given.of_table or [*PARTS], given.out)
        return
    if "table" in given.parts:
        parser.error("a table is made by itself")
    for part in given.parts or PARTS:
        PARTS[part](QUICK if given.quick else {*FORWARD, *BACKWARD, *EXCHANGE, *TILES})


if __name__ == "__main__":
    main()
