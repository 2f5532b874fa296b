"""Moves single imports of large packages into the functions that use them. ``lazy_packages`` installs this.

A file of ``torch`` or ``transformers`` may import a package for one function that a run never calls:
TorchDynamo for a mask of flex attention, sympy for tensors that are split over GPUs. Here such an import is moved to
the beginning of each function that uses one of its names. The function then gets the same object. A name that is read
from outside the module is imported at that time.

An import stays in place if the module uses a name outside of functions, or if a function assigns to it. So a future
version of a package may import more, but it never gets other objects.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType

SYMBOLIC = "torch.fx.experimental.symbolic_shapes"
MOVED: Mapping[str, tuple[str, ...]] = {
    "transformers.masking_utils": ("torch._dynamo._trace_wrapped_higher_order_op",),
    "torch.distributed.tensor._collective_utils": (SYMBOLIC,),
    "torch.distributed.tensor._decompositions": (SYMBOLIC,),
    "torch.distributed.tensor._ops._matrix_ops": (SYMBOLIC,),
    "torch.distributed.tensor._ops._tensor_ops": (SYMBOLIC,),
}
"""Modules, and the modules from which they import names that a run does not use."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class MovingLoader(SourceFileLoader):
    """Runs a module with moved imports."""

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        self._moved = move_imports(tree, MOVED[fullname])
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if not self._moved:
            return

        def read(name: str) -> object:
            if name not in self._moved:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            names: dict[str, object] = {}
            exec(self._moved[name], names)  # noqa: S102 - an import that stood in the module
            setattr(module, name, names[name])
            return names[name]

        setattr(module, "__getattr__", read)  # noqa: B010 - of a module, which mypy knows no attributes of


def move_imports(tree: ast.Module, sources: Collection[str]) -> dict[str, str]:
    """Move ``from SOURCE import NAME`` into the functions of a module, where this is safe.

    Returns:
        Each moved name, and its import as text.
    """
    moved: dict[str, str] = {}
    if any(isinstance(node, Function) and node.name == "__getattr__" for node in tree.body):
        return moved
    functions = list(_outermost_functions(tree))
    for node in [line for line in tree.body if isinstance(line, ast.ImportFrom)]:
        names = {alias.asname or alias.name for alias in node.names}
        if node.level or node.module not in sources or names & _names_outside(tree, functions):
            continue
        using = [function for function in functions if names & _names_in(function.body)]
        if any(names & _assigned_in(function) for function in using):
            continue
        for function in using:
            first = function.body[0]
            has_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            copy = ast.copy_location(ast.ImportFrom(node.module, node.names, 0), first)
            function.body.insert(1 if has_text and len(function.body) > 1 else 0, copy)
        tree.body[tree.body.index(node)] = ast.copy_location(ast.Pass(), node)
        moved |= dict.fromkeys(names, ast.unparse(node))
    return moved


def _outermost_functions(node: ast.AST) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield child
        else:
            yield from _outermost_functions(child)


def _names_in(nodes: Collection[ast.AST]) -> set[str]:
    return {name.id for node in nodes for name in ast.walk(node) if isinstance(name, ast.Name)}


def _names_outside(tree: ast.Module, functions: Collection[Function]) -> set[str]:
    """Return the names that a module uses outside of the bodies of its functions.

    This includes their signatures, but not annotations if Python does not evaluate them.
    """
    found, inner = set[str](), {id(line) for function in functions for line in function.body}
    if any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body):
        for node in ast.walk(tree):
            inner.update(id(child) for child in (getattr(node, "annotation", None), getattr(node, "returns", None)))
    waiting: list[ast.AST] = [tree]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if id(child) not in inner:
                waiting.append(child)
                if isinstance(child, ast.Name):
                    found.add(child.id)
                elif isinstance(child, ast.Constant) and isinstance(child.value, str) and child.value.isidentifier():
                    found.add(child.value)  # an annotation in quotes, or a row of ``__all__``
    return found


def _assigned_in(function: Function) -> set[str]:
    """Return the names that a function binds: its arguments, assigned and imported names, and global names."""
    found = set[str]()
    for node in ast.walk(function):
        match node:
            case ast.arg(name):
                found.add(name)
            case ast.Name(name, ast.Store() | ast.Del()):
                found.add(name)
            case ast.Global(names) | ast.Nonlocal(names):
                found.update(names)
            case ast.Import(names) | ast.ImportFrom(names=names):
                found.update(alias.asname or alias.name for alias in names)
            case ast.ExceptHandler(name=str(name)) | ast.FunctionDef(name) | ast.ClassDef(name):
                found.add(name)
    return found
