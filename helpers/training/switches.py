"""The inefficiencies of a training that is slow on purpose, and their fixes, as named switches.

A training runs with a frozenset of the names of its fixes: the empty set is all slow. The tables are in the order in
which fixes are accumulated.
"""

from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass


@dataclass(frozen=True)
class Switch:
    """One inefficiency and its fix, and what else the fix changes."""

    name: str
    fault: str = (
        ""  # what `Faults` call it while it isn't fixed; "" if the precision or an option of the trainer fixes it
    )
    slow: str = ""  # what the loop does without the fix
    changes: str | None = None  # what the fix changes beside the time; None: the same numbers up to rounding
    optional: bool = False  # an optimization beyond the loop's inefficiencies; left out of `fixed`
    on_cpu: bool = True  # a CPU's steps show it, too


def check_names(names: Iterable[str], valid: Iterable[str], one: str, many: str) -> frozenset[str]:
    """The names as a frozenset, if all of them are valid; `one` and `many` say what they name."""
    if isinstance(names, str):
        raise ValueError(f"{many} is {names!r}; it must be a set of names, such as {{{names!r}}}")
    valid, chosen = list(valid), frozenset(names)
    if unknown := sorted(chosen.difference(valid)):
        raise ValueError(f"unknown {one} {unknown[0]!r}; valid: {', '.join(valid)}")
    return chosen


# slow: batches are copied from pageable memory, and the host waits for each copy
# fixed: from page-locked memory, while the host goes on
PINNED = Switch("pinned", "pageable_batches", slow="batches are copied from pageable memory", on_cpu=False)
# slow: matrix products in fp32
# fixed: in bf16, by autocast: products have 8 bits of mantissa
BF16 = Switch("bf16", slow="matrix products in fp32", changes="the numbers")
# slow: validation keeps a graph for a backward that never comes
# fixed: torch.inference_mode keeps nothing
INFERENCE_MODE = Switch(
    "inference_mode", "validation_keeps_graph", slow="validation keeps a graph for a backward pass", on_cpu=False
)
# slow: loss.item() in each step, before backward: the host waits for the device
# fixed: the loss is summed up on the device and read once an epoch
NO_ITEM = Switch("no_item", "loss_read", slow="the loss is read before each backward pass", on_cpu=False)
# slow: AdamW updates one parameter after another, in a dozen kernels each
# fixed: fused: all parameters in a few kernels
FUSED_OPTIMIZER = Switch("fused_optimizer", "unfused_optimizer", slow="AdamW updates one parameter after another")
# slow: zero_grad(set_to_none=False) writes zeros that backward then reads and adds to
# fixed: gradients are dropped, and backward writes them
SET_TO_NONE = Switch("set_to_none", "gradients_zeroed", slow="gradients are filled with zeros, then added to")
# slow: each operation is a kernel of its own
# fixed: torch.compile makes one of many; validation stays eager
COMPILE = Switch("compile", slow="each operation is a kernel of its own", optional=True, on_cpu=False)

LANGUAGE = (
    # slow: every line is split into words, and each word looked up, again in each epoch
    # fixed: all lines become token ids once, before training
    Switch("token_cache", "text_split_again", slow="each line is split into words in each epoch"),
    # slow: the training process makes each batch itself while the device waits
    # fixed: worker processes do, some batches ahead, and live on between epochs
    Switch("workers", "no_workers", slow="the training process makes each batch itself"),
    PINNED,
    # slow: every sample is padded to the longest that there may be
    # fixed: to the longest of its batch
    Switch("short_padding", "padded_to_maximum", slow="samples are padded to the maximum"),
    # slow: short samples stand beside long ones, and the difference is padding
    # fixed: samples stand one after another in one sequence, always as long; attention keeps them apart
    # the same samples, but others meet in a step, as many as fill it
    Switch("packed", "unpacked", slow="one sample a row, the rest of it padding", changes="the data"),
    BF16,
    # slow: the width is 1023, 11 heads of 93: rows begin at odd addresses, which keeps products from fast kernels
    # fixed: the width is 1024, 16 heads of 64: one channel more, and the heads are more and narrower
    Switch("width_1024", "odd_width", slow="width 1023: rows begin at odd addresses", changes="the model"),
    # slow: the logits are as many as there are words, whatever number that is: 24,725 of made-up text
    # fixed: a multiple of 64: the last few, up to 63, are of words that never occur, for the loss to rule out
    Switch("vocabulary_64", "odd_vocabulary", slow="as many logits as there are words", changes="the model"),
    # slow: queries, keys and values are three products
    # fixed: what has the same input is one product
    Switch("fused_qkv", "separate_qkv", slow="queries, keys and values are three products"),
    # slow: attention is a product, a mask that is built again in each step, a softmax and a product
    # fixed: one kernel that knows what causal means and never writes the weights
    Switch("fused_attention", "materialised_attention", slow="attention writes its weights to memory"),
    # slow: in each layer a projection is computed that nobody reads
    # fixed: it isn't
    Switch("no_dead_projection", "dead_projection", slow="a projection in each layer that nothing reads"),
    # slow: the table of sines and cosines is computed in each step
    # fixed: once, when the model is made
    Switch("positions_once", "positions_recomputed", slow="sines and cosines are computed in each step"),
    # slow: cross-entropy as softmax, then log, then a look-up: three fp32 copies of all logits, three more backward
    # fixed: log-softmax keeps one
    Switch("fused_loss", "loss_spelled_out", slow="cross-entropy as softmax, logarithm, look-up"),
    INFERENCE_MODE,
    NO_ITEM,
    # slow: predictions and targets are copied to the CPU in each step and compared there
    # fixed: right answers are counted on the device and read once an epoch
    Switch("streaming_accuracy", "accuracy_on_host", slow="predictions are compared on the CPU in each step"),
    FUSED_OPTIMIZER,
    SET_TO_NONE,
    # slow: torch.use_deterministic_algorithms: slower kernels, and new memory is filled before it is written
    # fixed: whatever kernel is fastest
    Switch("any_algorithm", "deterministic", slow="deterministic algorithms"),
    COMPILE,
)

