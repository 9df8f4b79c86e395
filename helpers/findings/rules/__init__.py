"""The rules of `diagnose`: a function for each finding, from a `Scene` or a `Loop` to its `Finding`s.

    waiting       the host waits for the device, both for the loader; copies and communication while nothing computes
    host_work     work of the host that the device waits for: optimizers, norms, fallbacks in many ops, memory, …
    products      matrix products: sizes, types, settings, attention that isn't fused or has a mask, unfused chains
    convolutions  the slow path, the algorithms that cuDNN may choose, conversions of layout
    on_cpu        products in fp32 and chains too large for the cache on a CPU, and what other fixes bring there
    needless      graphs that no backward uses, unused results, constants built in each step, one-hot, …;
                  what a loop computes one by one, logits as a whole in fp32
    unrecorded    from the loop as it runs: evaluation, checkpoints, loops of small calls, padding, memory that grows, …

A file's rules are its `RULES`; those of `DETAILED_RULES` need shapes or stacks. A rule reports only what the trace
proves. A finding's gain is the time in which its part of the account would shrink: host work counts while the device
idles, a kernel while nothing else runs.
"""
