"""The networks that the chapters train."""

from .gpt import GPT2LikeModel, PositionalEncoding
from .unet import UNet

__all__ = ["GPT2LikeModel", "PositionalEncoding", "UNet"]
