"""The graph of Debian's packages, from the lists that apt keeps on the machine.

A node is a package. An edge joins a package to one that it depends on, recommends, suggests or
enhances; all alternatives count, and a virtual package stands for the first that provides it. The
label is the section. Features are the words of the description: neither the section nor the
package's name is among them, for names often say the section (``python3-``, ``lib``).
"""

from __future__ import annotations

import gzip
import lzma
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from fivefold.errors import ConfigurationError, DataError, UnsupportedError
from fivefold.gnn.data._array_source import ArraySource
from fivefold.gnn.data._dataset import Dataset
from fivefold.gnn.data._ingest import ingest
from fivefold.gnn.data._parts import Progress
from fivefold.gnn.data._words import text_source

APT_LISTS = "/var/lib/apt/lists"
_APT_HELPER = "/usr/lib/apt/apt-helper"
_RELATIONS = ("Depends", "Pre-Depends", "Recommends", "Suggests", "Enhances")
_WANTED = "|".join(("Package", "Section", "Description", "Provides", *_RELATIONS))
_FIELD = re.compile(rf"^({_WANTED}):[ \t]*(.*(?:\n[ \t].*)*)", re.MULTILINE)
_NAME = re.compile(r"(?:^|[,|])\s*([a-z0-9][a-z0-9+.-]*)")
_TIMEOUT_S = 300


def debian_packages(
    folder: str | Path,
    *,
    dim: int = 256,
    lists: str | Path = APT_LISTS,
    neighbors: Literal["both", "dependencies", "dependents"] = "both",
    seed: int = 0,
    progress: Progress | None = None,
) -> Dataset:
    r"""Write the graph of Debian's packages and open it.

    Args:
        folder: Where to write.
        dim: Elements of a feature row.
        lists: Folder with files named ``*Packages``, maybe packed; apt's own by default.
        neighbors: Whom a package hears from: those it depends on, those that depend on it, both.
        seed: Of the splits (60, 20 and 20 % of the packages).
        progress: Told of (stage, done, total).

    Returns:
        The data set; its folder has the packages' names in ``names.txt``.

    Raises:
        ConfigurationError: ``dim`` or ``neighbors`` is not allowed.
        DataError: There are no lists, or the folder holds another data set.
        UnsupportedError: The lists are packed by apt, and its helper is not on this machine.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = "Package: a\nSection: x\nDepends: b\n\nPackage: b\nSection: y\n"
        ...     _ = (Path(folder) / "demo_Packages").write_text(text)
        ...     with debian_packages(f"{folder}/out", dim=4, lists=folder) as dataset:
        ...         dataset.num_nodes, dataset.num_edges, dataset.num_classes
        (2, 2, 2)
    """
    source, names = debian_source(dim=dim, lists=lists, neighbors=neighbors, seed=seed)
    dataset = ingest(source, folder, progress=progress)
    (Path(folder) / "names.txt").write_text("".join(f"{name}\n" for name in names))
    return dataset


def debian_source(
    *,
    dim: int = 256,
    lists: str | Path = APT_LISTS,
    neighbors: str = "both",
    seed: int = 0,
) -> tuple[ArraySource, list[str]]:
    """The graph of Debian's packages as a source, and the packages' names; see ``debian_packages``.

    Raises:
        ConfigurationError: ``dim`` or ``neighbors`` is not allowed.
        DataError: There are no lists.

    Examples:
        >>> try:
        ...     debian_source(lists="nowhere")
        ... except DataError as error:
        ...     print(error.message)
        there are no package lists in nowhere
    """
    if neighbors not in {"both", "dependencies", "dependents"}:
        raise ConfigurationError(
            f"neighbors is {neighbors!r}", hint="use both, dependencies or dependents"
        )
    packages = _read_packages(Path(lists))
    names = list(packages)
    pairs = _edges(packages)
    heard = [(target, source) for source, target in pairs]  # messages flow from source to target
    edges = {"dependents": pairs, "dependencies": heard, "both": pairs + heard}[neighbors]
    source = text_source(
        "debian packages",
        [fields.get("Description", "") for fields in packages.values()],
        edges,
        [fields.get("Section", "").strip() for fields in packages.values()],
        dim=dim,
        seed=seed,
    )
    return source, names


def _read_packages(lists: Path) -> dict[str, dict[str, str]]:
    """Fields by package; of several versions the first."""
    files = sorted(lists.glob("*Packages*")) if lists.is_dir() else []
    if not files:
        raise DataError(
            f"there are no package lists in {lists}",
            hint="run 'apt-get update' on a Debian or Ubuntu machine, or name a folder with "
            "Packages files of a mirror",
        )
    packages: dict[str, dict[str, str]] = {}
    for path in files:
        for fields in _paragraphs(_text_of(path)):
            if "Package" in fields:
                packages.setdefault(fields["Package"].strip(), fields)
    if not packages:
        raise DataError(f"the package lists in {lists} are empty", hint="run 'apt-get update'")
    return packages


def _text_of(path: Path) -> str:
    try:
        if path.suffix == ".gz":
            data = gzip.decompress(path.read_bytes())
        elif path.suffix == ".xz":
            data = lzma.decompress(path.read_bytes())
        elif path.suffix == ".lz4":
            data = _unpacked_by_apt(path)
        else:
            data = path.read_bytes()
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"cannot read {path}: {error}", hint="run 'apt-get update'") from error
    return data.decode("utf-8", "replace")


def _unpacked_by_apt(path: Path) -> bytes:
    if not Path(_APT_HELPER).is_file():
        raise UnsupportedError(
            f"{path} is packed with lz4 and {_APT_HELPER} is missing",
            hint="unpack it with 'lz4 -d', or take the .gz or .xz file of a mirror",
        )
    command = [_APT_HELPER, "cat-file", str(path)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=_TIMEOUT_S)
    if done.returncode:
        raise DataError(
            f"apt cannot unpack {path}: {done.stderr.decode(errors='replace').strip()[:200]}",
            hint="run 'apt-get update'",
        )
    return done.stdout


def _paragraphs(text: str) -> Iterator[dict[str, str]]:
    """The fields we need of each paragraph; lines that begin with a blank go on."""
    for paragraph in text.split("\n\n"):
        yield dict(_FIELD.findall(paragraph))


def _edges(packages: dict[str, dict[str, str]]) -> list[tuple[int, int]]:
    """Distinct pairs (package, one that it names), in the order of the lists."""
    numbers = {name: number for number, name in enumerate(packages)}
    provided: dict[str, int] = {}
    for name, fields in packages.items():
        for virtual in _names(fields.get("Provides", "")):
            provided.setdefault(virtual, numbers[name])
    pairs: dict[tuple[int, int], None] = {}
    for name, fields in packages.items():
        for relation in _RELATIONS:
            for other in _names(fields.get(relation, "")):
                number = numbers.get(other, provided.get(other))
                if number is not None and number != numbers[name]:
                    pairs[numbers[name], number] = None
    return list(pairs)


def _names(relation: str) -> list[str]:
    """Package names of ``a (>= 1) | b, c:any``."""
    return _NAME.findall(relation) if relation else []
