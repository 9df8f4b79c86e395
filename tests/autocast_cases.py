"""Operations whose result types under `Autocast` are compared with those under torch.autocast."""

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, linalg, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves

Make = Callable[..., Tensor]


def _classes(device: torch.device, count: int = 4) -> Tensor:
    return torch.zeros(count, dtype=torch.long, device=device)


def _signs(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], dtype=torch.long, device=x.device)


def _loss(function: Callable, *extra: object) -> Callable[[Make], Tensor]:
    return lambda t: function(t(4, 4), t(4, 4), *extra)


def _on_classes(function: Callable) -> Callable[[Make], Tensor]:
    def case(t: Make) -> Tensor:
        x = t(4, 4)
        return function(x, _classes(x.device))

    return case


def _by_methods(*names: str) -> dict[str, Callable[[Make], Tensor]]:
    return {f"Tensor.{name}": lambda t, name=name: getattr(t(4, 4).abs() + 1, name)() for name in names}


CASES: dict[str, Callable[[Make], object]] = {
    "matmul": lambda t: torch.matmul(t(4, 4), t(4, 4)),
    "@": lambda t: t(4, 4) @ t(4, 4),
    "Tensor.mm": lambda t: t(4, 4).mm(t(4, 4)),
    "mm": lambda t: torch.mm(t(4, 4), mat2=t(4, 4)),
    "bmm": lambda t: torch.bmm(t(2, 4, 4), t(2, 4, 4)),
    "Tensor.bmm": lambda t: t(2, 4, 4).bmm(t(2, 4, 4)),
    "addmm": lambda t: torch.addmm(t(4, 4), t(4, 4), t(4, 4)),
    "baddbmm": lambda t: torch.baddbmm(t(2, 4, 4), t(2, 4, 4), t(2, 4, 4)),
    "addbmm": lambda t: torch.addbmm(t(4, 4), t(2, 4, 4), t(2, 4, 4)),
    "mv": lambda t: t(4, 4).mv(t(4)),
    "addmv": lambda t: torch.addmv(t(4), t(4, 4), t(4)),
    "addr": lambda t: torch.addr(t(4, 4), t(4), t(4)),
    "linear": lambda t: F.linear(t(4, 4), t(4, 4), t(4)),
    "bilinear": lambda t: F.bilinear(t(4, 4), t(4, 4), t(3, 4, 4), t(3)),
    "einsum": lambda t: torch.einsum("ij,jk->ik", t(4, 4), t(4, 4)),
    "einsum without a product": lambda t: torch.einsum("ij,ij->ij", t(4, 4), t(4, 4)),
    "inner": lambda t: torch.inner(t(4, 4), t(4, 4)),
    "inner with a number": lambda t: torch.inner(t(4, 4), t()),
    "tensordot": lambda t: torch.tensordot(t(4, 4), t(4, 4), 1),
    "multi_dot": lambda t: linalg.multi_dot([t(4, 4), t(4, 4), t(4, 4)]),
    "vecdot": lambda t: linalg.vecdot(t(4, 4), t(4, 4)),
    "matrix_power": lambda t: linalg.matrix_power(t(4, 4), 2),
    "conv1d": lambda t: F.conv1d(t(2, 3, 8), t(4, 3, 3), t(4)),
    "conv2d": lambda t: F.conv2d(t(2, 3, 8, 8), t(4, 3, 3, 3), padding="same"),
    "conv3d": lambda t: F.conv3d(t(2, 3, 4, 4, 4), t(4, 3, 3, 3, 3)),
    "conv_transpose2d": lambda t: F.conv_transpose2d(t(2, 3, 8, 8), t(3, 4, 3, 3)),
    "prelu": lambda t: F.prelu(t(4, 4), t(1)),
    "attention": lambda t: F.scaled_dot_product_attention(t(2, 2, 4, 8), t(2, 2, 4, 8), t(2, 2, 4, 8)),
    "attention with a mask": lambda t: F.scaled_dot_product_attention(*[t(2, 2, 4, 8)] * 3, attn_mask=t(4, 4)),
    "relu": lambda t: F.relu(t(4, 4)),
    "gelu": lambda t: F.gelu(t(4, 4)),
    "silu": lambda t: F.silu(t(4, 4)),
    "softplus": lambda t: F.softplus(t(4, 4)),
    "sigmoid": lambda t: t(4, 4).sigmoid(),
    "add": lambda t: t(4, 4) + t(4, 4),
    "mul": lambda t: t(4, 4) * t(4, 4),
    "F.softmax": lambda t: F.softmax(t(4, 4), -1),
    "Tensor.softmax": lambda t: t(4, 4).softmax(-1),
    "softmax, type asked": lambda t: t(4, 4).softmax(-1, torch.float16),
    "special.softmax": lambda t: torch.special.softmax(t(4, 4), -1),
    "log_softmax": lambda t: torch.log_softmax(t(4, 4), -1),
    "softmin": lambda t: F.softmin(t(4, 4), -1),
    "logsumexp": lambda t: t(4, 4).logsumexp(-1),
    "layer_norm": lambda t: F.layer_norm(t(4, 4), (4,), t(4), t(4)),
    "rms_norm": lambda t: F.rms_norm(t(4, 4), (4,)),
    "group_norm": lambda t: F.group_norm(t(4, 4), 2),
    "batch_norm": lambda t: F.batch_norm(t(4, 4), None, None, training=True),
    "normalize": lambda t: F.normalize(t(4, 4)),
    "cosine_similarity": lambda t: F.cosine_similarity(t(4, 4), t(4, 4)),
    "pairwise_distance": lambda t: F.pairwise_distance(t(4, 4), t(4, 4)),
    "cdist": lambda t: torch.cdist(t(4, 4), t(4, 4)),
    "dist": lambda t: torch.dist(t(4, 4), t(4, 4)),
    "norm": lambda t: t(4, 4).norm(),
    "norm of rows": lambda t: torch.norm(t(4, 4), dim=1),
    "nuclear norm": lambda t: torch.norm(t(4, 4), p="nuc"),
    "linalg.norm": lambda t: linalg.norm(t(4, 4)),
    "vector_norm": lambda t: linalg.vector_norm(t(4, 4), dim=1),
    "renorm": lambda t: t(4, 4).renorm(2, 0, 1.0),
    "sum": lambda t: t(4, 4).sum(),
    "sum of rows": lambda t: torch.sum(t(4, 4), dim=1),
    "sum, type asked": lambda t: t(4, 4).sum(dtype=torch.float16),
    "sum_to_size": lambda t: t(4, 4).sum_to_size(4, 1),
    "mean": lambda t: t(4, 4).mean(),
    "var": lambda t: t(4, 4).var(),
    "prod": lambda t: t(4, 4).prod(),
    "cumsum": lambda t: t(4, 4).cumsum(0),
    "cumprod": lambda t: t(4, 4).cumprod(0),
    "trapezoid": lambda t: torch.trapezoid(t(4, 4)),
    "** 2": lambda t: t(4, 4) ** 2,
    "2 **": lambda t: 2 ** t(4, 4),
    "pow": lambda t: torch.pow(t(4, 4), t(4, 4)),
    "1 /": lambda t: 1 / t(4, 4),
    "/": lambda t: t(4, 4) / t(4, 4),
    "cat": lambda t: torch.cat([t(4, 4), t(4, 4)]),
    "stack": lambda t: torch.stack([t(4, 4), t(4, 4)]),
    "addcmul": lambda t: torch.addcmul(t(4, 4), t(4, 4), t(4, 4)),
    "addcdiv": lambda t: t(4, 4).addcdiv(t(4, 4), t(4, 4)),
    "atan2": lambda t: torch.atan2(t(4, 4), t(4, 4)),
    "dot": lambda t: torch.dot(t(4), t(4)),
    "cross": lambda t: torch.cross(t(4, 3), t(4, 3), dim=1),
    "index_put": lambda t: t(4).index_put((torch.tensor([0]),), t(1)),
    "scatter_add": lambda t: (x := t(4)).scatter_add(0, _classes(x.device), t(4)),
    "grid_sample": lambda t: F.grid_sample(t(1, 2, 4, 4), t(1, 3, 3, 2), align_corners=False),
    "interpolate": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="bilinear"),
    "interpolate by area": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=0.5, mode="area"),
    "max_pool2d": lambda t: F.max_pool2d(t(1, 2, 4, 4), 2),
    "avg_pool3d": lambda t: F.avg_pool3d(t(1, 2, 4, 4, 4), 2),
    "adaptive_avg_pool2d": lambda t: F.adaptive_avg_pool2d(t(1, 2, 4, 4), 1),
    "pad": lambda t: F.pad(t(1, 2, 4), (1, 1)),
    "pad with reflection": lambda t: F.pad(t(1, 2, 4), (1, 1), mode="reflect"),
    "cross_entropy": _on_classes(F.cross_entropy),
    "cross_entropy of shares": _loss(F.cross_entropy),
    "nll_loss": _on_classes(F.nll_loss),
    "multi_margin_loss": _on_classes(F.multi_margin_loss),
    "mse_loss": _loss(F.mse_loss),
    "l1_loss": _loss(F.l1_loss),
    "smooth_l1_loss": _loss(F.smooth_l1_loss),
    "huber_loss": _loss(F.huber_loss),
    "kl_div": _loss(F.kl_div),
    "soft_margin_loss": _loss(F.soft_margin_loss),
    "poisson_nll_loss": _loss(F.poisson_nll_loss),
    "hinge_embedding_loss": _loss(F.hinge_embedding_loss),
    "bce with logits": _loss(F.binary_cross_entropy_with_logits),
    "bce": lambda t: F.binary_cross_entropy(t(4, 4).sigmoid(), t(4, 4).sigmoid()),
    "cosine_embedding_loss": lambda t: (x := t(4, 4), F.cosine_embedding_loss(x, t(4, 4), _signs(x)))[1],
    "triplet_margin_loss": lambda t: F.triplet_margin_loss(t(4, 4), t(4, 4), t(4, 4)),
    "gaussian_nll_loss": lambda t: F.gaussian_nll_loss(t(4, 4), t(4, 4), t(4, 4).abs() + 1),
    "cov": lambda t: t(4, 4).cov(),
    "corrcoef": lambda t: torch.corrcoef(t(4, 4)),
    "linalg.inv": lambda t: linalg.inv(t(4, 4).tril()),
    "linalg.qr": lambda t: linalg.qr(t(4, 4)),
    "linalg.pinv": lambda t: linalg.pinv(t(4, 4)),
    "fft": lambda t: torch.fft.rfft(t(4, 4)),
    "quantile": lambda t: t(4, 4).quantile(0.5),
    "gru_cell": lambda t: nn.GRUCell(4, 4, device=t().device)(t(4, 4)),
    "lstm_cell": lambda t: nn.LSTMCell(4, 4, device=t().device)(t(4, 4)),
    "rnn_tanh_cell": lambda t: nn.RNNCell(4, 4, device=t().device)(t(4, 4)),
    "add_": lambda t: t(4, 4).add_(t(4, 4)),
    "addmm_": lambda t: t(4, 4).addmm_(t(4, 4), t(4, 4)),
    "mm(out=)": lambda t: torch.mm(t(4, 4), x := t(4, 4), out=torch.empty_like(x)),
    "exp_": lambda t: t(4, 4).exp_(),
    **_by_methods("exp", "expm1", "log", "log2", "log10", "log1p", "rsqrt", "reciprocal", "acos", "asin", "cosh"),
    **_by_methods("sinh", "tan", "sqrt", "tanh", "sin", "square", "trace", "erfinv"),
}

