"""What an unfinished ingestion left behind is damaged: the same call refuses or does it again."""

import numpy as np
import pytest

from fivefold.errors import DataError
from fivefold.gnn.data import Dataset, array_source, ingest

NODES, EDGES = 2000, 400_000  # more than fit in the least memory, so that they are spilled
MEMORY = 16_000_000


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def pairs():
    return np.random.default_rng(5).integers(0, NODES, (2, EDGES))


@pytest.fixture
def unfinished(pairs, tmp_path):
    """A folder in which all edges are spilled and none is sorted."""

    def stop(stage, _done, _total):
        if stage == "edges sorted":
            raise Killed

    with pytest.raises(Killed):
        ingest(array_source(pairs), tmp_path / "out", memory_bytes=MEMORY, progress=stop)
    return tmp_path / "out"


def flip(path, share=0.5):
    data = bytearray(path.read_bytes())
    data[int(share * len(data))] ^= 4
    path.write_bytes(data)


def test_spilled_edges_that_were_damaged_are_refused(pairs, unfinished):
    spilled = unfinished / "graph.fvf.work" / "edges.fvf"
    flip(spilled)
    with pytest.raises(DataError, match=rf"{spilled.name} .*is damaged.*remove .*graph.fvf.work"):
        ingest(array_source(pairs), unfinished, memory_bytes=MEMORY)


def test_with_a_damaged_journal_the_edges_are_read_again(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr("fivefold.gnn.data._write_graph._MARK_EVERY_EDGES", 50_000)
    unfinished = tmp_path / "out"

    def stop(_stage, done, _total):
        if done > EDGES // 2:
            raise Killed

    with pytest.raises(Killed):
        ingest(array_source(pairs), unfinished, memory_bytes=MEMORY, progress=stop)
    flip(unfinished / "graph.fvf.work" / "edges.fvf.partial.journal")
    ingest(array_source(pairs), unfinished, memory_bytes=MEMORY).close()
    ingest(array_source(pairs), tmp_path / "whole", memory_bytes=1 << 30).close()
    with Dataset.open(unfinished) as found, Dataset.open(tmp_path / "whole") as expected:
        np.testing.assert_array_equal(found.topology().indices, expected.topology().indices)
