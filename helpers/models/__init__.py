"""The networks that the chapters train."""

from .bert import Bert
from .gpt import GPT2LikeModel, PositionalEncoding
from .llama import Llama
from .resnet import ResNet
from .unet import UNet
from .vit import ViT

__all__ = ["Bert", "GPT2LikeModel", "Llama", "PositionalEncoding", "ResNet", "UNet", "ViT"]
