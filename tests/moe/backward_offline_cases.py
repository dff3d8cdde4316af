"""Compiles the backward's kernels for sm_90a: a child process of ``test_backward_offline``.

Prints one line of JSON per variant.
"""

import json
import sys

import torch

from fivefold.moe._backward_offline import BACKWARD_LAUNCHES, compile_backward
from fivefold.moe._offline import compile_offline

BF16 = {"dtype": torch.bfloat16, "activation": "swiglu"}
MORE = {
    "d_hidden, bf16 geglu, 128 experts, 8 each": BF16
    | {"activation": "geglu", "intermediate": 768, "num_experts": 128, "top_k": 8},
    "d_hidden, bf16, weights on the input": BF16 | {"weight_on_input": True},
    "d_w13, bf16, weights on the input": BF16 | {"weight_on_input": True},
}
PRODUCTS = ("d_hidden", "d_x", "d_w13", "d_w2")
for launch in PRODUCTS:
    MORE[f"{launch}, fp32 tf32"] = BF16 | {"dtype": torch.float32, "precision": "tf32"}
    MORE[f"{launch}, fp32 ieee"] = BF16 | {"dtype": torch.float32}
    MORE[f"{launch}, bf16, odd sizes"] = BF16 | {
        "hidden": 1001,
        "intermediate": 333,
        "by_descriptor": False,
    }


def show(name, found):
    line = vars(found) | {"variant": name, "products": sorted(found.products)}
    sys.stdout.write(json.dumps(line) + "\n")


def main():
    for name in BACKWARD_LAUNCHES:
        show(name, compile_backward(name, **BF16))
    for name, sizes in MORE.items():
        show(name, compile_backward(name.split(",")[0], **sizes))
    show("forward that keeps", compile_offline("moe_kernel", keeps_hidden=True, **BF16))


if __name__ == "__main__":
    main()
