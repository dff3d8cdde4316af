"""Compiles the exchange for sm_90a: a child process of ``test_moe_exchange_offline``.

Prints one line of JSON per variant.
"""

import json
import sys

import torch

from fivefold.moe import ExchangeConfig, Router
from fivefold.moe._exchange_offline import compile_exchange

SIZES = {"hidden": 2048, "intermediate": 2048, "top_k": 2, "max_tokens": 8192}
VARIANTS = {
    "compact, bf16 swiglu, 8 ranks": {"ranks": 8, "experts": 64},
    "DeepSeek-V3, 8 ranks, with the gate": {
        "ranks": 8,
        "experts": 256,
        "hidden": 7168,
        "top_k": 8,
    },
    "capacity, bf16 relu, 8 ranks": {
        "ranks": 8,
        "experts": 64,
        "activation": "relu",
        "capacity": 1024,
    },
    "compact, fp32 swiglu in tf32, 4 virtual ranks": {
        "ranks": 4,
        "experts": 8,
        "dtype": torch.float32,
        "precision": "tf32",
    },
}
ROUTERS = {
    "DeepSeek-V3, 8 ranks, with the gate": Router(
        top_k=8,
        score="sigmoid",
        groups=8,
        top_groups=4,
        group_score="top2_sum",
        scale=2.5,
    )
}


BACKWARD = "8 ranks, bf16, backward: "


def main():
    for name, sizes in VARIANTS.items():
        config = ExchangeConfig(**(SIZES | sizes))
        num_local = config.ranks if "virtual" in name else 1
        found = compile_exchange(config, num_local=num_local, router=ROUTERS.get(name))
        line = vars(found) | {"variant": name, "products": sorted(found.products)}
        sys.stdout.write(json.dumps(line) + "\n")
    config = ExchangeConfig(**SIZES, ranks=8, experts=64, training=True)
    for kernel in ("scatter_kernel", "gather_kernel"):
        found = compile_exchange(config, name=kernel)
        line = vars(found) | {"variant": BACKWARD + kernel, "products": sorted(found.products)}
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
