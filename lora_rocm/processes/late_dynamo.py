"""Imports TorchDynamo when something is compiled, and not before. ``lazy_packages`` installs this.

``torch.compiler.disable`` and ``allow_in_graph`` import TorchDynamo to mark a function for it, and
``torch._disable_dynamo``, which each optimizer has, at its first call. TorchDynamo traces nothing until it was
imported. So until then the first two note the function, and the third calls it unchanged.

Activation checkpointing reads an option of TorchDynamo, and each optimizer step asks it to end a graph. Both are left
to a process that traces.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType

DYNAMO, NOTED = "torch._dynamo", "__noted__"
NOTE = f"if callable(fn):\n    {NOTED}.append((fn, {{!r}}))\n    return fn"
UNTIL_THEN: Mapping[str, Mapping[str, str]] = {
    "torch._compile": {"inner": "return fn(*args, **kwargs)"},
    "torch.compiler": {
        "disable": "\n".join(
            (
                "if fn is None and reason is None:",
                "    return __import__('functools').partial(disable, recursive=recursive)",
                "if type(fn).__name__ == 'function' and reason is None:",
                "    return __import__('torch')._disable_dynamo(fn, recursive)",
            )
        ),
        "allow_in_graph": NOTE.format("allow_in_graph"),
        "assume_constant_result": NOTE.format("assume_constant_result"),
    },
}
"""Module -> function -> what the function does in place of ``import torch._dynamo`` while nobody has imported that."""
DECORATED = (
    "diffusers.utils.torch_utils",
    *(f"transformers.integrations.{name}" for name in ("deepgemm", "finegrained_fp8", "sonicmoe")),
)
"""Modules with decorators of TorchDynamo. They get the decorators with the same names in ``torch.compiler``."""
_BREAK, _COMPILES = "torch._dynamo.graph_break()", "torch.compiler.is_dynamo_compiling()"
_OPTION = "torch._dynamo.config.error_on_nested_fx_trace"
REPLACED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "torch.utils.checkpoint": (
        (f" = {_OPTION}\n", f" = {_OPTION} if torch.compiler._is_non_strict_tracing() else None\n"),
        (
            "@torch._dynamo.disable\n",
            f"@(torch._dynamo.disable if {DYNAMO!r} in __import__('sys').modules else lambda hook: hook)\n",
        ),
    ),
    "torch.optim.optimizer": (
        ("        import torch._dynamo\n\n        self = cast(", "        pass\n\n        self = cast("),
        (f"            {_BREAK}\n            ret = ", f"            if {_COMPILES}: {_BREAK}\n            ret = "),
        (f"finally:\n            {_BREAK}\n", f"finally:\n            if {_COMPILES}: {_BREAK}\n"),
    ),
}
"""Module -> texts and their replacements. The option of the first is used in non-strict tracing only."""
MODULES = frozenset({*UNTIL_THEN, *DECORATED, *REPLACED, DYNAMO})


class DynamoLoader(SourceFileLoader):
    """Loads a module that marks functions for TorchDynamo; or TorchDynamo, which then marks the noted functions."""

    def get_code(self, fullname: str) -> CodeType | None:
        if fullname == DYNAMO:
            return super().get_code(fullname)
        source = self.get_data(self.path)
        if fullname in REPLACED:
            text = replaced(source.decode("utf-8").replace("\r\n", "\n"), REPLACED[fullname])
            return compile(text, self.path, "exec", dont_inherit=True)
        tree = ast.parse(source, self.path)
        if fullname in DECORATED:
            name_compiler(tree)
        else:
            delay(tree, UNTIL_THEN[fullname])
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in UNTIL_THEN:
            setattr(module, NOTED, [])
        super().exec_module(module)
        if module.__name__ == DYNAMO:
            noted = getattr(sys.modules.get("torch.compiler"), NOTED, [])
            while noted:
                function, decorator = noted.pop(0)
                getattr(module, decorator)(function)


def replaced(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return a module's text with replacements; unchanged if it does not have each of the texts once."""
    if any(text.count(old) != 1 for old, _ in pairs):
        return text
    for old, new in pairs:
        text = text.replace(old, new)
    return text


def name_compiler(tree: ast.Module) -> None:
    """Replace decorators of TorchDynamo by the same decorators of ``torch.compiler``, which call them."""
    late = UNTIL_THEN["torch.compiler"].keys() - {"disable"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == DYNAMO and {name.name for name in node.names} <= late:
            node.module = "torch.compiler"
        for decorator in getattr(node, "decorator_list", ()):
            match decorator:
                case ast.Attribute(ast.Attribute(ast.Name("torch"), "_dynamo") as package, name) if name in late:
                    package.attr = "compiler"


def delay(tree: ast.Module, statements: Mapping[str, str]) -> None:
    """Change functions of a module: before they import TorchDynamo, they run statements while nobody else has.

    Args:
        tree: the module, which is changed.
        statements: function -> its statements. A function without that import stays as it is.
    """
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name in statements:
            test = f"if {DYNAMO!r} not in __import__('sys').modules:\n"
            text = test + "".join(f"    {line}\n" for line in statements[function.name].splitlines())
            blocks: list[ast.FunctionDef | ast.If] = [function]
            blocks += [node for node in ast.walk(function) if isinstance(node, ast.If)]
            for block in blocks:
                for place, line in enumerate(block.body):
                    if isinstance(line, ast.Import) and [alias.name for alias in line.names] == [DYNAMO]:
                        added = ast.parse(text).body[0]
                        for part in ast.walk(added):
                            ast.copy_location(part, line)
                        block.body.insert(place, added)
                        break
