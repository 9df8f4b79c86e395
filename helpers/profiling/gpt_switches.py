"""What is slow in the GPT pipeline on purpose, and what mends it. The order is that of `cumulative`."""

from .switches import Switch

SWITCHES = (
    Switch(
        name="token_cache",
        where="data",
        slow="every line is split into words, and each word looked up, again in each epoch",
        fixed="all lines become token ids once, before training",
    ),
    Switch(
        name="workers",
        where="data",
        slow="the training process makes each batch itself while the device waits",
        fixed="worker processes do, some batches ahead, and live on between epochs",
    ),
    Switch(
        name="pinned",
        where="data",
        slow="batches are copied from pageable memory, and the host waits for each copy",
        fixed="from page-locked memory, while the host goes on",
        cuda_only=True,
    ),
    Switch(
        name="short_padding",
        where="data",
        slow="every sample is padded to the longest that there may be",
        fixed="to the longest of its batch",
    ),
    Switch(
        name="packed",
        where="data",
        slow="short samples stand beside long ones, and the difference is padding",
        fixed="samples stand one after another in one sequence, always as long; attention keeps them apart",
        changes="the data: the same samples, but others meet in a step, as many as fill it",
    ),
    Switch(
        name="bf16",
        where="training loop",
        slow="matrix products in fp32",
        fixed="in bf16, by autocast",
        changes="the numbers: products have 8 bits of mantissa",
    ),
    Switch(
        name="width_1024",
        where="model",
        slow="the width is 1023, 11 heads of 93: rows begin at odd addresses, which keeps products from fast kernels",
        fixed="the width is 1024, 16 heads of 64",
        changes="the model: one channel more, and the heads are more and narrower",
    ),
    Switch(
        name="vocabulary_64",
        where="model",
        slow="the logits are as many as there are words, whatever number that is: 24,725 of made-up text",
        fixed="a multiple of 64: the last few are of words that never occur",
        changes="the model: up to 63 words more for the loss to rule out",
    ),
    Switch(
        name="fused_qkv",
        where="model",
        slow="queries, keys and values are three products",
        fixed="what has the same input is one product",
    ),
    Switch(
        name="fused_attention",
        where="model",
        slow="attention is a product, a mask that is built again in each step, a softmax and a product",
        fixed="one kernel that knows what causal means and never writes the weights",
    ),
    Switch(
        name="no_dead_projection",
        where="model",
        slow="in each layer a projection is computed that nobody reads",
        fixed="it isn't",
    ),
    Switch(
        name="positions_once",
        where="model",
        slow="the table of sines and cosines is computed in each step",
        fixed="once, when the model is made",
    ),
    Switch(
        name="fused_loss",
        where="training loop",
        slow="cross-entropy as softmax, then log, then a look-up: three fp32 copies of all logits, three more backward",
        fixed="log-softmax keeps one",
    ),
    Switch(
        name="inference_mode",
        where="validation",
        slow="validation keeps a graph for a backward that never comes",
        fixed="torch.inference_mode keeps nothing",
    ),
    Switch(
        name="no_item",
        where="training loop",
        slow="loss.item() in each step, before backward: the host waits for the device",
        fixed="the loss is summed up on the device and read once an epoch",
    ),
    Switch(
        name="streaming_accuracy",
        where="training loop",
        slow="predictions and targets are copied to the CPU in each step and compared there",
        fixed="right answers are counted on the device and read once an epoch",
    ),
    Switch(
        name="fused_optimizer",
        where="training loop",
        slow="AdamW updates one parameter after another, in a dozen kernels each",
        fixed="fused: all parameters in a few kernels",
    ),
    Switch(
        name="set_to_none",
        where="training loop",
        slow="zero_grad(set_to_none=False) writes zeros that backward then reads and adds to",
        fixed="gradients are dropped, and backward writes them",
    ),
    Switch(
        name="any_algorithm",
        where="training loop",
        slow="torch.use_deterministic_algorithms: slower kernels, and new memory is filled before it is written",
        fixed="whatever kernel is fastest",
    ),
    Switch(
        name="compile",
        where="model",
        slow="each operation is a kernel of its own",
        fixed="torch.compile makes one of many; validation stays eager",
        optional=True,
    ),
)
