"""How ranks find each other under one name, and how they agree to stop."""

import json
import threading
import time

import pytest
from torch.distributed import HashStore

from fivefold.runs import StopRequest
from fivefold.runs.ranks import StopAgreement, close_ranks, name_attempt, open_ranks
from helpers.forked_ranks import ForkedRanks


def meet(store, world_size, *, late_s=0.0):
    names = [None] * world_size

    def come(rank):
        time.sleep(late_s * rank)
        names[rank] = name_attempt(store, rank, world_size, timeout_s=20.0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return names


def test_all_ranks_of_one_start_have_one_name_and_the_next_start_has_another():
    store = HashStore()
    first, second = meet(store, 3, late_s=0.2), meet(store, 3)
    assert None not in first + second
    assert len(set(first)) == 1
    assert len(set(second)) == 1
    assert first[0] != second[0]


@pytest.mark.parametrize(("rank", "missing"), [(0, r"\[1, 2\]"), (1, r"\[0\]")])
def test_ranks_that_do_not_come_are_named_after_the_wait(rank, missing):
    started_s = time.monotonic()
    with pytest.raises(RuntimeError, match=f"ranks {missing} did not come within 0.3 s"):
        name_attempt(HashStore(), rank, 3, timeout_s=0.3)
    assert 0.3 <= time.monotonic() - started_s < 5


@pytest.mark.distributed
def test_the_last_message_on_stopping_is_read_before_the_group_ends(tmp_path):
    """A rank that drains waits for the peer that comes half a second later, and then only once."""

    def work():
        ranks = open_ranks(device="cpu", timeout_s=30.0)
        agreement = StopAgreement(ranks, StopRequest())
        if ranks.rank == 1:
            time.sleep(0.5)
        agreement.start(0)
        agreement.drain()
        agreement.drain()
        waits = [end - begin for begin, end in agreement.take_waits()]
        (tmp_path / f"{ranks.rank}.json").write_text(json.dumps(waits))
        close_ranks(ranks)
        return 0

    world = ForkedRanks(tmp_path / "logs", work, world_size=2)
    assert world.wait() == {0: 0, 1: 0}
    early, late = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert len(early) == len(late) == 1
    assert early[0] > 0.3 > late[0]
