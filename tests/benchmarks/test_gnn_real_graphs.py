"""Debian's packages and WordNet: small files of the right form, and the real ones."""

import gzip
import lzma
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from benchmarks.gnn import real_graphs
from benchmarks.gnn.real_graphs import (
    debian_source,
    debian_types,
    hashed_words,
    wordnet_source,
    write_graph,
)

from fivefold.errors import ConfigurationError, DataError, UnsupportedError
from fivefold.gnn.data import ingest

PACKAGES = """\
Package: python3-first
Version: 1.0
Depends: libsecond (>= 2.0) | virtual-thing, libsecond:any,
 fourth [amd64]
Suggests: nowhere
Section: python
Description: reads the first things
 and more things

Package: libsecond
Version: 2.1
Provides: virtual-thing (= 1), other-thing
Section: libs
Description: reads second things

Package: third
Pre-Depends: virtual-thing
Recommends: third
Enhances: python3-first
Section: libs
Description:

Package: fourth
Provides: virtual-thing
Description: has no section: none
"""
SECOND_LIST = """\
Package: libsecond
Depends: third
Section: other
"""


def pairs(source):
    rows = source.edge_rows.array
    return sorted(map(tuple, rows.T.tolist()))


@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
def test_packages(tmp_path, packed):
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[packed]
    (tmp_path / f"a_Packages{packed}").write_bytes(pack(PACKAGES.encode()))
    (tmp_path / f"b_Packages{packed}").write_bytes(pack(SECOND_LIST.encode()))
    source, names = debian_source(dim=64, lists=tmp_path, neighbors="dependents")
    assert names == ["python3-first", "libsecond", "third", "fourth"]
    # An alternative and a repetition make one edge, a package does not depend on itself, the first
    # provider stands for a virtual package, and of two versions the first counts.
    assert pairs(source) == [(0, 1), (0, 3), (2, 0), (2, 1)]
    assert source.class_names == ["libs", "python"]
    assert source.label_rows.array.tolist() == [1, 0, 0, -1]
    heard, _ = debian_source(dim=64, lists=tmp_path, neighbors="dependencies")
    assert pairs(heard) == [(0, 2), (1, 0), (1, 2), (3, 0)]
    both, _ = debian_source(dim=64, lists=tmp_path)
    assert pairs(both) == sorted(pairs(source) + pairs(heard))


def test_packages_and_maintainers(tmp_path):
    text = (
        "Package: a\nMaintainer: Zoe <z@example.org>\nDepends: b\nSection: x\n\n"
        "Package: b\nMaintainer: Ada <a@example.org>\n\n"
        "Package: c\nMaintainer: Zoe <z@example.org>\nSection: y\n"
    )
    (tmp_path / "Packages").write_text(text)
    with ingest(debian_types(dim=8, lists=tmp_path), tmp_path / "out") as dataset:
        assert dataset.num_nodes == {"package": 3, "maintainer": 2}
        assert dataset.labels("package").tolist() == [0, -1, 1]
        assert not dataset.has_features("maintainer")
        heard = {
            kind: [adjacency.neighbors(node).tolist() for node in range(adjacency.num_nodes)]
            for kind, adjacency in dataset.topology().edges.items()
        }
    assert heard == {
        ("package", "is_needed_by", "package"): [[1], [], []],
        ("package", "needs", "package"): [[], [0], []],
        ("maintainer", "maintains", "package"): [[1], [0], [1]],
        ("package", "is_maintained_by", "maintainer"): [[1], [0, 2]],
    }


def test_two_edges_keep_their_direction(tmp_path):
    """An array of two edges is two by two either way."""
    text = "Package: a\nDepends: b, c\n\nPackage: b\n\nPackage: c\n"
    (tmp_path / "Packages").write_text(text)
    graph = debian_source(dim=1, lists=tmp_path, neighbors="dependencies")
    with write_graph(graph, tmp_path / "out") as dataset:
        assert dataset.topology().neighbors(0).tolist() == [1, 2]


def test_features_are_words_of_the_description_alone(tmp_path):
    (tmp_path / "Packages").write_text(PACKAGES)
    rows = debian_source(dim=512, lists=tmp_path)[0].feature_rows.array
    changed = PACKAGES.replace("python3-first", "libfirst").replace("Section: libs", "Section: x")
    (tmp_path / "Packages").write_text(changed)
    np.testing.assert_array_equal(
        debian_source(dim=512, lists=tmp_path)[0].feature_rows.array, rows
    )
    assert not rows[2].any()  # no words
    assert (rows[:2] ** 2).mean(axis=1) == pytest.approx(1.0, rel=1e-5)


def test_missing_and_damaged_lists(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="no package lists") as caught:
        debian_source(lists=tmp_path)
    assert "apt-get update" in caught.value.hint
    (tmp_path / "Packages").write_text("\n")
    with pytest.raises(DataError, match="are empty"):
        debian_source(lists=tmp_path)
    (tmp_path / "Packages.gz").write_bytes(b"none")
    with pytest.raises(DataError, match="cannot read"):
        debian_source(lists=tmp_path)
    (tmp_path / "Packages.gz").unlink()
    (tmp_path / "Packages.lz4").write_bytes(b"none")
    monkeypatch.setattr(real_graphs, "APT_HELPER", tmp_path / "none")
    with pytest.raises(UnsupportedError, match="packed with lz4"):
        debian_source(lists=tmp_path)
    with pytest.raises(ConfigurationError, match="neighbors"):
        debian_source(lists=tmp_path, neighbors="none")


