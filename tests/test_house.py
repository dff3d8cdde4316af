"""The house's own rules: exports, layering, imports without side effects, runnable examples."""

import ast
import doctest
import functools
import graphlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import fivefold
from helpers.durations import COLLECTED, DAY_S, SHARED_S, SLOW_S, known_cases, known_files

PACKAGE = Path(fivefold.__file__).parent
ROOMS = [
    "errors",
    "units",
    "files",
    "measured",
    "reading",
    *sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py")),
]

# Rooms and the public rooms within them: gnn.storage and its like.
PUBLIC = [
    *ROOMS,
    *sorted(
        ".".join(p.parent.relative_to(PACKAGE).parts) for p in PACKAGE.glob("*/[!_]*/__init__.py")
    ),
]

# What each room may import besides itself and those below all. A room is missing here only by
# mistake: the test below compares with the folders.
MAY_IMPORT = {
    "errors": set(),
    "units": {"errors"},
    "files": {"errors"},
    "measured": {"errors"},
    "reading": set(),
    "runs": {"units"},
    "network": {"runs"},
    "flows": {"network", "runs"},
    "collectives": {"network", "flows", "runs"},
    "tasks": {"network", "flows", "collectives"},
    "strategy": {"network", "flows", "collectives", "tasks", "runs"},
    "codesign": {"network", "flows", "collectives", "tasks", "strategy", "report", "runs"},
    "optim": {"network", "collectives"},
    "gnn": {"network", "collectives", "runs"},
    "moe": {"network", "collectives"},
    "train": {"network", "collectives", "tasks", "optim", "moe", "runs"},
    "lab": {"network"},
    "report": {"optim"},
    "testing": {"optim"},
}
MAY_IMPORT["cli"] = set(MAY_IMPORT) - {"testing"}  # the one room above all
# Rooms within a room, each importing only those before it.
INNER_ORDER = {
    "moe": ["routing", "kernels", "operator", "parallel"],
    "network": ["topology", "profiling", "simulation", "aggregation"],
    "collectives": ["schedules", "algorithms", "pricing", "synthesis", "lowering", "execution"],
    "gnn": [
        "storage",
        "sampling",
        "data",
        "planning",
        "packing",
        "loading",
        "training",
    ],
}
HEAVY = {
    "torch",
    "numpy",
    "tokenizers",
    "numba",
    "scipy",
    "ortools",
    "matplotlib",
}


