"""The networks that the chapters train."""

from .gpt import GPT2LikeModel, PositionalEncoding
from .llama import Llama
from .unet import UNet
from .vit import ViT

__all__ = ["GPT2LikeModel", "Llama", "PositionalEncoding", "UNet", "ViT"]
