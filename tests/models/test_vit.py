"""The Vision Transformer: torch's own layers as oracle, and able to learn."""

import torch
import torch.nn.functional as F
from torch import nn

from helpers.models import ViT
from helpers.models.vit import ConvPatches


def tiny(**changes):
    sizes = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 2, "heads": 2, "head_dim": 8, "mlp_size": 64}
    return ViT(5, **sizes | {"dropout": 0.0} | changes)


def test_a_block_is_torchs_encoder_layer():
    model, x = tiny(), torch.randn(3, 16, 16)
    block = model.blocks[0]
    peer = nn.TransformerEncoderLayer(16, 2, 64, 0.0, activation="gelu", batch_first=True, norm_first=True)
    with torch.no_grad():
        peer.self_attn.in_proj_weight.copy_(block.attention.qkv.linear.weight)
        peer.self_attn.in_proj_bias.zero_()
    ours = (block.attention.out, block.mlp.up, block.mlp.down, block.norm1, block.norm2)
    theirs = (peer.self_attn.out_proj, peer.linear1, peer.linear2, peer.norm1, peer.norm2)
    for to, module in zip(theirs, ours, strict=True):
        to.load_state_dict(module.state_dict())
    torch.testing.assert_close(block(x), peer(x), atol=1e-5, rtol=1e-4)


def test_patches_are_the_products_of_unfolded_patches_row_by_row():
    patches, images = ConvPatches(4, 6), torch.randn(2, 3, 12, 12)
    columns = F.unfold(images, 4, stride=4).transpose(1, 2)  # (B, T, 3·4·4)
    expected = columns @ patches.conv.weight.flatten(1).T + patches.conv.bias
    torch.testing.assert_close(patches(images), expected, atol=1e-5, rtol=1e-4)
