"""The changes that leave the training the same, each with the edit that does it in the source."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from ..lab import multiplies_half
from ..lab.cpu import KEPT
from ..script import hooks
from . import probes
from .change import (
    OF_ALL,
    OF_OPERATORS,
    OF_OPTIMIZER,
    Call,
    Change,
    Edit,
    Facts,
    Keywords,
    Lines,
    Loader,
    OnModels,
    with_options,
)
from .replacements import Attention, Counts, Embedding, NoGradients, NoRecomputing, SparseGradients

# The option that lets an optimizer step in few kernels
FAST = dict.fromkeys(("Adam", "AdamW", "SGD", "Adagrad"), "fused")
FAST |= dict.fromkeys(("RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop"), "foreach")


class MatmulPrecision(Change):
    """Matrix products in the precision “medium” (on a GPU “high”: TF32)."""

    name, group, share = "matmul-precision", "precision", 0.15

    def missing_because(self, facts: Facts) -> str:
        return "" if facts["precision"] == "highest" else f"the precision is {facts['precision']} already"

    def apply(self, facts: Facts) -> None:
        torch.set_float32_matmul_precision(_precision(facts))

    def edits(self, facts: Facts) -> list[Edit]:
        return [Lines((facts["script"], 0), (f'torch.set_float32_matmul_precision("{_precision(facts)}")',))]


def _precision(facts: Facts) -> str:
    return "high" if facts["device"] == "cuda" else "medium"


class OneOptimizerKernel(Change):
    """The optimizer's step in one kernel (fused, or foreach where there is none)."""

    name, share = "optimizer", 0.25
    parts = OF_OPTIMIZER

    def missing_because(self, facts: Facts) -> str:
        return "" if self._sites(facts) else "no optimizer whose step could be fused"

    def apply(self, facts: Facts) -> None:
        sites = {tuple(site) for site, _, _ in self._sites(facts)}
        for kind, option in FAST.items():
            with_options(hooks.built(getattr(torch.optim, kind)), {option: True}, sites)

    def edits(self, facts: Facts) -> list[Edit]:
        return [Keywords(tuple(site), kind, {option: "True"}) for site, kind, option in self._sites(facts)]

    @staticmethod
    def _sites(facts: Facts) -> list[tuple[list, str, str]]:
        return [
            (each["site"], each["kind"], FAST[each["kind"]])
            for each in facts["optimizers"].values()
            if each["kind"] in FAST and not each["fused"] and not each["foreach"]
        ]


class Workers(Loader):
    """Batches made by worker processes that live on from epoch to epoch."""

    name = "loader-workers"

    def options(self, loader: Mapping[str, Any]) -> dict[str, Any]:
        workers = {} if loader["workers"] else {"num_workers": min(4, len(os.sched_getaffinity(0)))}
        return {} if loader["persistent"] else workers | {"persistent_workers": True}


class Pinned(Loader):
    """Batches in pinned memory."""

    name = "loader-pinned"

    def missing_because(self, facts: Facts) -> str:
        return "copies to a GPU alone need it" if facts["device"] != "cuda" else super().missing_because(facts)

    def options(self, loader: Mapping[str, Any]) -> dict[str, Any]:
        return {} if loader["pinned"] else {"pin_memory": True}


class SetToNone(Change):
    """Gradients set to none instead of zeros."""

    name, share = "set-to-none", 0.05
    parts = OF_ALL

    def missing_because(self, facts: Facts) -> str:
        return "" if "zero_grad" in facts["calls"] else "gradients are set to none already"

    def apply(self, facts: Facts) -> None:
        to_none = lambda zero_grad, holder, set_to_none=True: zero_grad(holder, True)  # noqa: E731
        hooks.wrap(dict.fromkeys(hooks.ZEROED, to_none))

    def edits(self, facts: Facts) -> list[Edit]:
        return [Call(tuple(site), "zero_grad", "{}()") for site in facts["calls"]["zero_grad"]]


class Autocast(OnModels):
    """The model's forward under autocast in bf16."""

    name, group, share = "autocast-bf16", "precision", 0.12

    def missing_because(self, facts: Facts) -> str:
        if "autocast" in facts["calls"]:
            return "the script uses autocast already"
        if facts["device"] == "cpu" and not multiplies_half():
            return "this CPU has no 16-bit products"
        return super().missing_because(facts)

    def code(self, model: Mapping[str, Any]) -> tuple[str, ...]:
        name = model["name"]
        if model["dtype"] != "torch.float32":
            return ()
        return (
            f'{name}.forward = torch.autocast("{model["device"]}", torch.bfloat16)({name}.forward)',
            f"{name}.register_forward_hook(lambda module, inputs, output: torch.utils._pytree.tree_map("
            "lambda x: x.float() if torch.is_tensor(x) and x.is_floating_point() else x, output))",
        )


