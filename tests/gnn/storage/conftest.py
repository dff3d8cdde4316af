"""What the tests of the storage room share: small files, and a slow reference for reading."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fivefold.gnn.storage import ContainerWriter

PAGE = 4096


@pytest.fixture
def make_file(tmp_path):
    """Write one section ``x`` (behind another, so that it does not begin at page 1)."""
    opened = []

    def make(rows, *, name="a.fvf", kind="test", attributes=None):
        first = np.arange(1500, dtype=np.int64)
        schema = {"first": (first.dtype, first.shape), "x": (rows.dtype, rows.shape)}
        path = tmp_path / name
        with ContainerWriter(
            path, kind=kind, sections=schema, attributes=attributes or {}
        ) as writer:
            writer.write("first", 0, first)
            writer.write("x", 0, rows)
            container = writer.commit()
        opened.append(container)
        return container

    yield make
    for container in opened:
        container.close()


@pytest.fixture
def random_rows():
    def make(count, dim, dtype, seed=0):
        kind = np.dtype(dtype)
        size = count * dim * kind.itemsize
        raw = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        # Bit patterns, NaNs among them: what is read must be equal bit for bit.
        return raw.view(kind).reshape(count, dim)

    return make


@pytest.fixture
def run_script(tmp_path):
    """Run Python in a process of its own."""

    def run(code, *arguments, timeout=100, **environment):
        script = tmp_path / "script.py"
        script.write_text(code)
        return subprocess.run(
            [sys.executable, "-W", "error", str(script), *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env={**os.environ, **{key: str(value) for key, value in environment.items()}},
        )

    return run


@pytest.fixture(scope="session")
def faulty_disk(tmp_path_factory):
    """A shared library that, loaded before libc, makes reads of some files fail."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the fault injection with")
    source = Path(__file__).with_name("faulty_disk.c")
    library = tmp_path_factory.mktemp("faults") / "faulty_disk.so"
    built = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return library
