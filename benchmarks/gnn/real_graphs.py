r"""Makes data sets of real graphs that need no download: Debian's packages and WordNet.

    python -m benchmarks.gnn.real_graphs debian FOLDER [--dim 256] [--from LISTS]
    python -m benchmarks.gnn.real_graphs debian-typed FOLDER [--dim 256] [--from LISTS]
    python -m benchmarks.gnn.real_graphs wordnet FOLDER [--dim 256] [--from DICTIONARY]

**Debian**, from the lists that apt keeps on the machine (any folder of files named ``*Packages*``).
A node is a package; an edge joins it to one that it depends on, recommends, suggests or enhances;
all alternatives count, and a virtual package stands for the first that provides it. The label is
the section. Features are the words of the description: neither the section nor the package's name
is among them, for names often say the section (``python3-``, ``lib``). **debian-typed** adds a node
for each maintainer, without features, and joins the two types with an edge type each way; a package
hears from what it depends on and from what depends on it along two more.

**WordNet 3**, from its data files (wndb(5WN), Debian's package wordnet-base). A node is a synset,
an edge a pointer to another; the label is the lexicographer file (noun.animal, verb.motion, ...);
features are the words of the gloss.

Nodes are split 60 / 20 / 20 at random; ``names.txt`` in the folder has their names.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import lzma
import math
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import ConfigurationError, DataError, UnsupportedError
from fivefold.gnn.data import Dataset, HeteroDataset, HeteroSource, array_source, ingest
from fivefold.gnn.data.arrays import ArraySource
from fivefold.gnn.data.statistics import describe

APT_LISTS = Path("/var/lib/apt/lists")
APT_HELPER = Path("/usr/lib/apt/apt-helper")
DICTIONARY = Path("/usr/share/wordnet")
_RELATIONS = ("Depends", "Pre-Depends", "Recommends", "Suggests", "Enhances")
_WANTED = "|".join(("Package", "Section", "Description", "Maintainer", "Provides", *_RELATIONS))
_FIELD = re.compile(rf"^({_WANTED}):[ \t]*(.*(?:\n[ \t].*)*)", re.MULTILINE)
_NAME = re.compile(r"(?:^|[,|])\s*([a-z0-9][a-z0-9+.-]*)")
_WORD = re.compile(r"[a-z][a-z0-9+]+")
_PARTS_OF_SPEECH = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}
_FIELDS_PER_POINTER = 4
_TIMEOUT_S = 300
Graph = tuple[ArraySource, list[str]]  # and the nodes' names


# -- texts as rows of numbers ----------------------------------------------------------------------


def hashed_words(texts: Sequence[str], dim: int) -> NDArray[np.float32]:
    """Return ``[len(texts), dim]``: a hashed bag of words (Weinberger et al., arXiv 0902.2206).

    Every word has a column and a sign by its hash; a row is the signed sum of the words' weights,
    the logarithm of how rare they are, scaled to a mean square of one. Without words it is zero.
    """
    if dim < 1:
        raise ConfigurationError(f"dim is {dim}", hint="use 1 or more")
    words = [Counter(_WORD.findall(text.lower())) for text in texts]
    frequency = Counter(word for bag in words for word in bag)
    places = {word: _column_and_sign(word, dim) for word in frequency}
    rows = np.zeros((len(texts), dim), np.float32)
    for row, bag in zip(rows, words, strict=True):
        for word, count in bag.items():
            column, sign = places[word]
            row[column] += sign * count * math.log(len(texts) / frequency[word] + 1.0)
    size = np.linalg.norm(rows, axis=1, keepdims=True)
    scale = np.divide(math.sqrt(dim), size, out=np.zeros_like(size), where=size > 0)
    return np.asarray(rows * scale, np.float32)


def _column_and_sign(word: str, dim: int) -> tuple[int, float]:
    value = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
    return (value >> 1) % dim, 1.0 if value & 1 else -1.0


def _text_source(
    name: str,
    texts: Sequence[str],
    edges: Sequence[tuple[int, int]],
    labels: Sequence[str],
    *,
    dim: int,
    seed: int,
) -> ArraySource:
    """Return a source over nodes that are texts; classes are numbered in alphabetical order."""
    classes = {label: number for number, label in enumerate(sorted(set(labels) - {""}))}
    order = np.random.default_rng(seed).permutation(len(texts))
    first, second = round(0.6 * len(texts)), round(0.8 * len(texts))
    splits = {"train": order[:first], "valid": order[first:second], "test": order[second:]}
    source = array_source(
        np.ascontiguousarray(np.array(edges, np.int64).reshape(-1, 2).T),
        features=hashed_words(texts, dim),
        labels=np.array([classes.get(label, -1) for label in labels], np.int64),
        splits={split: np.sort(ids) for split, ids in splits.items()},
        name=name,
    )
    source.class_names = list(classes)
    return source


# -- Debian ----------------------------------------------------------------------------------------


def debian_source(
    *,
    dim: int = 256,
    lists: str | Path = APT_LISTS,
    neighbors: Literal["both", "dependencies", "dependents"] = "both",
    seed: int = 0,
) -> Graph:
    """Return the graph of Debian's packages; ``neighbors`` says whom a package hears from."""
    if neighbors not in {"both", "dependencies", "dependents"}:
        raise ConfigurationError(
            f"neighbors is {neighbors!r}", hint="use both, dependencies or dependents"
        )
    packages = read_packages(Path(lists))
    pairs = package_pairs(packages)
    heard = [(target, source) for source, target in pairs]  # messages flow from source to target
    source = _text_source(
        "debian packages",
        [fields.get("Description", "") for fields in packages.values()],
        {"dependents": pairs, "dependencies": heard, "both": pairs + heard}[neighbors],
        [fields.get("Section", "").strip() for fields in packages.values()],
        dim=dim,
        seed=seed,
    )
    return source, list(packages)


