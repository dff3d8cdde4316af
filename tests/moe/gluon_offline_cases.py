"""Compiles the Gluon kernel for sm_90a: a child process of ``test_gluon_offline``, started once.

Prints one line of JSON per variant.
"""

import json
import sys

import torch

from fivefold.moe._gluon import compile_gluon

PAPER = {"hidden": 2048, "intermediate": 2048, "num_experts": 32, "top_k": 2}
QWEN3 = {"hidden": 2048, "intermediate": 768, "num_experts": 128, "top_k": 8}
BF16 = {"dtype": torch.bfloat16}
VARIANTS = {
    "paper's shape, bf16 relu, biases": BF16 | PAPER | {"activation": "relu", "biases": True},
    "Qwen3-30B-A3B, bf16 swiglu": BF16 | QWEN3 | {"activation": "swiglu"},
    "Qwen3-30B-A3B, bf16 geglu, biases": BF16 | QWEN3 | {"activation": "geglu", "biases": True},
    "one expert each, fp16 swiglu, weight on input": PAPER
    | {"dtype": torch.float16, "activation": "swiglu", "top_k": 1, "weight_on_input": True},
}


def main():
    for name, sizes in VARIANTS.items():
        found = compile_gluon(**sizes)
        line = vars(found) | {"variant": name, "products": sorted(found.products)}
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