HEADER = "  1 This software and database is being provided to you, the LICENSEE, by\n"
NOUNS = """\
00001740 03 n 01 entity 0 002 ~ 00001930 n 0000 + 00002000 v 0101 | that which is perceived
00001930 05 n 02 animal 0 beast 1 001 @ 00001740 n 0000 | a living being; "the beast"
"""
VERBS = "00002000 38 v 01 be 0 002 + 00001740 n 0101 $ 00002000 v 0000 01 + 01 00 | have life  \n"
ADJECTIVES = "00003000 00 s 01 live(p) 0 002 & 00003000 a 0000 \\\\ 00001930 n 0101 | living  \n"
ADVERBS = ""


def write_dictionary(folder):
    parts = {"noun": NOUNS, "verb": VERBS, "adj": ADJECTIVES, "adv": ADVERBS}
    for part, text in parts.items():
        (folder / f"data.{part}").write_text(HEADER + text)


def test_wordnet(tmp_path):
    write_dictionary(tmp_path)
    source, names = wordnet_source(dim=32, dictionary=tmp_path)
    assert names == ["entity", "animal", "be", "live(p)"]
    assert pairs(source) == [(0, 1), (0, 2), (1, 0), (2, 0), (2, 2), (3, 1), (3, 3)]
    assert source.class_names == ["00", "03", "05", "38"]
    assert source.label_rows.array.tolist() == [1, 2, 3, 0]
    glosses = ["that which is perceived", 'a living being; "the beast"', "have life", "living"]
    np.testing.assert_array_equal(source.feature_rows.array, hashed_words(glosses, 32))
    with write_graph((source, names), tmp_path / "out") as dataset:
        assert (dataset.num_nodes, dataset.num_edges, dataset.num_classes) == (4, 7, 4)
        splits = [dataset.train, dataset.valid, dataset.test]
        assert sorted(np.concatenate(splits).tolist()) == [0, 1, 2, 3]
        assert (tmp_path / "out" / "names.txt").read_text().split() == names


def test_damaged_wordnet(tmp_path):
    with pytest.raises(DataError, match="there is no"):
        wordnet_source(dictionary=tmp_path)
    write_dictionary(tmp_path)
    (tmp_path / "data.verb").write_text(VERBS[:25] + "\n")
    with pytest.raises(DataError, match=r"line 1 of .* is no synset"):
        wordnet_source(dictionary=tmp_path)
    (tmp_path / "data.verb").write_text("")
    with pytest.raises(DataError, match="points to"):
        wordnet_source(dictionary=tmp_path)


def test_hashed_words_match_a_plain_reference():
    texts = ["red Red blue", "blue", "", "ice-cream 42 x"]
    rows = hashed_words(texts, 1000)
    # A word that half of the texts have weighs log(4 / 2 + 1), one of a single text log(5).
    blue, red = np.log(3.0), 2 * np.log(5.0)
    scale = np.sqrt(1000 / (blue**2 + red**2))
    assert sorted(np.abs(rows[0][rows[0] != 0])) == pytest.approx([blue * scale, red * scale])
    assert np.count_nonzero(rows[1]) == 1
    assert not rows[2].any()
    assert np.count_nonzero(rows[3]) == 2  # "ice" and "cream"; numbers and letters are no words
    with pytest.raises(ConfigurationError):
        hashed_words(texts, 0)


def real_lists():
    main = list(real_graphs.APT_LISTS.glob("*debian_dists_bookworm_main_binary-amd64_Packages*"))
    return bool(main) and real_graphs.APT_HELPER.is_file()


@pytest.mark.slow
@pytest.mark.skipif(not real_lists(), reason="the package lists of Debian 12 are not here")
def test_published_counts_of_debian():
    packages = real_graphs.read_packages(real_graphs.APT_LISTS)
    assert len(packages) == pytest.approx(63_666, rel=0.01)  # updates come and go
    counts = Counter(fields["Section"] for fields in packages.values())
    published = {"libs": 6711, "libdevel": 5581, "python": 4546, "doc": 4475, "perl": 4223}
    assert len(counts) == 58
    for section, count in published.items():
        assert counts[section] == pytest.approx(count, rel=0.02)
    targets = np.array(real_graphs.package_pairs(packages))[:, 1]
    assert targets.size == pytest.approx(327_947, rel=0.03)
    degrees = np.sort(np.bincount(targets, minlength=len(packages)))[::-1]
    assert degrees[0] == pytest.approx(21_842, rel=0.01)
    assert degrees[: len(packages) // 100].sum() / targets.size == pytest.approx(0.504, abs=0.01)


DICTIONARY = Path(os.environ.get("WORDNET_DICT", "/usr/share/wordnet"))


@pytest.mark.skipif(not (DICTIONARY / "data.noun").is_file(), reason="WordNet is not installed")
def test_published_counts_of_wordnet():
    source, names = wordnet_source(dim=1, dictionary=DICTIONARY)
    assert len(names) == 117_659
    assert len(source.class_names) == 45
    assert source.edge_rows.shape[1] == 361_647  # of 377,592 pointers, each pair once