CLOTHES = (
    # slow: the training process decodes and cuts each photo itself while the device waits
    # fixed: worker processes do, some batches ahead, and live on between epochs
    Switch("workers", "no_workers", slow="the training process makes each batch itself"),
    PINNED,
    # slow: photos become fp32 and are normalised on the CPU: four times the bytes to pass on and to copy
    # fixed: they travel as uint8 and are normalised on the device
    Switch("uint8_transfer", "photos_as_floats", slow="photos are normalised on the CPU, in fp32"),
    # slow: the whole photo is resized and its middle cut out before a random part of that is cut and resized again
    # fixed: the random part is cut from the photo itself, not only from its middle: one resampling
    Switch("single_cut", "photos_cut_twice", slow="photos are resized and cut twice", changes="the data"),
    # slow: every JPEG is decoded at its full size again in each epoch
    # fixed: all are decoded once, at a reduced size where JPEG allows, and kept in memory as squares
    # small parts are blurrier, for what is kept is smaller than the photo
    Switch(
        "decode_once", "photos_decoded_again", slow="each JPEG is decoded in full in each epoch", changes="the data"
    ),
    # slow: the width is 255: rows begin at odd addresses, which keeps matrix products from their fast kernels
    # fixed: the width is 256
    Switch("width_256", "odd_width", slow="width 255: rows begin at odd addresses", changes="the model"),
    # slow: queries, keys and values are three small products
    # fixed: they are one
    Switch("fused_qkv", "separate_qkv", slow="queries, keys and values are three products"),
    # slow: attention is a product, nn.Softmax and a product, with its weights in memory between them
    # fixed: F.scaled_dot_product_attention never writes the weights
    Switch("fused_attention", "materialised_attention", slow="attention writes its weights to memory"),
    # slow: patches are copied together and go through a linear layer
    # fixed: a convolution whose stride is its size reads the image as it lies
    Switch("conv_patches", "patches_gathered", slow="patches are gathered for a linear layer"),
    INFERENCE_MODE,
    NO_ITEM,
    # slow: in each step all outputs of the epoch so far, copied to the CPU, make its accuracy and F1 anew
    # fixed: a confusion matrix on the device is added to and read once an epoch
    Switch("streaming_metrics", "metrics_collected", slow="accuracy and F1 anew from all outputs so far"),
    FUSED_OPTIMIZER,
    SET_TO_NONE,
    # slow: cudnn.deterministic without benchmark: convolutions with whatever kernel is allowed
    # fixed: cuDNN tries its kernels once and takes the fastest
    Switch("cudnn_benchmark", "cudnn_deterministic", slow="cuDNN's kernels are deterministic, not tuned", on_cpu=False),
    # slow: in each step all labels are counted for class weights, which are copied over, as are mean and deviation
    # fixed: both are made before training
    Switch("constants_once", "constants_recomputed", slow="class weights and means are made in each step"),
    # slow: torch.cuda.empty_cache() in each step: memory is returned to the driver and asked for again
    # fixed: the allocator keeps what it has
    Switch("keep_memory", "memory_returned", slow="memory is returned to the driver in each step", on_cpu=False),
    BF16,
    # slow: each batch is cut on the CPU and copied to the device
    # fixed: all photos lie on the device, decoded once, and are cut there: no work for workers, no copies
    # the data changes as by decode_once, and parts are interpolated without rounding to uint8
    Switch("photos_on_device", "photos_copied", slow="each batch is cut on the CPU and copied", changes="the data"),
    COMPILE,
    # slow: Python launches each kernel of a step
    # fixed: the step is recorded once and replayed with one launch
    Switch("cuda_graph", slow="Python launches each kernel of a step", optional=True, on_cpu=False),
)

_FAULTS = dict.fromkeys(switch.fault for switch in (*LANGUAGE, *CLOTHES) if switch.fault)
# The faults that a training has, True, or doesn't have. By default None: torch's settings are left as they are, too.
Faults = make_dataclass("Faults", [(name, bool | None, None) for name in _FAULTS], frozen=True, kw_only=True)
NO_FAULTS = Faults()
