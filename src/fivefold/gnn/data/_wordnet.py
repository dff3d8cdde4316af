"""WordNet as a graph: synsets, their pointers, and the words that define them.

The data files of WordNet 3 (wndb(5WN)): a line is a synset with its offset, the number of its
lexicographer file, its words, its pointers to other synsets and, behind a bar, its gloss. The label
is the lexicographer file (noun.animal, verb.motion, ...); features are the words of the gloss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fivefold.errors import DataError
from fivefold.gnn.data._array_source import ArraySource
from fivefold.gnn.data._dataset import Dataset
from fivefold.gnn.data._ingest import ingest
from fivefold.gnn.data._parts import Progress
from fivefold.gnn.data._words import text_source

DICTIONARY = "/usr/share/wordnet"
_PARTS = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}
_FIELDS_PER_POINTER = 4


@dataclass(frozen=True, slots=True)
class _Synset:
    key: tuple[str, str]  # part of speech, offset
    words: list[str]
    file_number: str
    pointers: list[tuple[str, str]]
    gloss: str


def wordnet(
    folder: str | Path,
    *,
    dim: int = 256,
    dictionary: str | Path = DICTIONARY,
    seed: int = 0,
    progress: Progress | None = None,
) -> Dataset:
    """Write WordNet as a graph and open it.

    Edges are the pointers from synset to synset, each pair once; most relations have their inverse
    in the files, so that neighbours hear from each other.

    Args:
        folder: Where to write.
        dim: Elements of a feature row.
        dictionary: Folder with ``data.noun``, ``data.verb``, ``data.adj`` and ``data.adv``, as
            in Debian's package wordnet-base.
        seed: Of the splits (60, 20 and 20 % of the synsets).
        progress: Told of (stage, done, total).

    Returns:
        The data set; its folder has the synsets' first words in ``names.txt``.

    Raises:
        ConfigurationError: ``dim`` is not allowed.
        DataError: The dictionary is missing or damaged, or the folder holds another data set.

    Examples:
        >>> try:
        ...     wordnet("out", dictionary="nowhere")
        ... except DataError as error:
        ...     print(error.message)
        there is no nowhere/data.noun
    """
    source, names = wordnet_source(dim=dim, dictionary=dictionary, seed=seed)
    dataset = ingest(source, folder, progress=progress)
    (Path(folder) / "names.txt").write_text("".join(f"{name}\n" for name in names))
    return dataset


def wordnet_source(
    *, dim: int = 256, dictionary: str | Path = DICTIONARY, seed: int = 0
) -> tuple[ArraySource, list[str]]:
    """WordNet as a source, and the synsets' first words; see ``wordnet``.

    Raises:
        ConfigurationError: ``dim`` is not allowed.
        DataError: The dictionary is missing or damaged.

    Examples:
        >>> try:
        ...     wordnet_source(dictionary="nowhere")
        ... except DataError as error:
        ...     print(error.hint)
        install wordnet-base (Debian), or name the folder with the dict files of WordNet
    """
    synsets = [synset for part in _PARTS.values() for synset in _synsets(Path(dictionary), part)]
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
    source = text_source(
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
    head, _, gloss = line.partition(" | ")
    fields = head.split()
    num_words = int(fields[3], 16)
    words = fields[4 : 4 + 2 * num_words : 2]
    place = 4 + 2 * num_words
    num_pointers = int(fields[place])
    pointers = []
    for index in range(num_pointers):
        first = place + 1 + index * _FIELDS_PER_POINTER
        _symbol, offset, part, _ends = fields[first : first + _FIELDS_PER_POINTER]
        pointers.append((_part_of(part), offset))
    return _Synset(
        key=(_part_of(fields[2]), fields[0]),
        words=words,
        file_number=fields[1],
        pointers=pointers,
        gloss=gloss.strip(),
    )


def _part_of(letter: str) -> str:
    """Satellite adjectives lie among the adjectives."""
    part = "a" if letter == "s" else letter
    if part not in _PARTS:
        raise ValueError(letter)
    return part
