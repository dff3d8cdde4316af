"""Compiles the kernels for sm_90a: a child process of ``test_offline_compile``, started once.

Prints one line of JSON per variant.
"""

import json
import sys

import torch

from fivefold.moe._offline import compile_offline

VARIANTS = {
    "bf16 swiglu": {"dtype": torch.bfloat16, "activation": "swiglu"},
    "bf16 relu": {"dtype": torch.bfloat16, "activation": "relu"},
    "fp32 relu tf32": {"dtype": torch.float32, "activation": "relu", "precision": "tf32"},
    "fp32 swiglu tf32": {"dtype": torch.float32, "activation": "swiglu", "precision": "tf32"},
    "fp32 swiglu tf32x3": {"dtype": torch.float32, "activation": "swiglu", "precision": "tf32x3"},
    "fp32 relu ieee": {"dtype": torch.float32, "activation": "relu"},
    "bf16 swiglu, odd sizes": {
        "dtype": torch.bfloat16,
        "activation": "swiglu",
        "hidden": 1001,
        "intermediate": 333,
        "by_descriptor": False,
    },
    "bf16 geglu, 128 experts, 8 each": {
        "dtype": torch.bfloat16,
        "activation": "geglu",
        "intermediate": 768,
        "num_experts": 128,
        "top_k": 8,
        "biases": False,
    },
}
LAUNCHES = ["count_kernel", "place_kernel", "first_kernel", "second_kernel", "combine_kernel"]


def main():
    work = {name: ("moe_kernel", sizes) for name, sizes in VARIANTS.items()}
    work |= {name: (name, VARIANTS["bf16 swiglu"]) for name in LAUNCHES}
    for name, (kernel, sizes) in work.items():
        found = compile_offline(kernel, **sizes)
        line = vars(found) | {"variant": name, "products": sorted(found.products)}
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
