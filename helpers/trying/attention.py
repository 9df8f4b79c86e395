"""An attention that a source spells out in products, mask and softmax, replaced by torch's own function."""

import ast
import re
from typing import Any

from .edits import span
from .replacements import Replacement, factors, functions

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
