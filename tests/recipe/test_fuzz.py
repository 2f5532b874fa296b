"""Mutated recipes: a Recipe or a RecipeError in which all problems have a place, and nothing else."""

import contextlib
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_rocm.errors import RecipeError
from lora_rocm.recipe.load import dump_recipe, load_recipe

RECIPE = """\
base: base.yaml
model: {family: sdxl, name_or_path: "builtin:tiny-sdxl", vae: null}
data:
  sources:
    - path: pics
      repeats: 10
      shuffle_caption: true
    - dataset: some/hub
      caption_column: text
  resolution: 512
lora:
  rank: 16
  alpha: 8.5
  targets: [".*to_q", ".*to_k"]
optim:
  learning_rate: 1e-4
  betas: [0.9, 0.999]
train:
  max_train_steps: 100
  mixed_precision: bf16
sample:
  prompts:
    - "a zibu, red"
    - |
      two
      lines
output:
  formats: [kohya, peft]
"""
BASE = "model: {name_or_path: x/y}\ndata: {path: pics}\ntrain: {epochs: 2}\n"
NASTY = [
    "!!python/object:os.system [x]",
    "!!binary x",
    "!!set {a}",
    "!<tag:x> y",
    "&a [*a]",
    "*nope",
    "<<: *x",
    ".nan",
    "-.inf",
    "1e400",
    "9" * 4999,
    "9" * 30,
    "-1",
    "0x",
    "1:30",
    "2001-01-01",
    "true",
    "null",
    "'",
    '"\\ud800"',
    '"\\U00110000"',
    '"a\\0b"',
    "[" * 500,
    "{a: " * 60 + "1" + "}" * 60,
    "${HOME}",
    "\t",
    "---",
    "...",
    "%YAML 1.1",
    "? [a]",
    "\u2028",
    "\x85",
    "[]",
    "{}",
    "- - - 1",
]
LINES = RECIPE.splitlines()
SETTINGS = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """Up to four edits: a line deleted, doubled, moved or indented, or a value replaced."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["delete", "double", "swap", "indent", "value", "key"])):
            case "delete" if len(lines) > 1:
                del lines[at]
            case "double":
                lines.insert(at, lines[at])
            case "swap":
                other = draw(st.integers(0, len(lines) - 1))
                lines[at], lines[other] = lines[other], lines[at]
            case "indent":
                lines[at] = draw(st.sampled_from(["  ", "\t", " "])) + lines[at]
            case "value":
                lines[at] = lines[at].partition(":")[0] + ": " + draw(st.sampled_from(NASTY) | st.text(max_size=20))
            case "key":
                lines[at] = draw(st.sampled_from(NASTY) | st.text(max_size=12)) + ":" + lines[at].partition(":")[2]
    return "\n".join(lines)


def loads_or_explains(content: bytes, overrides: tuple[str, ...] = ()) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.yaml"
        path.write_bytes(content)
        path.with_name("base.yaml").write_text(BASE, encoding="utf-8")
        try:
            recipe = load_recipe(path, overrides).recipe
        except RecipeError as error:
            assert error.problems
            assert all(problem.where and problem.what for problem in error.problems)
            str(error).encode("utf-8")
        else:
            path.write_text(dump_recipe(recipe), encoding="utf-8")
            assert load_recipe(path).recipe == recipe


@SETTINGS
@given(mutated())
def test_mutated_lines(text: str) -> None:
    with contextlib.suppress(UnicodeEncodeError):  # a lone surrogate cannot be in a file
        loads_or_explains(text.encode("utf-8"))


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, len(RECIPE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_bytes(changes: list[tuple[int, int]]) -> None:
    content = bytearray(RECIPE.encode("utf-8"))
    for at, byte in changes:
        content[at] = byte
    loads_or_explains(bytes(content))


@SETTINGS
@given(st.binary(max_size=100))
def test_random_bytes(content: bytes) -> None:
    loads_or_explains(content)


@SETTINGS
@given(
    st.sampled_from(["lora.rank", "data.sources", "data", "train.epochs", "a.b", "optim.betas", "model.vae", ""]),
    st.sampled_from(NASTY) | st.text(max_size=30),
)
def test_overrides(key: str, value: str) -> None:
    loads_or_explains(RECIPE.encode("utf-8"), (f"{key}={value}",))


def test_the_unmutated_recipe_loads() -> None:
    loads_or_explains(RECIPE.encode("utf-8"))
