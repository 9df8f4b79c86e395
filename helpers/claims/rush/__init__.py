"""Chapter 5: the ladder and what each rung brings, its memory, its peers, and training on many ranks."""

from .planned import distributed, memory, memory_plan, predicted, published_speed, scaling
from .rungs import allocator, ladder
from .variants import adam, lecture, norms, nulls, peers

__all__ = ["adam", "allocator", "distributed", "ladder", "lecture", "memory"]
__all__ += ["memory_plan", "norms", "nulls", "peers", "predicted", "published_speed", "scaling"]
