"""Weights, or gradients by name, of models with slow parts under the names that the plain models have."""

import math

import torch


def plain_gpt_state(state):
    """Weights, or gradients, of any mixture of twins under the names that `GPT2LikeModel` has."""
    return {name.replace("linear1.used.", "linear1."): state[name] for name in state if "linear1.dead." not in name}


def plain_vit_state(state, channels=3):
    """Weights, or gradients, of any mixture of twins under the names and in the shapes that `ViT` has."""
    plain = {}
    for name, tensor in state.items():
        if name.endswith("qkv.q.weight"):
            stem = name.removesuffix("q.weight")
            plain[stem + "linear.weight"] = torch.cat([state[f"{stem}{part}.weight"] for part in "qkv"])
        elif name == "patches.linear.weight":
            size = math.isqrt(tensor.shape[1] // channels)
            plain["patches.conv.weight"] = tensor.unflatten(1, (channels, size, size))
        elif name == "patches.linear.bias":
            plain["patches.conv.bias"] = tensor
        elif not name.endswith(("qkv.k.weight", "qkv.v.weight")):
            plain[name] = tensor
    return plain
