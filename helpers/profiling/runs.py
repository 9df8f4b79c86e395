"""What a recorder writes down: the entries of its log, and the runs that these belong to."""

from bisect import bisect_right

from torch import Tensor

# The log's entries are tuples.
#     (module, mark, number)                a call began within another; `number` is that of autograd's next node
#     (module, mark, number, backward id)   an outermost call began; the id is −1, or that of the backward it is part of
#     (~module, mark, number)               a call ended
#     (SWITCH, mark, number, run)           in backward: the node of that number is about to run
#     (END, mark, 0, run)                   the last node of the run has run, or the sum of a gradient that it fed
#     (EDGE, mark)                          the step begins, or ends
SWITCH, END, EDGE = 2**30, 2**30 + 1, 2**30 + 2
Entry = tuple


class Call:
    """A call of a module within a run."""

    __slots__ = ("module", "parent")

    def __init__(self, module: int, parent: "Call | None") -> None:
        self.module, self.parent = module, parent


class Run:
    """An outermost call with all that it called: their nodes are numbered one after another."""

    def __init__(self, begin: int, lowest: int, walked: bool) -> None:
        self.begin, self.lowest = begin, lowest  # its first entry in the log, its first number
        self.walked = walked  # whether its graph has to be walked in backward
        self.entries: list[Entry] | None = None  # once it is over
        self.watched: set[int] = set()  # nodes with a hook
        self.carrier: Tensor | None = None  # of that hook
        self.seen: set[int] = set()  # nodes that were met in this backward
        self.left = False  # whether this backward has run the last of the planned nodes
        self.starts: list[int] = []  # nodes from starts[i] on, up to starts[i + 1], were made directly by owners[i]
        self.owners: list[Call | None] = []

    def sort_numbers(self, entries: list[Entry]) -> None:
        """Find out which call made which numbers."""
        self.starts, self.owners, stack = [], [], []
        for entry in entries:
            module = entry[0]
            if module >= SWITCH:
                continue
            if module >= 0:
                stack.append(Call(module, stack[-1] if stack else None))
            elif any(call.module == ~module for call in stack):
                while stack.pop().module != ~module:
                    pass
            self.starts.append(entry[2])
            self.owners.append(stack[-1] if stack else None)

    def owner(self, number: int) -> Call | None:
        if not self.starts:
            self.sort_numbers(self.entries)
        return self.owners[bisect_right(self.starts, number) - 1]
