"""Trainings that are slow on purpose, with any subset of their faults fixed: chapters 0 and 3.

    from helpers.training.switched import CLOTHES, LANGUAGE
    slow, fast = CLOTHES.run(frozenset()), CLOTHES.run(CLOTHES.fixed)

`switches` describes each fix. Those without `changes` change the loss and the gradients by rounding only if
`dropout` is 0 (else the kernels draw other masks from the same distribution). The initial weights, the order of samples
and their random crops follow from the seed alone, whatever is fixed.

The last fix for the clothes, a CUDA graph, doesn't apply to the language model: the number of documents differs from
pack to pack.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..lab import device
from ..lab.arguments import check_at_least, check_choice
from ..lab.memory import PeakAbove
from ..pictures import cores
from . import clothes, language, switches
from .loop import OnStep, Profile, fit
from .switches import Faults, Switch, check_names
from .task import Precision, Task, TaskTrainer, mixed_precision


@dataclass(frozen=True)
class Switched:
    """A task with its switches and sizes."""

    switches: tuple[Switch, ...]
    sizes: Mapping[str, dict[str, Any]]
    open: Callable[..., Task]
    rate: str  # the key of the throughput in a run's row

    @property
    def fixed(self) -> frozenset[str]:
        """The names of all fixes but the optional."""
        return frozenset(switch.name for switch in self.switches if not switch.optional)

    def faults(self, fixes: Iterable[str]) -> Faults:
        """Those that are left with these fixes."""
        return Faults(**{switch.fault: switch.name not in fixes for switch in self.switches if switch.fault})

    def prepare(
        self,
        fixes: Iterable[str] | None = None,
        *,
        preset: str = "small",
        path: str | Path | None = None,
        seed: int = 0,
        precision: Precision | None = None,
        **changes: Any,
    ) -> TaskTrainer:
        """A trainer with these fixes and no others (by default all but the optional), before the first step.

        Unless a precision is given it is fp32, or bf16 if that is among the fixes; fp16 with a loss scale on a GPU
        without bf16 units. `path` is the folder of the clothing dataset, or of WikiText-103; without it the data is
        generated. `changes` replace values of the preset.
        """
        names = [switch.name for switch in self.switches]
        fixes = self.fixed if fixes is None else check_names(fixes, names, "fix", "fixes")
        precision = precision or (mixed_precision() if "bf16" in fixes else Precision())
        chosen = choose(self.sizes, preset, changes)
        chosen["workers"] = min(chosen["workers"], cores())
        faults = self.faults(fixes)
        task = self.open(chosen, path, device(), seed, precision.dtype, faults)
        return TaskTrainer(task, precision, faults=faults, compiles="compile" in fixes, captures="cuda_graph" in fixes)

    def run(
        self,
        fixes: Iterable[str] | None = None,
        *,
        epochs: int = 1,
        steps: int | None = None,
        validates: bool = True,
        on_step: OnStep | None = None,
        profile: Profile | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Train on `device()`; returns a row of times, memory and scores. `options` are those of `prepare`.

        `loop.fit` explains `on_step`, `profile` and the times. `steps` ends the run after so many.
        The throughput (`real_tokens_per_s` or `images_per_s`) counts real targets, not padding, whose share of the last
        epoch's positions is `padding_share`. `prepare_s` was spent once, before the first epoch, to tokenise or to
        decode. Validation covers its whole split.
        """
        check_at_least(1, epochs=epochs, steps=1 if steps is None else steps)
        with PeakAbove() as peak:
            trainer = self.prepare(fixes, **options)
            with trainer.settings():
                timed = fit(trainer, epochs=epochs, steps=steps, validates=validates, on_step=on_step, profile=profile)
        task, counts, mean_ms = trainer.task, trainer.counts, timed["iteration_mean_ms"]
        return {
            "source": task.source,
            **timed,
            "peak_gib": peak.gib if trainer.device.type == "cuda" else None,
            self.rate: counts.real / counts.steps / mean_ms * 1e3,
            "padding_share": 1 - counts.real / counts.positions,
            "prepare_s": task.prepare_s,
            **{f"train_{name}": value for name, value in trainer.train_scores().items()},
        }


def choose(sizes: Mapping[str, dict[str, Any]], preset: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a preset, with `changes` of values that it has."""
    check_choice(sizes, preset=preset)
    chosen = sizes[preset]
    if unknown := sorted(set(changes) - set(chosen)):
        raise ValueError(f"the preset has no {unknown[0]!r} to change; it has {', '.join(chosen)}")
    return chosen | changes


CLOTHES = Switched(switches.CLOTHES, clothes.SWITCHED_SIZES, clothes.switched_clothes_task, "images_per_s")
LANGUAGE = Switched(switches.LANGUAGE, language.SWITCHED_SIZES, language.switched_language_task, "real_tokens_per_s")