# Case → the known difference that it shows, where its types differ from torch.autocast's.
DIFFERENT = {
    "cpu": {
        "gru_cell": "lstm, gru, lstm_cell, gru_cell",
        "lstm_cell": "lstm, gru, lstm_cell, gru_cell",
        "cov": "cov, corrcoef, linalg.pinv",
        "corrcoef": "cov, corrcoef, linalg.pinv",
        "linalg.pinv": "cov, corrcoef, linalg.pinv",
        "matrix_power": "linalg.matrix_power",
        "einsum without a product": "einsum, inner, tensordot",
        "inner with a number": "einsum, inner, tensordot",
        "pad with reflection": "pad with mode reflect or replicate",
        "inner": "inner, tensordot, multi_dot given two types",
        "multi_dot": "inner, tensordot, multi_dot given two types",
        "tensordot": "inner, tensordot, multi_dot given two types",
    },
    "cuda": {
        "cov": "cov, corrcoef, linalg.pinv",
        "corrcoef": "cov, corrcoef, linalg.pinv",
        "linalg.pinv": "cov, corrcoef, linalg.pinv",
        "matrix_power": "linalg.matrix_power",
        "inner": "inner, tensordot, multi_dot given two types",
        "inner with a number": "einsum, inner, tensordot",
        "sum_to_size": "sum_to_size",
        "nuclear norm": "norm(p='nuc')",
    },
}