class NoAutocast(Change):
    """Nothing under autocast: casts and 16-bit kernels may take longer than fp32."""

    name, group, share = "no-autocast", "precision", 0.03

    def missing_because(self, facts: Facts) -> str:
        return "" if facts["calls"].get("autocast") else "the script uses no autocast"

    def apply(self, facts: Facts) -> None:
        with_options(hooks.AUTOCAST_BUILT, {"enabled": False})

    def edits(self, facts: Facts) -> list[Edit]:
        return [Keywords(tuple(site), "autocast", {"enabled": "False"}) for site in facts["calls"]["autocast"]]


class InFp32(OnModels):
    """A model of fp64 numbers, and its inputs, in fp32."""

    name, group, share = "fp32", "precision", 0.4

    def code(self, model: Mapping[str, Any]) -> tuple[str, ...]:
        name, cast = model["name"], "lambda x: x.{}() if torch.is_tensor(x) and x.dtype == torch.{} else x"
        if model["dtype"] != "torch.float64":
            return ()
        return (
            f"{name}.float().register_forward_pre_hook(lambda module, inputs, named: torch.utils._pytree.tree_map("
            f"{cast.format('float', 'float64')}, (inputs, named)), with_kwargs=True)",
            f"{name}.register_forward_hook(lambda module, inputs, output: torch.utils._pytree.tree_map("
            f"{cast.format('double', 'float32')}, output))",
        )


class CompileModel(OnModels):
    """The model compiled by torch.compile."""

    name = "compile"
    parts = OF_ALL
    patience, share = 4.0, 0.12

    def code(self, model: Mapping[str, Any]) -> tuple[str, ...]:
        return () if model["compiled"] else (f"{model['name']}.compile()",)


class ChannelsLast(OnModels):
    """The weights of convolutions with the channels last."""

    name, share = "channels-last", 0.1

    def code(self, model: Mapping[str, Any]) -> tuple[str, ...]:
        return (f"{model['name']}.to(memory_format=torch.channels_last)",) if model["convolutions"] else ()


class KeptPages(Change):
    """Memory that was freed stays with the process."""

    name = "allocator"
    parts = (*OF_OPERATORS, *OF_OPTIMIZER, "copies")
    patience, share = 2.0, 0.2  # it takes several starts
    environment = KEPT

    def missing_because(self, facts: Facts) -> str:
        if facts["device"] != "cpu":
            return "the training is on a GPU"
        chosen = any(name in os.environ for name in (*self.environment, "LD_PRELOAD"))
        return "an allocator is chosen already" if chosen else ""


class SwitchedOff(Change):
    """A mode that the script switches on stays off."""

    switch: hooks.Point
    calls: Mapping[str, str] = {}  # of the script's that are replaced, and by what

    def missing_because(self, facts: Facts) -> str:
        return "" if facts[self.name] else "it is off"

    def apply(self, facts: Facts) -> None:
        hooks.wrap({self.switch: lambda switch, *_, **options: switch(False, **options)})

    def edits(self, facts: Facts) -> list[Edit]:
        seen = facts["calls"]
        return [Call(tuple(site), name, code) for name, code in self.calls.items() for site in seen.get(name, [])]


class NoAnomalies(SwitchedOff):
    """No search for the origin of NaN in each backward."""

    name, share = "no-anomaly-mode", 0.4
    switch = hooks.ANOMALIES
    calls: Mapping[str, str] = {
        "set_detect_anomaly": "{}(False)",
        "detect_anomaly": "torch.autograd.set_detect_anomaly(False)",
    }


class NotDeterministic(SwitchedOff):
    """Algorithms that may add in another order."""

    name, share = "not-deterministic", 0.4
    switch = hooks.DETERMINISM
    calls: Mapping[str, str] = {"use_deterministic_algorithms": "{}(False)"}


class AllThreads(SwitchedOff):
    """A thread for each core that the process may use."""

    name, share, cores = "all-threads", 0.4, len(os.sched_getaffinity(0))
    environment: Mapping[str, str] = {"OMP_NUM_THREADS": str(cores)}
    calls: Mapping[str, str] = {"set_num_threads": f"{{}}({cores})"}

    def missing_because(self, facts: Facts) -> str:
        return "there is a thread for each core" if facts["threads"] >= self.cores else ""

    def apply(self, facts: Facts) -> None:
        hooks.wrap({hooks.THREADS: lambda *_: None})


class OneThread(Change):
    """One thread: small operations take longer on more."""

    name = "one-thread"
    share = 0.05

    def missing_because(self, facts: Facts) -> str:
        return "" if facts["threads"] > 1 else "there is one thread already"

    def apply(self, facts: Facts) -> None:
        torch.set_num_threads(1)

    def edits(self, facts: Facts) -> list[Edit]:
        return [Lines((facts["script"], 0), ("torch.set_num_threads(1)",))]


KINDS: tuple[type[Change], ...] = (
    MatmulPrecision, OneOptimizerKernel, Workers, Pinned, SetToNone, Autocast, NoAutocast, InFp32,
    ChannelsLast, NoAnomalies, NotDeterministic, KeptPages, AllThreads, OneThread, CompileModel,
    NoGradients, Attention, NoRecomputing, Embedding, Counts, SparseGradients,
)  # fmt: skip
ALL = {kind.name: kind() for kind in (*KINDS, *probes.PROBES)}
