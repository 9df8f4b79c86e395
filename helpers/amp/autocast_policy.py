"""The type each function runs in: torch.autocast's lists for the CPU and for CUDA, as plain data.

The names are those of the operators behind the Python functions (`linalg_qr` is `torch.linalg.qr`). `_LISTS` has the
operators that torch registers with its dispatcher; those that the installed torch doesn't register (2.11 leaves
`rms_norm` alone) are ignored. `_THROUGH` has unlisted functions that call a listed one in C++, which a Python mode
can't intercept. CUDA's list is used for every other accelerator, too.
"""

import functools
from collections.abc import Callable

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

LOW = "low precision"  # inputs are cast to the region's type; a weight is cast once a region
FP32 = "fp32"  # inputs are cast to fp32
FP32_RESULT = "fp32 result"  # summed and returned in fp32, unless a dtype is asked for
PROMOTE = "promote"  # inputs are cast to fp32 if one of them is fp32
REFUSE = "refused"  # an error, because half precision is not safe for it
UNTOUCHED = "untouched"  # as without Autocast

_LOW = """
    addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    _convolution linalg_vecdot linear matmul mm prelu scaled_dot_product_attention
"""
_LOSSES = """
    binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d poisson_nll_loss
    smooth_l1_loss soft_margin_loss triplet_margin_loss
"""
_LISTS = {
    "cpu": {
        LOW: _LOW + "_addmm_activation _native_multi_head_attention mkldnn_rnn_layer",
        FP32: _LOSSES
        + """
            _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d
            binary_cross_entropy cdist cholesky cholesky_inverse cholesky_solve cross_entropy_loss ctc_loss
            fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft
            fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d
            geqrf grid_sampler grid_sampler_2d grid_sampler_3d inverse linalg_cholesky linalg_cholesky_ex linalg_cond
            linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex
            linalg_lstsq linalg_matrix_rank linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv
            linalg_tensorsolve lu_solve max_pool3d max_unpool2d max_unpool3d multilabel_margin_loss_forward
            nanquantile orgqr ormqr pinverse polar prod qr quantile reflection_pad1d reflection_pad2d
            replication_pad1d replication_pad2d replication_pad3d stft svd trace triangular_solve view_as_complex
        """,
        PROMOTE: "cat index_copy stack",
    },
    "cuda": {
        LOW: _LOW
        + """
            _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addmv addr chain_matmul
            convolution cudnn_convolution cudnn_convolution_transpose einsum gru_cell linalg_multi_dot lstm_cell mv
            rnn_relu_cell rnn_tanh_cell
        """,
        FP32: _LOSSES
        + """
            _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
            _upsample_nearest_exact3d acos asin cdist cosh cosine_similarity dist erfinv exp expm1 frobenius_norm
            group_norm layer_norm log log10 log1p log2 logsumexp native_layer_norm norm nuclear_norm pdist pow
            reciprocal renorm rms_norm rsqrt sinh softplus tan upsample_bicubic2d upsample_bilinear2d
            upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
        """,
        FP32_RESULT: "cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax prod softmax sum",
        PROMOTE: "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot",
        REFUSE: "binary_cross_entropy",
    },
}
_RNN = "gru lstm rnn_relu rnn_tanh"
_THROUGH = {
    "cpu": {
        LOW: _RNN
        + " chain_matmul einsum gru_cell inner linalg_multi_dot lstm_cell rnn_relu_cell rnn_tanh_cell tensordot",
        FP32: "cross_entropy lu nll_loss_nd",
    },
    "cuda": {
        LOW: _RNN + " inner",
        FP32: """
            cross_entropy cross_entropy_loss cumulative_trapezoid nll_loss_nd pairwise_distance square trace trapezoid
            trapz
        """,
        FP32_RESULT: "linalg_norm special_log_softmax special_softmax",
    },
}
_OPERATORS = {"matmul": ("__matmul__", "__rmatmul__"), "pow": ("__pow__", "__rpow__")}

