"""An import is moved into functions only where nobody sees it."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import pytest

from lora_rocm.processes.moved_imports import MOVED, move_imports

TEXT = '''
from fractions import Fraction, gcd
from decimal import Decimal
from heavy import Assigned, Signature, Base, Named, quoted, shadowed
from light import other
def first(x):
    """Text."""
    return Fraction(x)
class Some:
    def second(self):
        def inner():
            return isinstance(self, Fraction)
        return inner()
def third():
    return other, Decimal
number = Decimal(1)
'''


def moved(text: str, *sources: str) -> tuple[str, dict[str, str]]:
    tree = ast.parse(text)
    names = move_imports(tree, sources)
    return ast.unparse(ast.fix_missing_locations(tree)), names


def test_an_import_moves_into_the_functions_that_use_it() -> None:
    told, names = moved(TEXT, "fractions", "decimal")
    assert names == dict.fromkeys(("Fraction", "gcd"), "from fractions import Fraction, gcd")
    assert told.count("from fractions") == 2 and told.count("from decimal") == 1 and told.count("from light") == 1
    assert told.index('"""Text."""') < told.index("from fractions")
    assert told.index("def second") < told.rindex("from fractions") < told.index("def inner")
    assert told.index("from decimal") < told.index("def first")


@pytest.mark.parametrize(
    "use",
    [
        "class A(Fraction): pass",
        "def f(x=Fraction): pass",
        "def f(x: Fraction): pass",
        "@Fraction\ndef f(): pass",
        "def f():\n    global Fraction\n    Fraction = 1",
        "def f(Fraction):\n    return Fraction",
        "def f():\n    Fraction = 1\n    return Fraction",
        "def f():\n    import Fraction\n    return Fraction",
        "use = lambda: Fraction",
        "__all__ = ['Fraction']",
        "def __getattr__(name): return Fraction",
    ],
)
def test_it_stays_where_it_would_be_seen(use: str) -> None:
    text = f"from fractions import Fraction\n{use}"
    told, names = moved(text, "fractions")
    assert not names and told == ast.unparse(ast.parse(text))


def test_an_annotation_that_python_does_not_evaluate_does_not_hold_it() -> None:
    text = "from __future__ import annotations\nfrom fractions import Fraction\ndef f(x: Fraction): return 1"
    assert moved(text, "fractions")[1]


@pytest.mark.parametrize("module", MOVED)
def test_the_modules_still_have_such_imports(module: str) -> None:
    file = Path(sysconfig.get_path("purelib"), *module.split(".")).with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert move_imports(tree, MOVED[module]), "nothing is moved: remove the row"
