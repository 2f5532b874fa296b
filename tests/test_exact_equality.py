"""Computed values are compared with a tolerance: another processor adds in another order, so a bit may differ there.

The allow-list ``exact_equality.toml`` names each function that compares bits, under the reason why it may.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
ALLOWED = TESTS / "exact_equality.toml"
FUNCTIONS = {"equal", "array_equal", "assert_equal", "assert_array_equal"}
MODULES = {"torch", "np", "numpy", "testing"}
HOW = (
    "Compare computed values with torch.testing.assert_close, or numpy's allclose, and a tolerance that the "
    "computation explains. If nothing is computed, or the same computation is repeated, add the function to "
    "tests/exact_equality.toml."
)


def exact_comparisons(source: str) -> Iterator[str]:
    """The outermost function around each comparison of bits; "" at module level."""

    def visit(node: ast.AST, inside: str) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = inside or node.name
        if isinstance(node, ast.Attribute) and node.attr in FUNCTIONS:
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if owner in MODULES:
                yield inside
        if isinstance(node, ast.Compare) and any(isinstance(operator, ast.Eq | ast.NotEq) for operator in node.ops):
            sides = [side for side in (node.left, *node.comparators) if isinstance(side, ast.Call)]
            if any(isinstance(side.func, ast.Attribute) and side.func.attr == "tobytes" for side in sides):
                yield inside
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "numpy", "numpy.testing"):
            yield from (inside for name in node.names if name.name in FUNCTIONS)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    if any(word in source for word in ("equal", "tobytes")):  # parts of all names above
        yield from visit(ast.parse(source), "")


def test_bits_are_compared_only_where_they_may_be() -> None:
    tables = tomllib.loads(ALLOWED.read_text(encoding="utf-8"))
    allowed = [
        (file, function)
        for table in tables.values()
        for file, functions in table.items()
        if file != "reason"
        for function in functions
    ]
    assert len(allowed) == len(set(allowed)) and all(table["reason"] for table in tables.values())
    found = {
        (path.relative_to(TESTS).as_posix(), function)
        for path in TESTS.rglob("*.py")
        for function in exact_comparisons(path.read_text(encoding="utf-8"))
    }
    assert not (new := sorted(found - set(allowed))), f"{new}: {HOW}"
    assert not (gone := sorted(set(allowed) - found)), f"{gone} no longer compare bits: remove them from {ALLOWED.name}"


def test_a_comparison_of_bits_is_found() -> None:
    lines = (
        "assert torch.equal(a, b)",
        "assert not np.array_equal(a, b)",
        "np.testing.assert_array_equal(a, b)",
        "assert a.tobytes() == b",
        "assert b != a.numpy().tobytes()",
        "from torch import equal",
        "all(map(torch.equal, a, b))",
    )
    for line in lines:
        assert list(exact_comparisons(f"def test_it():\n    {line}")) == ["test_it"], line
    assert not list(exact_comparisons("def test_it():\n    torch.testing.assert_close(a, b)\n    assert a == b"))
