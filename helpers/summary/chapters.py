"""One line and one figure of each chapter, made from the records as the chapter itself makes them.

Where a GPU has been measured its figure is shown; else what can be told of a CPU, or derived.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from helpers.amp import plots as amp_plots
from helpers.amp import story as amp_story
from helpers.batching import plots as batching_plots
from helpers.batching import story as batching_story
from helpers.compilers import plots as compilers_plots
from helpers.compilers import story as compilers_story
from helpers.experiments import amp, batching, compilers, pipelines, profiling, rush, swiglu
from helpers.lab.notebook import recorded
from helpers.pipelines import plots as pipelines_plots
from helpers.pipelines import story as pipelines_story
from helpers.profiling import plots as profiling_plots
from helpers.profiling import story as profiling_story
from helpers.rush import plots as rush_plots
from helpers.rush import story as rush_story


@dataclass(frozen=True)
class Line:
    """What a chapter says in a sentence, and the figure that shows it, if there is one."""

    said: str
    drawn: Figure | None = None
    name: str = ""
    caption: str = ""


def _amp() -> Line:
    steps, curves = recorded(amp.scaler_step), recorded(amp.curves)
    said = amp_story.step_verdicts(steps.measured, recorded(amp.autocast_overhead).measured)[0]
    if not len(curves.measured):
        return Line(said)
    caption = f"Training loss in each precision, seed 0. {curves.origin}"
    return Line(said, amp_plots.losses(curves.measured), "amp_losses", caption)


def _batching() -> Line:
    padding, times = recorded(batching.padding), recorded(batching.batch_time)
    emptiest = padding.measured
    if len(emptiest):
        emptiest = emptiest[emptiest["batch_size"] == batching_story.emptiest(emptiest)["batch_size"]]
    host = batching_story.host_verdicts(emptiest, padding.measured[:0], padding.measured[:0])
    if len(times.measured):
        said = batching_story.gpu_verdicts(
            times.measured, recorded(batching.throughput).measured, recorded(batching.collator).measured
        )[0]
    else:
        said = host[0]
    if not len(padding.measured):
        return Line(said)
    caption = f"Padding against choice; the points to the upper right are k = 640 and BIG BRAIN. {padding.origin}"
    return Line(said, batching_plots.padding(padding.measured), "batching_padding", caption)


def _profiling() -> Line:
    whole, vit, cost = recorded(profiling.whole_runs), recorded(profiling.vit_fixes), recorded(profiling.metrics_cost)
    if len(vit.measured):
        said = profiling_story.verdicts(whole.measured, vit.measured, recorded(profiling.gpt_fixes).measured)[0]
        told = profiling_story.fixes(vit.with_missing, "vit")
        caption = f"What each fix takes off, in order. {vit.origin}"
        return Line(said, profiling_plots.waterfall(told, "ViT"), "profiling_vit_fixes", caption)
    said = "A metric that looks at all samples again in each step. " + ". ".join(profiling_story.growth(cost.measured))
    if not len(cost.measured):
        return Line(said)
    caption = f"Time of a step over an epoch, with either metric. {cost.origin}"
    return Line(said, profiling_plots.metrics(cost.measured), "profiling_metrics", caption)


def _swiglu() -> Line:
    peers = recorded(swiglu.peers).measured
    if not len(peers):
        return Line("Not measured yet.")
    worst = peers[peers["variant"] == "level 2"][["ratio_to_compiled", "saved_ratio"]].max()
    time, saved = worst
    return Line(
        f"Level 2 takes {time:.2f}× the time of torch.compile and saves {saved:.2f} of the plain layer's bytes."
    )


def _rush() -> Line:
    ladder, plan = recorded(rush.ladder), recorded(rush.memory_plan)
    if len(ladder.measured):
        told = rush_story.ladder(ladder.with_missing)
        said = rush_story.ladder_verdicts(ladder.measured, recorded(rush.peers).measured)[0]
        caption = f"The ladder: tokens a second, and memory beside it. {ladder.origin}"
        return Line(said, rush_plots.ladder(told), "rush_ladder", caption)
    said = rush_story.simulation_verdicts(plan.measured)[0]
    if not len(plan.measured):
        return Line(said)
    caption = f"SIMULATED peak memory of a rank against how many there are. {plan.origin}"
    return Line(said, rush_plots.memory(plan.measured), "rush_memory", caption)


def _pipelines() -> Line:
    formats = recorded(pipelines.formats)
    said = pipelines_story.format_headline(formats.measured)
    if not len(formats.measured):
        return Line(said)
    caption = f"Samples a second against workers; bars from the 20th to the 80th percentile. {formats.origin}"
    first = formats.measured[formats.measured["gpu"] == formats.measured["gpu"].iloc[0]]
    return Line(said, pipelines_plots.formats(first), "pipelines_formats", caption)


def _compilers() -> Line:
    latency = recorded(compilers.latency)
    said = compilers_story.latency_verdicts(latency.measured)[-1]
    if not len(latency.measured):
        return Line(said)
    caption = "Speed-up over eager; whiskers from the 20th to the 80th percentile of the rounds. " + latency.origin
    first = latency.measured[latency.measured["gpu"] == latency.measured["gpu"].iloc[0]]
    return Line(said, compilers_plots.latency(first), "compilers_latency", caption)


def tell(name: str) -> Line:
    """A chapter's line, its sentence ended and its question before it."""
    line = LINES[name]()
    said = line.said if line.said.endswith(".") else f"{line.said}."
    return replace(line, said=f"*{QUESTIONS[name]}* {said}")


LINES: dict[str, Callable[[], Line]] = {
    "01_amp": _amp,
    "02_batching": _batching,
    "03_profiling": _profiling,
    "04_swiglu_checkpointing": _swiglu,
    "05_optimization_rush": _rush,
    "06_data_pipelines": _pipelines,
    "07_compilers": _compilers,
}
QUESTIONS = {
    "01_amp": "What does training lose in fp16, what brings it back, and what does that cost?",
    "02_batching": "What does padding cost, and what do balanced batches and packing bring instead?",
    "03_profiling": "Where does the time of a slow training loop go, and what does each fix bring?",
    "04_swiglu_checkpointing": (
        "What must the backward of a feed-forward layer remember, and what does each saved byte cost?"
    ),
    "05_optimization_rush": (
        "What does each step bring, from a plain loop to many GPUs, and what stands between the best and the hardware?"
    ),
    "06_data_pipelines": "Where does the time between two steps go, and which samples are needed at all?",
    "07_compilers": (
        "What does each compiler get wrong, what does it fuse, and how much faster does it answer and train?"
    ),
}
