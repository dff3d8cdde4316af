"""The work of ``fivefold doctor``."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from fivefold.cli._options import show
from fivefold.lab import probe_capabilities
from fivefold.report.page import DataTable
from fivefold.runs.machine import run_facts
from fivefold.units import format_bytes

# Package as it is imported, as it is installed, what it is for, and the extra that brings it.
_PACKAGES = (
    ("numba", "numba", "compiled sampling, packing and simulation", "gnn"),
    ("scipy", "scipy", "linear programs and sparse graphs", "network"),
    ("matplotlib", "matplotlib", "pictures of topologies and schedules", "network"),
    ("ortools", "ortools", "exact synthesis of collectives", "collectives"),
    ("pyarrow", "pyarrow", "graphs from Parquet and CSV tables", "gnn"),
    ("torch_geometric", "torch-geometric", "batches as PyG data, models of PyG", "gnn"),
    ("triton", "triton", "the mixture-of-experts kernel", "moe"),
    ("transformers", "transformers", "Hugging Face models and Trainer", "hf"),
    ("accelerate", "accelerate", "Accelerate loops, Hugging Face Trainer", "hf"),
    ("tokenizers", "tokenizers", "byte-pair tokenizers", "tokenizers"),
    ("tensorboard", "tensorboard", "metrics in TensorBoard", "tensorboard"),
    ("wandb", "wandb", "metrics in Weights & Biases", "wandb"),
    ("mlflow", "mlflow", "metrics in MLflow", "mlflow"),
    ("torchft", "torchft", "workers that come and go", "elastic"),
)
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_NO_LIMIT = 1 << 60
_IO_URING_SETUP = 425  # the system call, by number on every architecture
_IO_URING_PARAMETERS_BYTES = 120


@dataclass(frozen=True)
class _Check:
    """One thing that was looked at; ``works`` is None for a plain fact."""

    group: str
    name: str
    works: bool | None
    found: str
    fix: str | None = None


def all_checks() -> list[_Check]:
    """Try everything that a feature of this library needs."""
    return [*_machine(), *_torch(), *_packages(), *_storage(), *_lab()]


def _machine() -> list[_Check]:
    facts = run_facts()
    machine = facts["machine"]
    limit = _memory_limit_bytes()
    memory = format_bytes(machine["memory_bytes"])
    if limit is not None and limit < machine["memory_bytes"]:
        memory += f", of which a cgroup allows {format_bytes(limit)}"
    return [
        _Check("machine", "fivefold", None, f"{facts['fivefold']}, Python {facts['python']}"),
        _Check("machine", "processor", None, f"{machine['cores']} cores, {machine['cpu']}"),
        _Check("machine", "memory", None, memory),
        _Check("machine", "kernel", None, str(machine["kernel"])),
    ]


def _memory_limit_bytes() -> int | None:
    for path in _CGROUP_LIMITS:
        if path.exists():
            text = path.read_text(encoding="ascii").strip()
            return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None
    return None


def _torch() -> list[_Check]:
    version, nccl = torch.__version__, dist.is_nccl_available()
    fix = None
    if torch.cuda.is_available():
        names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
        found = ", ".join(names)
    elif torch.version.cuda is not None:
        found = "no device found"
        fix = "install NVIDIA's driver, or give the container its devices"
    else:
        found = f"torch {version} is built without CUDA"
        fix = "for a machine with GPUs: pip install torch, from its CUDA index"
    collectives = "collectives between GPUs" if nccl else "not in this build of torch"
    instead = None if nccl else "install torch's CUDA build; gloo serves processors"
    backends = "gloo, nccl" if nccl else "gloo"
    return [
        _Check("gpu", "torch", works=True, found=f"{version}, backends {backends}"),
        _Check("gpu", "CUDA", fix is None, found, fix),
        _Check("gpu", "NCCL", nccl, collectives, instead),
    ]


def _packages() -> list[_Check]:
    found = []
    for module, name, purpose, extra in _PACKAGES:
        works = importlib.util.find_spec(module) is not None
        try:
            version = f"{importlib.metadata.version(name)}: " if works else ""
        except importlib.metadata.PackageNotFoundError:  # importable, but not installed by pip
            version = ""
        fix = None if works else f"pip install 'fivefold[{extra}]'"
        found.append(_Check("packages", name, works, f"{version}{purpose}", fix))
    return found


def _storage() -> list[_Check]:
    free = format_bytes(shutil.disk_usage(Path.cwd()).free)
    problem = _io_uring_problem()
    fix = (
        "sysctl kernel.io_uring_disabled=0, or the container's seccomp profile; "
        "threads read until then"
    )
    found = problem or "many reads in flight per thread"
    return [
        _Check("storage", "free space", None, f"{free} in this folder"),
        _Check("storage", "io_uring", problem is None, found, fix if problem else None),
    ]


def _io_uring_problem() -> str | None:
    """Make a ring and close it; return why that failed, or None."""
    if sys.platform != "linux":
        return "only on Linux"
    parameters = ctypes.create_string_buffer(_IO_URING_PARAMETERS_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(_IO_URING_SETUP, 1, parameters)
    if descriptor < 0:
        return os.strerror(ctypes.get_errno())
    os.close(descriptor)
    return None


def _lab() -> list[_Check]:
    able = probe_capabilities()
    checks = [
        _Check("lab", item.name, item.works, item.meaning, None if item.works else item.fix)
        for item in able.items
        if able.isolation or item.name == "namespaces"
    ]
    return [*checks, _Check("lab", "links", able.shaping != "none", f"can be given {able.shaping}")]


def show_checks(checks: list[_Check]) -> None:
    marks = {True: "yes", False: "no", None: ""}
    groups = dict.fromkeys(check.group for check in checks)
    tables = [
        DataTable.of(
            (group, "works", "found"),
            [(c.name, marks[c.works], c.found) for c in checks if c.group == group],
            text_columns=(1, 2),
        )
        for group in groups
    ]
    fixes = [f"{check.name}: {check.fix}" for check in checks if check.fix]
    lines = ["What to do about the others:", *fixes] if fixes else []
    works = [check.works for check in checks if check.works is not None]
    spaced = [part for table in tables for part in (table, "")]
    show(f"{sum(works)} of {len(works)} features work on this machine", *spaced, *lines)
