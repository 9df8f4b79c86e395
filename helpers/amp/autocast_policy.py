"""Which type each operation runs in: torch.autocast's lists for the CPU and for CUDA, as plain data.

The names are those of the operators behind torch's functions (`linalg_qr` is `torch.linalg.qr`). Operations on no list
run in the type of their inputs. CUDA's lists are used for every other accelerator, too.
"""

import functools
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LOW = "low precision"  # inputs are cast to the region's type; a weight is cast once a region
FP32 = "fp32"  # inputs are cast to fp32
FP32_RESULT = "fp32 result"  # summed and returned in fp32, unless a dtype is asked for
PROMOTE = "promote"  # inputs are cast to fp32 if one of them is fp32
REFUSE = "refused"  # an error: half precision is not safe for it
TORCHS = "torch's"  # torch's own autocast casts: cuDNN's recurrent layers, whose weights lie in one buffer

_LOW = """
    addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    einsum inner linalg_multi_dot linalg_vecdot linear matmul mm prelu scaled_dot_product_attention
"""
_RECURRENT = "gru gru_cell lstm lstm_cell rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell "
_LOSSES = """
    binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy cross_entropy_loss hinge_embedding_loss
    huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss
    nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
"""
LISTS = {
    "cpu": {
        LOW: _LOW + _RECURRENT + "tensordot",
        FP32: _LOSSES
        + """
            adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d binary_cross_entropy cdist cholesky ctc_loss
            fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn
            fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d grid_sampler inverse
            linalg_cholesky linalg_eig linalg_eigh linalg_eigvalsh linalg_householder_product linalg_inv linalg_lstsq
            linalg_qr linalg_solve linalg_svd linalg_svdvals max_pool3d max_unpool2d max_unpool3d nanquantile pinverse
            polar prod qr quantile stft svd trace triangular_solve view_as_complex
        """,
        PROMOTE: "cat index_copy stack",
    },
    "cuda": {
        LOW: _LOW + "addmv addr chain_matmul mv",
        FP32: _LOSSES
        + """
            _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
            _upsample_nearest_exact3d acos asin cdist cosh cosine_similarity dist erfinv exp expm1 frobenius_norm
            group_norm layer_norm log log10 log1p log2 logsumexp native_layer_norm norm nuclear_norm pairwise_distance
            pdist pow reciprocal renorm rms_norm rsqrt sinh softplus square tan trace upsample_bicubic2d
            upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
            upsample_trilinear3d
        """,
        FP32_RESULT: """
            cumprod cumsum linalg_matrix_norm linalg_norm linalg_vector_norm log_softmax prod softmax
            special_log_softmax special_softmax sum
        """,
        PROMOTE: "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot",
        REFUSE: "binary_cross_entropy",
        TORCHS: _RECURRENT,
    },
}
_OPERATORS = {
    "matmul": ("__matmul__", "__rmatmul__"),
    "pow": ("__pow__", "__rpow__"),
    "reciprocal": ("__rdiv__", "__rtruediv__"),
}
_NAMESPACES = (torch, Tensor, F, torch._C._nn, torch._C._VariableFunctions)


@functools.cache
def policies() -> dict[Callable, dict[str, str]]:
    """Function → policy by kind of device, "cpu" or "cuda". Takes some milliseconds, once a process."""
    by_function: dict[Callable, dict[str, str]] = {}
    for kind, lists in LISTS.items():
        for policy, names in lists.items():
            for function in _functions(names):
                by_function.setdefault(function, {})[kind] = policy
    return by_function


def _functions(names: str) -> set[Callable]:
    """The Python functions, methods and operators of torch's operators."""
    functions = []
    for name in names.split():
        functions += [getattr(namespace, name, None) for namespace in _NAMESPACES]
        functions += [getattr(Tensor, operator) for operator in _OPERATORS.get(name, ())]
        room, _, rest = name.partition("_")
        if room in ("linalg", "fft", "special"):
            functions += [getattr(getattr(torch, room), rest), getattr(getattr(torch._C, f"_{room}"), name)]
    return {function for function in functions if callable(function)}


@functools.cache
def bodies() -> dict[Callable, Callable]:
    """Unlisted function of torch that is written in Python and calls listed ones → its body.

    `F.multi_head_attention_forward` begins with `if has_torch_function(...)`, and in a mode calls the mode instead of
    running. The copy has the same code and globals, but there `has_torch_function` is always false, so it runs.
    """
    listed = {function.__name__ for function in policies()}
    copies = {}
    for namespace in (torch, torch.functional, F, Tensor):
        for function in vars(namespace).values():
            if not isinstance(function, types.FunctionType) or function in policies():
                continue
            mentions = set(function.__code__.co_names)
            if mentions & listed and (asks := mentions & _QUESTIONS):
                names = function.__globals__ | dict.fromkeys(asks, lambda *_: False)
                body = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
                body.__kwdefaults__ = function.__kwdefaults__
                copies[function] = body
    return copies


_QUESTIONS = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}
