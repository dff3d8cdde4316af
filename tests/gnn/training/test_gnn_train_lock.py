"""Two runs in one folder: the second is refused while the first is at work."""

import os

import pytest

from fivefold.errors import FivefoldError
from fivefold.gnn.training import train_graph


def test_the_second_trainer_is_refused_and_the_first_goes_on(make_config):
    config = make_config(mode="memory", epochs=1)
    refused = []

    def second(_text):
        with pytest.raises(FivefoldError) as caught:
            train_graph(config)
        refused.append(caught.value)

    # The plan is shown in the middle of a run of mode "disk".
    train_graph(make_config(epochs=1), show=second)
    assert len(refused) == 1
    assert str(os.getpid()) in refused[0].message
    assert refused[0].hint
    assert train_graph(make_config(epochs=1)).epochs == 1  # the lock goes with the run
