"""One rank of a world whose ranks compute with different kernels: started by the test beside it.

python kernel_rank.py RANK WORLD_SIZE PORT, with the kernels chosen in the environment: they are
fixed when torch first computes, so ranks of one world must be processes of their own.
"""

import contextlib
import hashlib
import itertools
import json
import os
import sys
import warnings

import torch
import torch.distributed as dist

from fivefold.optim import OuterSync, StabilityWarning, _flat
from helpers.outer_world import OF_GRADIENTS, RULES

CODECS = ("fp32", "bf16", "fp16", "int8", "int4")
SIZES = (4099, 17, 70_001, 1, 301)  # odd: the last elements of each are not in a vector
STEPS = 11


def odd_alignment(elements):
    """Let flat buffers begin ``elements`` elements into their memory."""
    plain = torch.zeros

    def zeros(size, **options):
        if not isinstance(size, int) or "pin_memory" not in options:
            return plain(size, **options)
        return plain(size + elements, **options)[elements:]

    torch.zeros = zeros


def digest(rank, rule, codec):
    """Train, and return the digest of what all ranks must have in common, at every drain."""
    parameters = torch.nn.ParameterList(torch.ones(size) for size in SIZES)
    parameters.register_buffer("mean", torch.ones(37))
    optimizer = torch.optim.SGD(parameters.parameters(), lr=0.1)
    sync = OuterSync(parameters, optimizer, rule=rule, codec=codec, check_every_rounds=1)
    noise = torch.Generator().manual_seed(1 + rank)
    found = hashlib.sha256()
    for step in range(STEPS):
        with torch.no_grad():
            for tensor in parameters.state_dict().values():
                tensor.add_(0.01 * torch.randn(tensor.shape, generator=noise))
        if step == 4:  # joins late: its start is a mean
            parameters.append(torch.nn.Parameter(torch.full((1003,), 1.0 + rank / 3)))
        sync.step(weight=rank + 0.3)
        if step in (STEPS // 2, STEPS - 1):
            sync.finalize()
            for fragment in sync.state_dict()["fragments"].values():
                for buffers in fragment["tensors"].values():
                    for name in ("anchor", "momentum"):
                        if name in buffers:
                            found.update(buffers[name].numpy().tobytes())
    for tensor in parameters.state_dict().values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


@contextlib.contextmanager
def naming(case):
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case {case}")
        raise


def main(rank, world_size, port):
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    odd_alignment(int(os.environ["FIRST_ELEMENT"]))
    _flat._CPU_PIECE_ELEMENTS = int(os.environ["PIECE_ELEMENTS"])
    warnings.simplefilter("ignore", StabilityWarning)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    turns = itertools.cycle(CODECS[1:])
    # With delayed gradients each rank takes the optimizer's step for itself, in its own rounding.
    names = [name for name in RULES if name not in OF_GRADIENTS]
    cases = [(name, codec) for name in names for codec in ("fp32", next(turns))]
    found = {}
    for name, codec in cases:
        with naming(f"{name} {codec}"):
            found[f"{name} {codec}"] = digest(rank, RULES[name], codec)
    capability = torch.backends.cpu.get_cpu_capability()
    sys.stdout.write(json.dumps({"capability": capability, "digests": found}) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads may still wait for a peer


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
