"""What a change is, and the kinds that several share: options of a constructor, and what is done to a model.

A change is applied in the script's process before the script begins: it replaces functions of torch, or waits for the
optimizer to be built and then changes the modules whose parameters it was given. `facts` are what an unchanged run
showed (`script.run_facts`); from them a change knows whether it applies, and where.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..script import hooks, run_facts
from .edits import Edit, Keywords, Lines, Shell

Facts = Mapping[str, Any]
OF_OPERATORS = ("operators", "compute")  # parts of a profile's account, on a CPU or a GPU
OF_OPTIMIZER = ("optimizer", "idle")
OF_ALL = (*OF_OPERATORS, *OF_OPTIMIZER, "loader", "copies", "Python")


class Change:
    """`group`: changes of which one excludes another. `patience`: how much longer than others it may take to start.

    `share`: of the `parts` of a step by its profile's account, what it could take away, for the order alone. It is
    small where almost any script could have the change, until a finding asks for it.
    """

    kind = "change"
    name = group = ""
    patience, share = 1.0, 0.1
    parts: tuple[str, ...] = OF_OPERATORS
    environment: Mapping[str, str] = {}

    def missing_because(self, facts: Facts) -> str:
        """Why it doesn't apply; nothing where it does."""
        return ""

    def apply(self, facts: Facts) -> None:
        """Change this process."""

    def edits(self, facts: Facts) -> list[Edit]:
        """The same as edits of the source."""
        return [Shell(self.environment)] if self.environment else []


class Loader(Change):
    """Options of the DataLoaders that the training reads."""

    parts, share = ("loader", "idle"), 0.5

    def options(self, loader: Mapping[str, Any]) -> dict[str, Any]:
        """The options that this one lacks."""
        raise NotImplementedError

    def missing_because(self, facts: Facts) -> str:
        return "" if self._sites(facts) else "no DataLoader of the training lacks it"

    def apply(self, facts: Facts) -> None:
        for key, options in self._sites(facts).items():
            with_options(hooks.LOADER_BUILT, options, {tuple(facts["loaders"][key]["site"])})

    def edits(self, facts: Facts) -> list[Edit]:
        edits: list[Edit] = []
        for key, options in self._sites(facts).items():
            values = {name: repr(value) for name, value in options.items()}
            if facts["loaders"][key]["builder"] == "transformers":
                values = {f"dataloader_{name}": value for name, value in values.items()}
                edits.append(Keywords((facts["script"], 0), "TrainingArguments", values))
            else:
                edits.append(Keywords(tuple(facts["loaders"][key]["site"]), "DataLoader", values))
        return edits

    def _sites(self, facts: Facts) -> dict[str, dict[str, Any]]:
        return {key: o for key, each in facts["loaders"].items() if each["trains"] and (o := self.options(each))}


class OnModels(Change):
    """Code that is run for each outermost module where the optimizer gets its parameters."""

    def code(self, model: Mapping[str, Any]) -> tuple[str, ...]:
        """Lines for the module of this description; none where it doesn't apply."""
        raise NotImplementedError

    def missing_because(self, facts: Facts) -> str:
        if not facts["models"]:
            return "no module has a name where the optimizer is built"
        return "" if any(map(self.code, facts["models"].values())) else "no module that it applies to"

    def apply(self, facts: Facts) -> None:
        changed: set[int] = set()

        def built(init: Callable[..., None], optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> None:
            init(optimizer, *arguments, **options)
            frame = run_facts.user_frame(sys._getframe(1))
            site = run_facts.site_of(frame)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for name, module in run_facts.models_at(frame, parameters):
                if id(module) not in changed:
                    changed.add(id(module))
                    frame.f_globals.setdefault("torch", torch)
                    code = "\n".join(self.code(run_facts.describe(name, module, site)))
                    exec(code, frame.f_globals, dict(frame.f_locals))

        hooks.wrap({hooks.OPTIMIZER_BUILT: built})

    def edits(self, facts: Facts) -> list[Edit]:
        models = facts["models"].values()
        return [Lines(tuple(each["site"]), code) for each in models if (code := self.code(each))]


def with_options(constructor: hooks.Point, options: Mapping[str, Any], sites: set[tuple] | None = None) -> None:
    """Let a constructor that is called at one of these lines, or anywhere, have these options."""
    signature = inspect.signature(getattr(*constructor))

    def built(init: Callable[..., None], holder: Any, *arguments: Any, **given: Any) -> None:
        if sites is None or run_facts.site_of_caller() in sites:
            bound = signature.bind(holder, *arguments, **given)
            bound.arguments.update(options)
            arguments, given = bound.args[1:], bound.kwargs
        init(holder, *arguments, **given)

    hooks.wrap({constructor: built})
