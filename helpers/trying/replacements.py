"""Changes that are replacements in the source, such as an evaluation without gradients.

They are looked for in the script and in the files beside it that it imports, and tried as edited files.
"""

import ast
import difflib
import re
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from ..script import hooks, running
from .change import OF_ALL, Change, Edit, Facts, Rewritten, span

TORCH = re.compile(r"^import torch$", re.MULTILINE)
IMPORTED = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)
TRAINS = re.compile(r"\.(backward|step|zero_grad)\(|no_grad|inference_mode|set_grad_enabled")
EVALUATES = re.compile(r"_?(eval|valid|test)")
OF_CHECKPOINT = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
FLAT_LIST = re.compile(r"(\.flatten\(\)|\.ravel\(\)|(view|reshape)\(-1\))\.tolist\(\)$")
TAKE_SPARSE = ("SGD", "Adagrad", "SparseAdam")


class Replacement(Change):
    """A change that is its edit."""

    def replaced(self, text: str) -> str:
        """A source, which imports torch by this name, under the change."""
        raise NotImplementedError

    def edits(self, facts: Facts) -> list[Edit]:
        script = Path(facts["script"])
        files = [script, *(script.with_name(f"{name}.py") for name in IMPORTED.findall(script.read_text()))]
        texts = {str(file): file.read_text() for file in files if file.is_file()}
        of_torch = {file: text for file, text in texts.items() if TORCH.search(text)}
        return [Rewritten((file, 0), self.replaced) for file, text in of_torch.items() if self.replaced(text) != text]

    def missing_because(self, facts: Facts) -> str:
        return "" if self.edits(facts) else "the source has nothing of the kind"

    def apply(self, facts: Facts) -> None:
        edited = {edit.site[0] for edit in self.edits(facts)}

        def code(read: Callable[..., Any], *place: Any) -> CodeType:
            path = str(place[0]) if len(place) == 1 else place[0].get_filename(place[1])
            return compiled(path, self.replaced) if path in edited else read(*place)

        hooks.wrap({hooks.SOURCE: code, hooks.Point(running, "compiled"): code})


def compiled(path: str, replaced: Callable[[str], str]) -> CodeType:
    """A file under a replacement, whose lines keep their numbers, by which other changes know their places."""
    before = Path(path).read_text()
    after, numbers = replaced(before), {}
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    for kind, old, _, new, end in matcher.get_opcodes():
        numbers |= {line + 1: old + 1 + (line - new) * (kind == "equal") for line in range(new, end)}
    tree = ast.parse(after)
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            node.lineno, node.end_lineno = numbers[node.lineno], numbers[node.end_lineno]
            node.col_offset = node.end_col_offset = 0
    return compile(tree, path, "exec", dont_inherit=True)