# (device, what, with Autocast, with torch.autocast, why)
KNOWN_DIFFERENCES = (
    ("cpu", "lstm, gru, lstm_cell, gru_cell", "low precision",
     "fp32 result of low-precision products, or oneDNN's lstm, which a CPU without bf16 instructions refuses",
     "one call in C++ for all steps: its inputs can be cast, what happens inside can't be told apart"),
    ("both", "cov, corrcoef, linalg.pinv", "fp32", "low precision",
     "the product is hidden in C++, and casting the inputs would lose digits that the rest of the function needs"),
    ("both", "linalg.matrix_power", "untouched", "low precision if there is a product",
     "the product is hidden in C++; a negative power needs an inverse, which has no half-precision version"),
    ("both", "einsum, inner, tensordot", "low precision",
     "fp32 on the CPU, inner everywhere, if there is no product of matrices in it", "C++ decides by the shapes"),
    ("cpu", "pad with mode reflect or replicate", "type of the input", "fp32 for a half-precision input",
     "C++ decides by the mode; the values are the same"),
    ("cuda", "sum_to_size", "type of the input", "fp32 for a half-precision input that is summed",
     "C++ decides by the shapes"),
    ("cuda", "norm(p='nuc')", "fp32", "error for a half-precision input",
     "torch asks for the type after a check of it"),
    ("both", "promoted functions given fp16 and bf16", "fp32", "error", "fp32 holds both"),
    ("both", "inner, tensordot, multi_dot given two types", "low precision", "error", "we cast before C++ checks"),
    ("both", "torch.ops.aten.*, TorchScript", "untouched", "cast", "they bypass torch's Python functions"),
    ("both", "torch.is_autocast_enabled, torch.amp.custom_fwd", "see nothing", "see it",
     "they ask torch's own state; autocast_dtype(tensor) asks ours. A model that turns torch.autocast off only where "
     "it finds it on, as some of transformers' do for rotary angles, needs torch's"),
    ("both", "flex_attention outside of torch.compile", "type of the input", "low precision",
     "a higher-order operator, of which the mode doesn't see the inside"),
    ("both", "torch.compile", "error that says so", "works", "it can't trace a mode in Python reliably"),
    ("both", "a weight changed, or first used without gradients, inside a region", "cast again",
     "first cast used again", "a stale copy, or one that has no graph, would be used in silence"),
)  # fmt: skip


def policies(device_type: str) -> dict[str, str]:
    """Operator name → policy on this kind of device; other operators are left alone."""
    kind = "cpu" if device_type == "cpu" else "cuda"
    known = registered(kind)
    chosen = {name: policy for policy, names in _LISTS[kind].items() for name in names.split() if name in known}
    return chosen | {name: policy for policy, names in _THROUGH[kind].items() for name in names.split()}


@functools.cache
def registered(kind: str) -> frozenset[str]:
    """The operators that the installed torch registers with torch.autocast for "cpu" or "cuda"."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key({"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[kind])
    return frozenset(name.removeprefix("aten::").split(".")[0] for name in names if name.startswith("aten::"))


def autocast_policy() -> pd.DataFrame:
    """One row an operation: its policy on the CPU and on CUDA. Other operations are untouched."""
    cpu, cuda = policies("cpu"), policies("cuda")
    names = sorted({*cpu, *cuda}, key=lambda name: (name.startswith("_"), name))
    rows = [{"operation": name, "cpu": cpu.get(name, UNTOUCHED), "cuda": cuda.get(name, UNTOUCHED)} for name in names]
    return pd.DataFrame(rows)


def known_differences() -> pd.DataFrame:
    """The differences between `Autocast` and torch.autocast, with reasons."""
    return pd.DataFrame(KNOWN_DIFFERENCES, columns=["device", "what", "Autocast", "torch.autocast", "reason"])


def functions_of(name: str) -> list[Callable]:
    """The Python functions and methods of an operator."""
    namespaces = [torch, Tensor, F, torch._C._nn, torch._C._VariableFunctions]
    functions = [getattr(namespace, name, None) for namespace in namespaces]
    for prefix in ("linalg", "fft", "special"):
        if name.startswith(f"{prefix}_"):
            functions += [getattr(getattr(torch, prefix), name.removeprefix(f"{prefix}_"), None)]
            functions += [getattr(getattr(torch._C, f"_{prefix}"), name, None)]
    functions += [getattr(Tensor, operator) for operator in _OPERATORS.get(name, ())]
    return list(dict.fromkeys(function for function in functions if callable(function)))
