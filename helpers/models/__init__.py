"""The networks that the chapters train."""

from .gpt import GPT2LikeModel, PositionalEncoding
from .unet import UNet
from .vit import ViT

__all__ = ["GPT2LikeModel", "PositionalEncoding", "UNet", "ViT"]