# Cases of which fake tensors on CUDA can't tell: those that look at values, and those that ask for a driver.
FAKES_CANNOT_RUN = {"cov", "corrcoef", "gaussian_nll_loss", "grid_sample", "gru_cell", "lstm_cell", "rnn_tanh_cell"}
# Fake tensors run another function than a GPU does, in which nothing is cast (the pseudo-inverse's product).
FAKES_HIDE = {"linalg.pinv"}
# What the GPU's kernel of a case calls, and torch.autocast casts there, where fake tensors run another function.
ON_A_GPU: dict[str, Callable[[Make], object]] = {"Tensor.trace": lambda t: (t(4, 4).abs() + 1).diagonal().sum()}

AN_ERROR, NOT_TOLD = "an error", "cannot be told without a GPU"
_ASKS_FOR_A_GPU = ("NVIDIA driver", "not linked with support for cuda")


def result_types(case: Callable[[Make], object], types: tuple[torch.dtype, ...], device: str, region: object) -> object:
    """The types of what a case returns under a region, or AN_ERROR; its inputs take the given types in turn.

    NOT_TOLD if the error is not the operation's, but one of fake tensors.
    """
    turn = itertools.cycle(types)

    def make(*shape: int) -> Tensor:
        return torch.ones(shape, device=device, dtype=next(turn))

    try:
        with region:
            found = case(make)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
        return NOT_TOLD
    except (RuntimeError, ValueError) as error:
        return NOT_TOLD if any(words in str(error) for words in _ASKS_FOR_A_GPU) else AN_ERROR
    return [leaf.dtype for leaf in tree_leaves(found)]


@contextlib.contextmanager
def torch_autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    """torch.autocast, on a machine without the device, too: fake tensors need none."""
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_enabled(device, True)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
