"""The path to a GPU: pinned buffers, copy stream, cache on the device."""

import numpy as np
import pytest
import torch

from fivefold.gnn.loading import DiskLoader, OnlineLoader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("policy", ["static", "belady"])
@pytest.mark.parametrize("form", ["edge_index", "blocks"])
def test_batches_on_the_gpu_are_those_of_an_in_memory_gather(stores, policy, form):
    dataset, features, store = stores(dim=100, policy=policy)
    with DiskLoader(store, labels=dataset.labels, device="cuda", form=form) as loader:
        for _ in range(3):
            kept = []
            for batch in loader:
                assert {tensor.device.type for tensor in batch.tensors()} == {"cuda"}
                busy = batch.x @ torch.ones(100, 4000, device="cuda")  # the loop's own stream
                kept.append((batch.n_id, batch.x.clone(), busy.sum()))
                del batch
            for ids, x, _ in kept:
                assert np.array_equal(x.cpu().numpy(), features[ids.cpu().numpy()])
        statistics = loader.statistics()
    assert statistics.rows["device"] > 0
    assert "copy to the device" in statistics.stage_s


def test_online_batches_on_the_gpu(stores):
    dataset, features, _ = stores(dim=100)
    with OnlineLoader(
        dataset, dataset.train, fanouts=[3, 3], batch_size=9, device="cuda"
    ) as loader:
        for batch in loader:
            assert np.array_equal(batch.x.cpu().numpy(), features[batch.n_id.cpu().numpy()])
