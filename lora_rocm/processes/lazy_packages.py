"""Shortens the imports of large packages: submodules on first use, and the table of transformers' models from a file.

``peft`` and the packages of model classes in ``diffusers`` import each of their submodules when any one of them is
imported: 500 files that a run never uses. Here ``from .submodule import Name`` in such an ``__init__`` is postponed
until somebody reads the name. The name is then the same object. All other code of the ``__init__`` runs unchanged.

An import stays in place if the ``__init__`` itself uses its name, if a name is also the name of a submodule, and in
``try`` blocks. So a future version of a package may import more, but it never gets other objects.

``transformers`` reads all 1,600 files of its models at each import, twice, to learn which names they define. The
resulting table is kept in the program's folder, until transformers is installed again (``model_table``).

Packages that these libraries import only because they are installed are hidden, or run late (``optional_packages``).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from lora_rocm.processes.model_table import MODULE as MODEL_TABLE
from lora_rocm.processes.model_table import use_kept_table
from lora_rocm.processes.optional_packages import (
    DISTRIBUTIONS,
    SCHEDULERS,
    WITH_CALLS,
    CallsLoader,
    DistributionsLoader,
    SchedulerLoader,
    hide,
)

PACKAGES = (
    "peft",
    "peft.tuners",
    "diffusers.models.autoencoders",
    "diffusers.models.transformers",
)
"""Packages with an ``__init__`` that only collects names, of which a run uses a few."""
FIRST = {"peft": "peft.config"}
"""Submodules that a package imports at once. It has circular imports, which work in few orders."""
POSTPONE = "__postpone__"
"""Name in the changed ``__init__`` of the function that notes a postponed import."""


def install(packages: Collection[str] = PACKAGES) -> None:
    """Shorten imports from now on. A package that is already imported stays as it is.

    ``packages``: those in which the imports of submodules are postponed.
    """
    hide()
    if not any(isinstance(finder, _Finder) and finder.packages == frozenset(packages) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(packages))


class _Finder(MetaPathFinder):
    """Finds modules where Python would, and gives them a loader that shortens their imports."""

    def __init__(self, packages: Collection[str]) -> None:
        self.packages = frozenset(packages)
        self._loaders: dict[str, type[SourceFileLoader]] = {
            MODEL_TABLE: _TableLoader,
            **dict.fromkeys(packages, _Loader),
            **dict.fromkeys(WITH_CALLS, CallsLoader),
            **dict.fromkeys(DISTRIBUTIONS, DistributionsLoader),
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        loader = SchedulerLoader if fullname.startswith(SCHEDULERS) else self._loaders.get(fullname)
        if loader is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        spec.loader = loader(spec.loader.name, spec.loader.path)
        return spec


class _TableLoader(SourceFileLoader):
    """Loads the module that reads transformers' models, which then uses the kept table."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        use_kept_table(module)


class _Loader(SourceFileLoader):
    """Runs a package's ``__init__``, in which imports of submodules only note their names."""

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        return compile(postponed(tree, Path(self.path).parent), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        sources: dict[str, tuple[str, str]] = {}

        def postpone(submodule: str, names: dict[str, str]) -> None:
            sources.update({shown: (submodule, name) for shown, name in names.items()})

        def read(name: str) -> object:
            if name not in sources:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            submodule, original = sources[name]
            value: object = getattr(import_module(f"{module.__name__}.{submodule}"), original)
            setattr(module, name, value)
            return value

        setattr(module, POSTPONE, postpone)
        setattr(module, "__getattr__", read)  # noqa: B010 - of a module, which mypy knows no attributes of
        setattr(module, "__dir__", lambda: sorted({*vars(module), *sources}))  # noqa: B010
        super().exec_module(module)
        if module.__name__ in FIRST:
            import_module(FIRST[module.__name__])


def postponed(tree: ast.Module, folder: Path) -> ast.Module:
    """Return an ``__init__`` in which ``from .submodule import Name`` only notes the name, where this is safe.

    Args:
        tree: the parsed ``__init__``.
        folder: the folder of the package.
    """
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    changed = _Postponing(used, folder).visit(tree)
    assert isinstance(changed, ast.Module)
    return ast.fix_missing_locations(changed)


class _Postponing(ast.NodeTransformer):
    """Replaces the imports of submodules at the top level of a module, and in its ``if`` blocks."""

    def __init__(self, used: Collection[str], folder: Path) -> None:
        self._used, self._folder = used, folder

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        shown = {alias.asname or alias.name: alias.name for alias in node.names}
        if node.level != 1 or node.module is None or any(map(self._stays, shown)):
            return node
        noted = ast.Call(ast.Name(POSTPONE, ast.Load()), [ast.Constant(node.module), _literal(shown)], [])
        return ast.copy_location(ast.Expr(noted), node)

    def _stays(self, name: str) -> bool:
        submodule = (self._folder / name).is_dir() or (self._folder / f"{name}.py").is_file()
        return name == "*" or name in self._used or submodule

    def _unchanged(self, node: ast.AST) -> ast.AST:
        return node

    visit_Try = visit_TryStar = visit_With = visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _unchanged


def _literal(names: dict[str, str]) -> ast.expr:
    return ast.Dict([ast.Constant(name) for name in names], [ast.Constant(name) for name in names.values()])
