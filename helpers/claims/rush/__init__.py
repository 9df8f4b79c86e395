"""Chapter 5: the ladder and what each rung brings, its memory, its peers, and training on many ranks."""

from .planned import distributed, memory, memory_alone, memory_plan, predicted, published_speed, scaling
from .rungs import allocator, batch, ladder
from .variants import adam, lecture, loading, norms, nulls, peers

__all__ = ["adam", "allocator", "batch", "distributed", "ladder", "lecture", "loading", "memory"]
__all__ += ["memory_alone", "memory_plan", "norms", "nulls", "peers", "predicted", "published_speed", "scaling"]
