"""Fit a picture with coloured Gaussian blobs."""

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Config:
    data_factor: int = 4
    width: int = 324
    height: int = 210
    num_points: int = 30000
    max_steps: int = 2000
    ssim_lambda: float = 0.2
    means_lr: float = 5e-2
    colors_lr: float = 2e-2
    opacities_lr: float = 2e-2
    eval_every: int = 500
    tb_every: int = 20
    seed: int = 42


def make_scene(height: int, width: int) -> Tensor:
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    r = (x.square() + y.square()).sqrt()
    return torch.stack([0.5 + 0.5 * torch.sin(12 * r), 0.5 + 0.5 * torch.cos(9 * x + 3 * y), (1 - r).clamp(0, 1)])


def gaussian(window_size: int, sigma: float) -> Tensor:
    values = torch.tensor([math.exp(-((i - window_size // 2) ** 2) / (2 * sigma**2)) for i in range(window_size)])
    return values / values.sum()


def create_window(window_size: int, channel: int) -> Tensor:
    one_d = gaussian(window_size, 1.5).unsqueeze(1)
    return (one_d @ one_d.t()).expand(channel, 1, window_size, window_size).contiguous()


class StructuralSimilarityIndexMeasure:
    def __init__(self, data_range: float = 1.0, window_size: int = 11, channel: int = 3):
        self.window, self.window_size, self.channel = create_window(window_size, channel), window_size, channel
        self.c1, self.c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        pad = self.window_size // 2
        mu_x = F.conv2d(x, self.window, padding=pad, groups=self.channel)
        mu_y = F.conv2d(y, self.window, padding=pad, groups=self.channel)
        mu_xx, mu_yy, mu_xy = mu_x.pow(2), mu_y.pow(2), mu_x * mu_y
        sigma_x = F.conv2d(x * x, self.window, padding=pad, groups=self.channel) - mu_xx
        sigma_y = F.conv2d(y * y, self.window, padding=pad, groups=self.channel) - mu_yy
        sigma_xy = F.conv2d(x * y, self.window, padding=pad, groups=self.channel) - mu_xy
        numerator = (2 * mu_xy + self.c1) * (2 * sigma_xy + self.c2)
        denominator = (mu_xx + mu_yy + self.c1) * (sigma_x + sigma_y + self.c2)
        return (numerator / denominator).mean()


def rasterization(means: Tensor, colors: Tensor, opacities: Tensor, height: int, width: int) -> Tensor:
    """Splats every blob on the 4x4 pixels around its mean."""
    px = (means[:, 0].sigmoid() * (width - 1)).clamp(2, width - 3)
    py = (means[:, 1].sigmoid() * (height - 1)).clamp(2, height - 3)
    offsets = torch.arange(-1, 3)
    ix = px.detach().floor().long()[:, None] + offsets
    iy = py.detach().floor().long()[:, None] + offsets
    wx = torch.exp(-0.5 * (ix - px[:, None]).square())
    wy = torch.exp(-0.5 * (iy - py[:, None]).square())
    weight = opacities.sigmoid()[:, None, None] * wy[:, :, None] * wx[:, None, :]
    index = (iy[:, :, None] * width + ix[:, None, :]).flatten()
    value = (weight[..., None] * colors.sigmoid()[:, None, None, :]).flatten(0, 2)
    image = torch.zeros(height * width, 3).index_add(0, index, value)
    return image.clamp(0, 1).view(height, width, 3)


class Runner:
    """Engine for training and testing."""

    def __init__(self, cfg: Config):
        torch.manual_seed(cfg.seed)
        self.cfg = cfg
        self.pixels = make_scene(cfg.height, cfg.width).permute(1, 2, 0).unsqueeze(0)
        self.splats = torch.nn.ParameterDict({
            "means": torch.nn.Parameter(torch.randn(cfg.num_points, 2) * 1.5),
            "colors": torch.nn.Parameter(torch.zeros(cfg.num_points, 3)),
            "opacities": torch.nn.Parameter(torch.zeros(cfg.num_points)),
        })
        self.optimizers = {
            name: torch.optim.Adam([{"params": self.splats[name], "lr": getattr(cfg, f"{name}_lr"), "name": name}], eps=1e-15)
            for name in self.splats
        }
        self.ssim = StructuralSimilarityIndexMeasure(data_range=1.0)

    def rasterize_splats(self) -> Tensor:
        image = rasterization(**self.splats, height=self.cfg.height, width=self.cfg.width)
        return image.unsqueeze(0)

    def train(self):
        cfg = self.cfg
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(self.optimizers["means"], gamma=0.01 ** (1.0 / cfg.max_steps))]
        global_tic = time.time()
        for step in range(cfg.max_steps):
            colors = self.rasterize_splats()
            l1loss = F.l1_loss(colors, self.pixels)
            ssimloss = 1.0 - self.ssim(self.pixels.permute(0, 3, 1, 2), colors.permute(0, 3, 1, 2))
            loss = l1loss * (1.0 - cfg.ssim_lambda) + ssimloss * cfg.ssim_lambda
            loss.backward()
            if step % cfg.tb_every == 0:
                print(f"loss={loss.item():.3f}| {step}/{cfg.max_steps}")
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            for scheduler in schedulers:
                scheduler.step()
            if (step + 1) % cfg.eval_every == 0:
                self.eval(step, time.time() - global_tic)

    @torch.no_grad()
    def eval(self, step: int, elapsed: float):
        mse = F.mse_loss(self.rasterize_splats(), self.pixels)
        print(f"Step {step + 1}: PSNR {-10 * math.log10(mse.item()):.3f}, ellipse_time {elapsed:.2f}")


if __name__ == "__main__":
    Runner(Config()).train()
