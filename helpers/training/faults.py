"""What a training does slowly on purpose. `switches` describes each fault, and the fix that takes it away."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The faults that a training has; none by default. Where None, torch's setting is left as it is."""

    # loading
    no_workers: bool = False
    pageable_batches: bool = False
    text_split_again: bool = False
    padded_to_maximum: bool = False
    unpacked: bool = False
    photos_decoded_again: bool = False
    photos_cut_twice: bool = False
    photos_as_floats: bool = False
    photos_copied: bool = False
    constants_recomputed: bool = False
    # the model
    odd_width: bool = False
    odd_vocabulary: bool = False
    separate_qkv: bool = False
    materialised_attention: bool = False
    dead_projection: bool = False
    positions_recomputed: bool = False
    patches_gathered: bool = False
    # loss, metrics, validation
    loss_spelled_out: bool = False
    loss_read: bool = False
    accuracy_on_host: bool = False
    metrics_collected: bool = False
    validation_keeps_graph: bool = False
    # the step
    unfused_optimizer: bool = False
    gradients_zeroed: bool = False
    memory_returned: bool = False
    deterministic: bool | None = None
    cudnn_deterministic: bool | None = None


NO_FAULTS = Faults()
