"""What chapter 7 measures: correctness of each capture variant, savings by fusion, speed of each backend.

All variants or backends of a row's configuration are built first and then timed in turn, with one baseline.
"""

from ...compilers import measure_semantics
from ...compilers.capture import VARIANTS
from ...compilers.capture_cases import CASES
from ...lab import Worth, experiment
from ...lab.records import Row
from .fusing import fusion
from .inference import latency
from .training_steps import training


@experiment(
    small=[{"case": "printing"}],
    cpu=[{"case": name} for name in CASES],
    gpu=[],
    version=2,
    columns="variant outcome",
    timed=False,
    worth=Worth(1, "what a compiler leaves as it is", cpu=0.6),
)
def semantics(case: str) -> list[Row]:
    """Outcome of capturing a function by each variant, and calling it along another path than its example's."""
    return [measure_semantics(case, variant) for variant in VARIANTS]