def read_packages(lists: Path) -> dict[str, dict[str, str]]:
    """Return the fields by package; of several versions the first."""
    files = sorted(lists.glob("*Packages*")) if lists.is_dir() else []
    if not files:
        raise DataError(
            f"there are no package lists in {lists}",
            hint="run 'apt-get update' on a Debian or Ubuntu machine, or name a folder with "
            "Packages files of a mirror",
        )
    packages: dict[str, dict[str, str]] = {}
    for path in files:
        for paragraph in _text_of(path).split("\n\n"):
            fields = dict(_FIELD.findall(paragraph))
            if "Package" in fields:
                packages.setdefault(fields["Package"].strip(), fields)
    if not packages:
        raise DataError(f"the package lists in {lists} are empty", hint="run 'apt-get update'")
    return packages


def _text_of(path: Path) -> str:
    try:
        if path.suffix == ".lz4":
            data = _unpacked_by_apt(path)
        else:
            unpack = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix, bytes)
            data = unpack(path.read_bytes())
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"cannot read {path}: {error}", hint="run 'apt-get update'") from error
    return data.decode("utf-8", "replace")


def _unpacked_by_apt(path: Path) -> bytes:
    if not APT_HELPER.is_file():
        raise UnsupportedError(
            f"{path} is packed with lz4 and {APT_HELPER} is missing",
            hint="unpack it with 'lz4 -d', or take the .gz or .xz file of a mirror",
        )
    command = [str(APT_HELPER), "cat-file", str(path)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=_TIMEOUT_S)
    if done.returncode:
        raise DataError(
            f"apt cannot unpack {path}: {done.stderr.decode(errors='replace').strip()[:200]}",
            hint="run 'apt-get update'",
        )
    return done.stdout


def package_pairs(packages: dict[str, dict[str, str]]) -> list[tuple[int, int]]:
    """Return the distinct pairs (package, one that it names), in the order of the lists."""
    numbers = {name: number for number, name in enumerate(packages)}
    provided: dict[str, int] = {}
    for name, fields in packages.items():
        for virtual in _NAME.findall(fields.get("Provides", "")):
            provided.setdefault(virtual, numbers[name])
    pairs: dict[tuple[int, int], None] = {}
    for name, fields in packages.items():
        for relation in _RELATIONS:
            for other in _NAME.findall(fields.get(relation, "")):
                number = numbers.get(other, provided.get(other))
                if number is not None and number != numbers[name]:
                    pairs[numbers[name], number] = None
    return list(pairs)


def debian_types(*, dim: int = 256, lists: str | Path = APT_LISTS, seed: int = 0) -> HeteroSource:
    """Return packages and their maintainers as a graph of two node types."""
    packages = read_packages(Path(lists))
    named = [fields.get("Maintainer", "").strip() for fields in packages.values()]
    numbers = {name: number for number, name in enumerate(sorted(set(named)))}
    maintains = np.array([[numbers[name] for name in named], range(len(named))], np.int64)
    depends = np.array(package_pairs(packages), np.int64).reshape(-1, 2).T
    edges = {
        ("package", "is_needed_by", "package"): depends[::-1],
        ("package", "needs", "package"): depends,
        ("maintainer", "maintains", "package"): maintains,
        ("package", "is_maintained_by", "maintainer"): maintains[::-1],
    }
    source, _ = debian_source(dim=dim, lists=lists, seed=seed)
    most = max(len(packages), len(numbers))
    return HeteroSource(
        name="debian packages and maintainers",
        nodes={"package": source, "maintainer": array_source(None, num_nodes=len(numbers))},
        edges={
            kind: array_source(np.ascontiguousarray(ends), num_nodes=most).edges()
            for kind, ends in edges.items()
        },
    )