def room_of(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "fivefold" else None


@functools.cache
def import_statements(path):
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def imports_of(path):
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
            yield node.module


def test_every_room_has_a_rule():
    assert set(ROOMS) == set(MAY_IMPORT)
    nested = {f"{outer}.{inner}" for outer, inners in INNER_ORDER.items() for inner in inners}
    assert {room for room in PUBLIC if "." in room} == nested


@pytest.mark.parametrize("outer", INNER_ORDER)
def test_the_rooms_within_a_room_import_downward(outer):
    order = INNER_ORDER[outer]
    for level, inner in enumerate(order):
        for path in sorted((PACKAGE / outer / inner).rglob("*.py")):
            for module in imports_of(path):
                parts = module.split(".")
                if parts[:2] != ["fivefold", outer] or len(parts) < 3:
                    continue
                if parts[2] == inner:
                    continue
                assert parts[2] in order[:level], f"{path.name} imports {module}"
                private = [part for part in parts[3:] if part.startswith("_")]
                assert not private, f"{path.name} reaches into {module}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room):
    place = PACKAGE / room
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    allowed = MAY_IMPORT[room] | {room, "errors", "units", "files", "measured", "reading"}
    for path in files:
        for module in imports_of(path):
            other = room_of(module)
            if other == "_compiler":  # shared by all
                continue
            assert other is None or other in allowed, f"{path.name} imports {module}"
            private = [part for part in module.split(".")[2:] if part.startswith("_")]
            assert other in {None, room} or not private, f"{path.name} reaches into {module}"


LAYERS = ["network", "flows", "collectives", "tasks", "strategy"]


@pytest.mark.parametrize("below", LAYERS[:-1])
def test_each_layer_stands_on_the_one_below(below):
    above = LAYERS[LAYERS.index(below) + 1]
    files = (PACKAGE / above).rglob("*.py")
    assert any(room_of(module) == below for path in files for module in imports_of(path))


def modules():
    """Every file of the package by its dotted name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_no_file_imports_a_private_name_of_another():
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} imports {alias.name}"
        for _, path in modules()
        for node in import_statements(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fivefold")
        for alias in node.names
        if alias.name.startswith("_") and f"{node.module}.{alias.name}" not in dict(modules())
    ]
    assert found == []


def test_files_do_not_import_in_circles():
    """Imports within functions and for types count too."""
    files = dict(modules())
    graph = {}
    for name, path in files.items():
        graph[name] = set()
        for node in import_statements(path):
            if isinstance(node, ast.ImportFrom) and node.module in files:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= inner & set(files) or {node.module}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def test_files_stay_short():
    """At most 700 lines, kernels 900: what is longer holds more than one concept."""
    long = {
        str(path.relative_to(PACKAGE)): lines
        for _, path in modules()
        if (lines := len(path.read_text().splitlines()))
        > (900 if "kernel" in str(path.relative_to(PACKAGE)) else 700)
    }
    assert long == {}


def test_the_page_of_the_architecture_names_files_that_exist():
    root = PACKAGE.parents[1]
    if not (root / "docs").is_dir():
        root = Path(__file__).parents[1]
    named = re.findall(r"`(src/fivefold/[^`]+[.]py)`", (root / "docs/architecture.md").read_text())
    assert len(named) >= 10
    assert [name for name in named if not (root / name).is_file()] == []


@pytest.mark.parametrize("room", PUBLIC)
def test_exports_exist_and_are_documented(room):
    module = importlib.import_module(f"fivefold.{room}")
    assert module.__doc__
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"{room}.{name} has no docstring"


def test_a_public_name_stands_once():
    """A user can hold at most 350 names in mind, and each means one thing."""
    packages = [importlib.import_module(f"fivefold.{room}") for room in PUBLIC]
    owners = {}
    for module in packages:
        for name in module.__all__:
            owners.setdefault(name, []).append(module.__name__)
    assert {name: places for name, places in owners.items() if len(places) > 1} == {}
    assert len(owners) <= 350


def exported_callables():
    for room in PUBLIC:
        module = importlib.import_module(f"fivefold.{room}")
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isroutine(value):
                yield pytest.param(value, id=f"{room}.{name}")


@pytest.mark.parametrize("value", list(exported_callables()))
def test_examples_in_docstrings_run(value):
    finder = doctest.DocTestFinder(exclude_empty=True)
    source = sys.modules[value.__module__]
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for example in finder.find(value, globs={**vars(source)}):
        runner.run(example)
    assert runner.failures == 0


@pytest.mark.parametrize("value", list(exported_callables()))
def test_exported_functions_that_raise_say_so(value):
    """An exported function, or method of an exported class, whose body raises has Raises."""
    node = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    missing = []
    functions = [node] if isinstance(node, ast.FunctionDef) else getattr(node, "body", [])
    for function in functions:
        if not isinstance(function, ast.FunctionDef) or function.name.startswith("_"):
            continue
        raises = any(isinstance(n, ast.Raise) and n.exc is not None for n in ast.walk(function))
        if raises and "Raises:" not in (ast.get_docstring(function) or ""):
            missing.append(function.name)
    assert missing == []


def run_python(code, cwd=None, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, cwd=cwd
    )


def test_import_loads_nothing_heavy_and_starts_nothing(tmp_path):
    code = (
        "import sys, threading, os; before = set(os.listdir('.')); "
        "import fivefold, fivefold.errors, fivefold.units; "
        f"heavy = sorted({HEAVY} & set(sys.modules)); "
        "assert not heavy, heavy; assert threading.active_count() == 1; "
        "assert set(os.listdir('.')) == before"
    )
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == result.stderr == ""


def test_help_loads_no_torch():
    code = (
        "import sys; sys.argv = ['fivefold', '--help']\n"
        "from fivefold.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"heavy = sorted({HEAVY} & set(sys.modules)); assert not heavy, heavy"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout


# What others wrote is loaded once: each room is imported by a fork, as the first of this package.
EACH_ROOM = """
import contextlib, gc, importlib, json, os, sys, traceback
heavy, rooms = json.loads(sys.argv[1])
for name in heavy:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.freeze()
for room, modules in rooms.items():
    os.mkdir(room)
    child = os.fork()
    if child == 0:
        for number in (1, 2):
            os.dup2(os.open(room + ".said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.chdir(room)
        try:
            for module in modules:
                importlib.import_module(module)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def imported_rooms(tmp_path_factory):
    """Folder with what each room said when it was imported, and where it was."""
    folder = tmp_path_factory.mktemp("rooms")
    rooms = {
        room: [f"fivefold.{name}" for name in PUBLIC if name.partition(".")[0] == room]
        for room in ROOMS
    }
    result = run_python(EACH_ROOM, folder, json.dumps([sorted(HEAVY), rooms]))
    assert result.returncode == 0, result.stderr
    assert result.stdout == result.stderr == ""
    return folder


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "cli"])
def test_importing_a_room_prints_nothing_and_makes_no_files(room, imported_rooms):
    assert (imported_rooms / f"{room}.said").read_text() == ""
    assert list((imported_rooms / room).iterdir()) == []


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fivefold.nothing


@pytest.mark.nightly  # xdist itself ends a run whose workers collect differently
@pytest.mark.timeout(900)  # two whole collections, which took 280 s beside other work
def test_every_process_collects_the_same_tests(tmp_path):
    """Workers that share the tests compare their names, which may not hold times or addresses."""
    (tmp_path / "next_year.py").write_text(
        "import time\nnow = time.time\ntime.time = lambda: now() + 4e7\n"
    )
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    here, later = (
        subprocess.Popen(
            [*command, *extra, str(Path(__file__).parent)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, extra, path in (
            ("1", [], os.environ.get("PYTHONPATH", "")),
            (
                "2",
                ["-p", "next_year"],
                os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
            ),
        )
    )
    try:
        names = [
            [line for line in process.communicate()[0].splitlines() if "::" in line]
            for process in (here, later)
        ]
    finally:
        for process in (here, later):
            process.kill()
            process.wait()
    assert here.returncode == later.returncode == 0
    assert len(names[0]) > 1000
    assert names[0] == names[1]


def test_what_every_change_waits_for_is_short(request):
    """A case by day takes a second, an exception five; measured by tools/measure_tests.py."""
    by_day = [
        item for item in request.config.stash[COLLECTED] if not item.get_closest_marker("nightly")
    ]
    took_s = known_cases()
    exceptions = {item.nodeid for item in by_day if item.get_closest_marker("slow")}
    limits_s = {item.nodeid: DAY_S for item in by_day} | dict.fromkeys(exceptions, SLOW_S)
    limits_s |= {name: SHARED_S for name in took_s if "::fixture " in name}
    long = {name: took_s[name] for name, s in limits_s.items() if took_s.get(name, 0.0) > s}
    assert not long, "mark what takes longer nightly, and leave something quicker of its kind"
    known = known_files()
    new = {path for item in by_day if (path := item.nodeid.partition("::")[0]) not in known}
    assert len(new) < 30, f"measure them: python tools/measure_tests.py {' '.join(sorted(new))}"