class NoGradients(Replacement):
    """Functions that evaluate keep no graph."""

    name, share = "no-grad", 0.05

    def replaced(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        for each in reversed(functions(text)):
            code = ast.unparse(each)
            if (EVALUATES.match(each.name) or ".eval()" in code) and not TRAINS.search(code):
                lines.insert(each.lineno - 1, f"{' ' * each.col_offset}@torch.no_grad()\n")
        return "".join(lines)


class NoRecomputing(Replacement):
    """Activations saved where blocks were checkpointed: faster by a forward, if there is memory."""

    name, share = "no-recomputing", 0.35

    def replaced(self, text: str) -> str:
        def plain(node: ast.AST) -> str:
            match node:
                case ast.Call(function, [block, *arguments], options) if _is_called(function, "checkpoint"):
                    options = [each for each in options if each.arg not in OF_CHECKPOINT]
                    return ast.unparse(ast.Call(block, arguments, options))
            return ""

        return with_nodes(text, plain) if "torch.utils.checkpoint" in text else text


class Embedding(Replacement):
    """Rows of a table looked up, not multiplied by vectors of zeros and a one."""

    name, share = "embedding", 0.6

    def replaced(self, text: str) -> str:
        def looked_up(node: ast.AST) -> str:
            match factors(node):
                case (ast.Call(ast.Attribute(ast.Call(function, [ids, *_]), "float")), table):
                    if _is_called(function, "one_hot"):
                        holder = ast.unparse(function).removesuffix("one_hot")
                        return f"{holder}embedding({ast.unparse(ids)}, {ast.unparse(table)})"
            return ""

        return with_nodes(text, looked_up)


class Counts(Replacement):
    """Pairs of classes counted in a matrix all at once, not one by one."""

    name, share, parts = "counts", 0.6, OF_ALL

    def replaced(self, text: str) -> str:
        def at_once(node: ast.AST) -> str:
            match node:
                case ast.For(
                    ast.Tuple([ast.Name(first), ast.Name(second)]),
                    ast.Call(ast.Name("zip"), [*values], []),
                    [ast.AugAssign(ast.Subscript(matrix, ast.Tuple([*indices])), ast.Add(), ast.Constant(1))],
                    [],
                ) if len(values) == 2:
                    numbers = dict(zip((first, second), values, strict=True))
                    flat = [_flat(each, numbers) for each in indices]
                    if all(flat):
                        name = ast.unparse(matrix)
                        one = f"torch.ones((), dtype={name}.dtype)"
                        return f"{name}.index_put_(({', '.join(flat)}), {one}, accumulate=True)"
            return ""

        return with_nodes(text, at_once)


def _flat(index: ast.expr, numbers: dict[str, ast.expr]) -> str:
    """All values of an index of the loop, "" if they may be more than a number each."""
    match index:
        case ast.Call(ast.Attribute(ast.Name(name), "item"), []) | ast.Call(ast.Name("int"), [ast.Name(name)]):
            return f"torch.as_tensor({ast.unparse(numbers[name])}).flatten()" if name in numbers else ""
        case ast.Name(name) if name in numbers:
            values, is_flat = FLAT_LIST.subn(r"\1", ast.unparse(numbers[name]))
            return values if is_flat else ""
    return ""


class SparseGradients(Replacement):
    """Gradients of embeddings hold the rows that were looked up, not all."""

    name, share = "sparse-gradients", 0.05

    def missing_because(self, facts: Facts) -> str:
        others = {each["kind"] for each in facts["optimizers"].values()} - {*TAKE_SPARSE}
        return f"{others.pop()} takes no sparse gradients" if others else super().missing_because(facts)

    def replaced(self, text: str) -> str:
        def sparse(node: ast.AST) -> str:
            match node:
                case ast.Call(function, arguments, options) if _is_called(function, "Embedding"):
                    if "sparse" not in (each.arg for each in options):
                        options = [*options, ast.keyword("sparse", ast.Constant(True))]
                        return ast.unparse(ast.Call(function, arguments, options))
            return ""

        return with_nodes(text, sparse)


def _is_called(function: ast.expr, name: str) -> bool:
    return ast.unparse(function).split(".")[-1] == name


def factors(product: Any) -> tuple[Any, Any]:
    """Those of a product of matrices, or None."""
    match product:
        case ast.BinOp(first, ast.MatMult(), second):
            return first, second
        case ast.Call(ast.Attribute(ast.Name("torch"), "matmul"), [first, second]):
            return first, second
    return None, None


def with_nodes(text: str, code: Callable[[ast.AST], str]) -> str:
    """A source in which nodes are replaced by what `code` makes of each, "" where one stays."""
    for node in ast.walk(ast.parse(text)):
        if new := code(node):
            start, end = span(text, node)
            return with_nodes(text[:start] + new + text[end:], code)
    return text


def functions(text: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]


# An attention that a source spells out in products, mask and softmax

F = re.compile(r"functional as F$", re.MULTILINE)
FUNCTIONAL = ("F", "torch", "nn.functional", "torch.nn.functional")
LAST = (["-1"], ["3"])
LAST_TWO = ({"-2", "-1"}, {"2", "3"})  # dimensions whose transposition makes scores a product
INFINITE = re.compile(r"inf|-\d{4}|-1e")  # the score of what is masked


class Attention(Replacement):
    """Attention in one function, which stores no scores."""

    name, share = "attention", 0.6

    def replaced(self, text: str) -> str:
        for function in functions(text):
            for block in [each.body for each in ast.walk(function) if isinstance(getattr(each, "body", None), list)]:
                for at, statement in enumerate(block):
                    for product in ast.walk(statement):
                        used = [at]
                        if (call := _attention(product, block, used)) and _only_there(function, block, product, used):
                            return self.replaced(_with_call(text, call, product, [block[index] for index in used]))
        return text


def _attention(product: ast.AST, block: list[ast.stmt], used: list[int]) -> str:
    """The call that a product of weights and values stands for, "" if it is another product.

    Names mean what the statements before in the block gave them; the places of these go into `used`.
    """

    def meant(node: Any) -> Any:
        for index in reversed(range(used[-1])):
            match node, block[index]:
                case ast.Name(name), ast.Assign([ast.Name(target)], value) if name == target:
                    used.append(index)
                    node = value
        return node

    weights, values = factors(product)
    node, dropout, mask, scale = meant(weights), "", "", ""
    match node:
        case ast.Call(layer, [inner], []) if "drop" in (name := ast.unparse(layer)):
            node, dropout = meant(inner), f", dropout_p={name}.p if {name}.training else 0.0"
    match node:
        case ast.Call(ast.Attribute(holder, "softmax"), given, named):
            given = [*([] if ast.unparse(holder) in FUNCTIONAL else [holder]), *given, *(each.value for each in named)]
            node = meant(given[0]) if [ast.unparse(each) for each in given[1:]] in LAST else None
        case _:
            return ""
    while True:
        match node:
            case ast.Call(ast.Attribute(inner, "masked_fill"), [hidden, value]) if not mask + scale:
                hides = ast.unparse(hidden)
                mask = f"{hides[:-5]} != 0" if hides.endswith(" == 0") else f"~({hides})"
                inner = inner if INFINITE.search(ast.unparse(value)) else None
            case ast.BinOp(inner, ast.Add(), added) if not mask + scale:
                mask = ast.unparse(added)
            case ast.BinOp(inner, ast.Mult(), by) if not scale:
                scale = ast.unparse(by)
            case ast.BinOp(inner, ast.Div(), by) if not scale:
                scale = f"1 / ({ast.unparse(by)})"
            case _:
                break
        node = meant(inner)
    queries, keys = factors(node)
    match keys:
        case ast.Call(ast.Attribute(inner, "transpose"), [*dims]) if {*map(ast.unparse, dims)} in LAST_TWO:
            three, mask = ", ".join(map(ast.unparse, (queries, inner, values))), f", attn_mask={mask}" if mask else ""
            return f"scaled_dot_product_attention({three}{mask}{dropout}, scale={scale or 1.0})"
    return ""


def _only_there(function: ast.AST, block: list[ast.stmt], product: ast.AST, used: list[int]) -> bool:
    """Whether nothing else reads what the statements give that lead to a product."""
    names = {block[index].targets[0].id for index in used[1:]}
    reads = [
        sum(
            isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names
            for node in ast.walk(tree)
        )
        for tree in (function, product, *(block[index] for index in used[1:]))
    ]
    return reads[0] == sum(reads[1:])


def _with_call(text: str, call: str, product: ast.AST, statements: list[ast.stmt]) -> str:
    """The call in place of the product in the first of the statements, and the others left out."""
    mask = re.search(r"attn_mask=[\w.]*?(\w+)(\[[^=]*\])? != 0", call)
    if mask and re.search(rf"\b{mask[1]}\W+torch\.tril\(", text):
        call = call.replace(mask[0], "is_causal=True")
    start, end = span(text, product)
    text = text[:start] + ("F." if F.search(text) else "torch.nn.functional.") + call + text[end:]
    lines = text.splitlines(keepends=True)
    for each in statements[1:]:
        del lines[each.lineno - 1 : each.end_lineno]
    return "".join(lines)
