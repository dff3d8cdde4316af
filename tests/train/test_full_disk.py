"""A disk that fills up during a checkpoint: says so, says what to do, and loses nothing."""

import resource
import shutil

import pytest

from fivefold.errors import CheckpointError
from fivefold.train import train


def limited_to(size, config):
    """Train while no file may grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        train(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.97], ids=["early", "middle", "late"])
def test_the_reason_is_the_disks_own_and_the_run_can_go_on(make_config, share):
    config = make_config("none", steps=4, checkpoint_every_steps=2, validate_every_steps=0)
    wide = config.model.model_copy(update={"width": 128})
    config = config.model_copy(update={"model": wide})
    expected = train(config).parameters_sha256
    folder = config.run.output / "checkpoints"
    size = (folder / "step-00000002" / "__0_0.distcp").stat().st_size
    shutil.rmtree(folder / "step-00000004")
    with pytest.raises(CheckpointError) as caught:
        limited_to(int(share * size), config)
    assert f"rank 0 cannot write a checkpoint to {folder}" in caught.value.message
    assert "File too large" in caught.value.message
    assert "a rank's part takes about" in caught.value.message
    assert "free space" in caught.value.hint
    assert "earlier checkpoints are untouched" in caught.value.hint
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    assert train(config).parameters_sha256 == expected