# -- WordNet ---------------------------------------------------------------------------------------


class _Synset(NamedTuple):
    key: tuple[str, str]  # part of speech, offset
    words: list[str]
    file_number: str
    pointers: list[tuple[str, str]]
    gloss: str


def wordnet_source(*, dim: int = 256, dictionary: str | Path = DICTIONARY, seed: int = 0) -> Graph:
    """Return WordNet; the name of a synset is its first word.

    Most relations have their inverse in the files, so that neighbours hear from each other.
    """
    parts = _PARTS_OF_SPEECH.values()
    synsets = [synset for part in parts for synset in _synsets(Path(dictionary), part)]
    numbers = {synset.key: number for number, synset in enumerate(synsets)}
    edges: dict[tuple[int, int], None] = {}
    for number, synset in enumerate(synsets):
        for pointer in synset.pointers:
            if pointer not in numbers:
                raise DataError(
                    f"synset {synset.key} points to {pointer}, which is not there",
                    hint="take all data files from the same release of WordNet",
                )
            edges[number, numbers[pointer]] = None
    source = _text_source(
        "wordnet",
        [synset.gloss for synset in synsets],
        list(edges),
        [synset.file_number for synset in synsets],
        dim=dim,
        seed=seed,
    )
    return source, [synset.words[0] for synset in synsets]


def _synsets(dictionary: Path, part: str) -> Iterator[_Synset]:
    path = dictionary / f"data.{part}"
    if not path.is_file():
        raise DataError(
            f"there is no {path}",
            hint="install wordnet-base (Debian), or name the folder with the dict files of WordNet",
        )
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.startswith("  ") or not line.strip():
                continue  # the licence
            try:
                yield _parse(line)
            except (ValueError, IndexError, KeyError) as error:
                raise DataError(
                    f"line {number} of {path} is no synset: {line[:60].strip()!r}",
                    hint="take the file from a release of WordNet",
                ) from error


def _parse(line: str) -> _Synset:
    """Parse offset, lexicographer file, words, pointers and, behind a bar, the gloss."""
    head, _, gloss = line.partition(" | ")
    fields = head.split()
    place = 4 + 2 * int(fields[3], 16)
    pointers = []
    for index in range(int(fields[place])):
        first = place + 1 + index * _FIELDS_PER_POINTER
        _symbol, offset, part, _ends = fields[first : first + _FIELDS_PER_POINTER]
        pointers.append((_part_of_speech(part), offset))
    return _Synset(
        key=(_part_of_speech(fields[2]), fields[0]),
        words=fields[4:place:2],
        file_number=fields[1],
        pointers=pointers,
        gloss=gloss.strip(),
    )


def _part_of_speech(letter: str) -> str:
    """Return the part of a letter; satellite adjectives lie among the adjectives."""
    part = "a" if letter == "s" else letter
    if part not in _PARTS_OF_SPEECH:
        raise ValueError(letter)
    return part


# -- data sets -------------------------------------------------------------------------------------


def write_graph(graph: Graph, folder: str | Path) -> Dataset:
    """Write a graph and the names of its nodes, and open it."""
    source, names = graph
    dataset = ingest(source, folder)
    (Path(folder) / "names.txt").write_text("".join(f"{name}\n" for name in names))
    return dataset


def main() -> None:
    """Write the graph that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("graph", choices=["debian", "debian-typed", "wordnet"])
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--dim", type=int, default=256, help="elements of a feature row")
    parser.add_argument("--from", dest="origin", type=Path, help="apt's lists or the dictionary")
    arguments = parser.parse_args()
    dataset: Dataset | HeteroDataset
    if arguments.graph == "debian-typed":
        lists = arguments.origin or APT_LISTS
        dataset = ingest(debian_types(dim=arguments.dim, lists=lists), arguments.folder)
    elif arguments.graph == "debian":
        graph = debian_source(dim=arguments.dim, lists=arguments.origin or APT_LISTS)
        dataset = write_graph(graph, arguments.folder)
    else:
        graph = wordnet_source(dim=arguments.dim, dictionary=arguments.origin or DICTIONARY)
        dataset = write_graph(graph, arguments.folder)
    with dataset:
        facts = describe(dataset)
    print(", ".join(f"{facts[name]} {name}" for name in ("nodes", "edges")))


if __name__ == "__main__":
    main()
