"""A recipe file to a Recipe."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lora_rocm.errors import RecipeError, ResumeError
from lora_rocm.recipe import kinds, load
from lora_rocm.recipe.explain import _leaf_types
from lora_rocm.recipe.load import (
    dump_recipe,
    load_recipe,
    shipped_recipes,
)
from lora_rocm.recipe.optim_sections import OPTIMIZERS
from lora_rocm.recipe.suggest import all_keys, section_class
from lora_rocm.supervisor.choose_run_dir import choose
from tests.wording import Saying, Worded, holds, mentions, saying, says, says_if, worded

MINIMAL = "model:\n  name_or_path: builtin:tiny-sdxl\ndata:\n  path: pics\ntrain:\n  max_train_steps: 10\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(MINIMAL, encoding="utf-8")
    return tmp_path


def wheres(error: pytest.ExceptionInfo[RecipeError]) -> list[str]:
    return [problem.where for problem in error.value.problems]


def test_minimal_recipe(in_folder: Path) -> None:
    loaded = load_recipe("recipe.yaml")
    assert loaded.name == "recipe" and loaded.notices == ()
    assert loaded.recipe.data.path == str(in_folder / "pics")
    assert loaded.recipe.cache.dir == str(in_folder / "cache")
    assert loaded.recipe.output.dir == str(in_folder / "runs")
    assert loaded.recipe.model.name_or_path == "builtin:tiny-sdxl"


def test_model_path_is_absolute_only_if_it_is_there(in_folder: Path) -> None:
    hub = load_recipe("recipe.yaml", ["model.name_or_path=some/model", "data.path=builtin:demo"]).recipe
    assert (hub.model.name_or_path, hub.data.path) == ("some/model", "builtin:demo")
    (in_folder / "some" / "model").mkdir(parents=True)
    local = load_recipe("recipe.yaml", ["model.name_or_path=some/model"]).recipe
    assert local.model.name_or_path == str(in_folder / "some" / "model")


def test_home_is_expanded() -> None:
    assert load_recipe("recipe.yaml", ["data.path=~/pics"]).recipe.data.path == os.path.expanduser(
        os.path.join("~", "pics")
    )


def test_every_problem_at_once_with_its_line() -> None:
    Path("bad.yaml").write_text(
        MINIMAL + "  epochs: 2\nlora:\n  rank: sixteen\n  alpha: .nan\n  rank: 3\nnetwork_dim: 4\n", encoding="utf-8"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe("bad.yaml", ["optim.learning_rate=fast"])
    assert wheres(caught) == [  # in the order of the lines
        "bad.yaml:7 train.epochs",
        "bad.yaml:9 lora.rank",
        "bad.yaml:10 lora.alpha",
        "bad.yaml:11 lora.rank",
        "bad.yaml:12 network_dim",
        "--set optim.learning_rate",
    ]
    assert "got 'sixteen'" in str(caught.value)


OF_ANOTHER = [
    ("optim.text_encoder_learning_rate=1e-5", "lora.train_text_encoder=true", "false"),
    ("optim.embedding_learning_rate=1e-5", "lora.new_tokens=[{token: <a>, init: cat}]", "[]"),
    ("train.validation_every_n_steps=5", "data.validation_split=0.1", "0.0"),
    ("data.watched={path: .}", "train.validation_every_n_steps=1", "0"),
    ("data.keep_tokens=1", "data.shuffle_caption=true", "false"),
    ("sample.every_n_steps=5", "sample.prompts=[a]", "[]"),
    ("runtime.persistent_workers=true", "runtime.workers=1", "0"),
    ("runtime.worker_timeout_s=60", "runtime.workers=1", "0"),
    ("output.log_project=mine", "output.log_with=[wandb]", "[]"),
]


@pytest.mark.parametrize(("given", "needed", "off"), OF_ANOTHER)
def test_a_key_that_does_nothing_alone_is_refused(given: str, needed: str, off: str) -> None:
    Path("alone.yaml").write_text(MINIMAL, encoding="utf-8")
    key, other = (each.partition("=")[0] for each in (given, needed))
    with pytest.raises(RecipeError) as caught:
        load_recipe("alone.yaml", [given])
    (problem,) = caught.value.problems
    assert problem.where == f"--set {key}" and says(problem.what, "recipe/this-does-nothing-without-other", other=other)
    assert problem.fix.startswith(f"Set {other}") and says(problem.fix, "recipe/remove-this-key")
    assert load_recipe("alone.yaml", [given, needed]).notices == ()
    # Whoever switches a feature off keeps its settings.
    assert problem.fix.endswith(f"write {other}: {off}.")
    (said,) = load_recipe("alone.yaml", [given, f"{other}={off}"]).notices
    assert says(said, "recipe/key-this-does-nothing-without-other", key=key, other=other)


def test_a_key_that_does_nothing_alone_is_named_with_its_line() -> None:
    text = MINIMAL + "optim:\n  embedding_learning_rate: 1.0e-3\nsample:\n  every_n_steps: {}\n"
    Path("lines.yaml").write_text(text.format(5), encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe("lines.yaml")
    assert wheres(caught) == ["lines.yaml:8 optim.embedding_learning_rate", "lines.yaml:10 sample.every_n_steps"]
    Path("lines.yaml").write_text(text.format(0), encoding="utf-8")  # the default
    with pytest.raises(RecipeError) as caught:
        load_recipe("lines.yaml")
    assert wheres(caught) == ["lines.yaml:8 optim.embedding_learning_rate"]


def test_a_key_with_a_wrong_value_has_one_problem() -> None:
    Path("wrong.yaml").write_text(MINIMAL + "sample:\n  every_n_steps: true\n", encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe("wrong.yaml")
    assert [problem.what for problem in caught.value.problems] == [worded("recipe/expected-a-number-got-true")]


def test_one_of_the_others_in_the_base_is_enough() -> None:
    Path("below.yaml").write_text(MINIMAL + "sample:\n  prompts: [a]\n", encoding="utf-8")
    Path("above.yaml").write_text("base: below.yaml\nsample:\n  every_n_steps: 5\n", encoding="utf-8")
    assert load_recipe("above.yaml").notices == ()
    assert len(load_recipe("above.yaml", ["sample.prompts=[]"]).notices) == 1


def test_the_recipe_of_a_run_is_read_whatever_it_switches_off() -> None:
    """A run writes all keys, so a mere notice at its start is not an error later."""
    Path("mine.yaml").write_text(MINIMAL, encoding="utf-8")
    settings = [given for given, *_ in OF_ANOTHER]
    off = [
        "lora.train_text_encoder=false",
        "lora.new_tokens=[]",
        "data.validation_split=0",
        "data.shuffle_caption=false",
    ]
    off += ["sample.prompts=[]", "runtime.workers=0", "output.log_with=[]"]
    recipe = load_recipe("mine.yaml", [*settings, *off]).recipe
    Path("run.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe("run.yaml").recipe == recipe


def test_held_out_samples_without_a_loss_in_the_run_are_said() -> None:
    Path("held.yaml").write_text(MINIMAL, encoding="utf-8")
    (said,) = load_recipe("held.yaml", ["data.validation_split=0.1"]).notices
    assert says(said, "recipe/data-validation-split-these-samples-are-not") and "lora-rocm compare" in said
    assert load_recipe("held.yaml", ["data.validation_split=0.1", "train.validation_every_n_epochs=1"]).notices == ()


@pytest.mark.parametrize(("given", "trackers"), [
    ("wandb", ("wandb",)),
    ("[tensorboard, wandb, wandb]", ("wandb",)),
    ("tensorboard", ()),
])  # fmt: skip
def test_one_tracker_needs_no_list_and_tensorboard_adds_nothing(given: str, trackers: tuple[str, ...]) -> None:
    Path("log.yaml").write_text(MINIMAL, encoding="utf-8")
    assert load_recipe("log.yaml", [f"output.log_with={given}"]).recipe.output.log_with == trackers
    with pytest.raises(
        RecipeError,
        check=saying("recipe/output-log-with-expected-one-of", "recipe/got-wandbb", "recipe/did-you-mean-wandb"),
    ):
        load_recipe("log.yaml", ["output.log_with=wandbb"])


def test_a_rate_that_is_meant_for_another_optimizer_is_questioned_with_its_line() -> None:
    Path("high.yaml").write_text(MINIMAL + "optim:\n  learning_rate: 1.0\n", encoding="utf-8")
    (said,) = load_recipe("high.yaml").notices
    assert said.startswith("high.yaml:8 optim.learning_rate: 1 is very high for adamw") and "Prodigy" in said
    both = load_recipe("high.yaml", ["optim.text_encoder_learning_rate=0.5", "lora.train_text_encoder=true"]).notices
    assert len(both) == 2 and both[1].startswith("--set optim.text_encoder_learning_rate: 0.5")
    for usual in ("1.0e-2", "3.0e-3", "1.0e-4"):
        assert load_recipe("high.yaml", [f"optim.learning_rate={usual}"]).notices == ()


def test_prodigy_takes_rates_near_1_and_others_are_questioned() -> None:
    Path("own.yaml").write_text(MINIMAL + "optim:\n  optimizer: prodigy\n", encoding="utf-8")
    assert load_recipe("own.yaml").recipe.optim.learning_rate == 1.0
    for usual in ("1.0", "0.5", "2", "0.01", "10"):
        assert load_recipe("own.yaml", [f"optim.learning_rate={usual}"]).notices == ()
    for rate, height in (("1.0e-4", "low"), ("100", "high")):
        (said,) = load_recipe("own.yaml", [f"optim.learning_rate={rate}"]).notices
        assert says(said, "recipe/is-very-height-for-prodigy-which-estimates", height=height)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_default_rate_of_no_optimizer_is_questioned_and_1_only_where_it_is_a_rate(name: str) -> None:
    dtype = OPTIMIZERS[name].weight_dtypes[0]
    Path("own.yaml").write_text(MINIMAL + f"optim: {{optimizer: {name}}}\nlora: {{weight_dtype: {dtype}}}\n", "utf-8")
    assert load_recipe("own.yaml").notices == ()
    wants_1 = name in ("prodigy", "prodigy_schedule_free", "dadapt_adam")
    said = load_recipe("own.yaml", ["optim.learning_rate=1.0"]).notices
    assert [f"1 is very high for {name}, " in each for each in said] == [] if wants_1 else [True]


@pytest.mark.parametrize("given", ["lr_warmup_steps: 12", "lr_warmup_ratio: 0.95"])
def test_a_warm_up_as_long_as_the_run_is_questioned_with_its_line(given: str) -> None:
    Path("own.yaml").write_text(MINIMAL + f"optim:\n  {given}\n", encoding="utf-8")
    (said,) = load_recipe("own.yaml").notices
    assert says(said, "recipe/own-yaml-8-optim-value-the-warm", value=given.split(":")[0])
    assert load_recipe("own.yaml", ["train.max_train_steps=40"]).notices == ()


def test_a_held_out_loss_after_the_end_is_questioned() -> None:
    Path("own.yaml").write_text(MINIMAL, encoding="utf-8")
    changes = ["data.validation_split=0.3", "train.validation_every_n_steps=11"]
    (said,) = load_recipe("own.yaml", changes).notices
    assert says(said, "recipe/train-validation-every-n-steps-the-run")
    assert load_recipe("own.yaml", [*changes, "train.max_train_steps=11"]).notices == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[832, 1216]", worded("recipe/write-one-number-1006")),
        ("[1024, 768]", worded("recipe/write-one-number-887")),
        ("[768, 1024]", ""),
        ("[512, 768, 1024]", ""),
    ],
)
def test_two_resolutions_may_be_meant_as_a_width_and_a_height(given: str, said: str | Worded) -> None:
    Path("own.yaml").write_text(MINIMAL, encoding="utf-8")
    notices = load_recipe("own.yaml", [f"data.resolution={given}"]).notices
    assert holds("".join(notices), said) and bool(notices) is bool(said)
    own = ["data.path=null", f"data.resolution={given}", "data.sources=[{path: a, resolution: 512}]"]
    assert load_recipe("own.yaml", own).notices == (), "no image is seen at these"


def test_missing_keys_have_a_place() -> None:
    Path("bad.yaml").write_text("model:\n  vae: x\ntrain: {epochs: 1}\n", encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe("bad.yaml")
    assert wheres(caught) == ["bad.yaml:1 model.name_or_path", "bad.yaml data"]


@pytest.mark.parametrize(
    ("content", "where", "words"),
    [
        (b"", "bad.yaml", saying("recipe/empty")),
        (b"# only a comment\n", "bad.yaml", saying("recipe/empty")),
        (b"- 1\n", "bad.yaml:1", saying("recipe/no-sections")),
        (b"text", "bad.yaml:1", saying("recipe/no-sections")),
        (b"a: 1\nb: \xff\n", "bad.yaml:2", saying("recipe/utf-8")),
        ("a: 1".encode("utf-16"), "bad.yaml:1", saying("recipe/utf-8")),
        (b"a: [1\nb: 2\n", "bad.yaml:2:2", saying("recipe/not-valid-yaml")),
        (
            b'a: "C:\\Users\\new"\n',
            "bad.yaml:1:9",
            saying("recipe/fix-in-double-quotes-a-backslash", "recipe/single-quotes", "recipe/forward"),
        ),
        (b"a:\n\tb: 1\n", "bad.yaml:2:1", saying("recipe/tab")),
        (b"a: " + b"x" * (1 << 18), "bad.yaml", saying("recipe/larger-than-256-kib")),
        (b"!!python/object:os.system [x]", "bad.yaml:1", saying("recipe/no-sections")),
    ],
)
def test_files_that_are_no_recipe(content: bytes, where: str, words: Saying) -> None:
    Path("bad.yaml").write_bytes(content)
    with pytest.raises(RecipeError, check=words) as caught:
        load_recipe("bad.yaml")
    assert wheres(caught) == [where]


def test_missing_file_lists_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "shipped_recipes", lambda: {"sdxl.yaml": Path("x")})
    with pytest.raises(RecipeError) as caught:
        load_recipe("nope.yaml")
    assert "recipe.yaml" in str(caught.value) and "sdxl.yaml" in str(caught.value)
    with pytest.raises(RecipeError, check=saying("recipe/is-a-folder")):
        load_recipe(".")
    with pytest.raises(RecipeError, check=saying("recipe/no-such-file")):
        load_recipe("x" * 5000)


def test_shipped_recipe_by_name(monkeypatch: pytest.MonkeyPatch, in_folder: Path) -> None:
    shipped = in_folder / "elsewhere" / "sdxl.yaml"
    shipped.parent.mkdir()
    shipped.write_text(MINIMAL, encoding="utf-8")
    monkeypatch.setattr(load, "shipped_recipes", lambda: {"sdxl.yaml": shipped})
    for name in ("sdxl.yaml", "recipes/sdxl.yaml"):
        loaded = load_recipe(name)
        assert loaded.path == shipped and says(loaded.notices[0], "recipe/ships-with-the-program")
    with pytest.raises(RecipeError):
        load_recipe("other/sdxl.yaml")
    Path("sdxl.yaml").write_text(MINIMAL, encoding="utf-8")
    assert load_recipe("sdxl.yaml").notices == ()


@pytest.mark.parametrize("path", shipped_recipes().values(), ids=lambda path: path.name)
def test_shipped_recipes_are_valid(path: Path) -> None:
    load_recipe(path)


# base and --set


def test_base_is_merged_section_by_section(in_folder: Path) -> None:
    Path("sub").mkdir()
    Path("sub/child.yaml").write_text("base: ../recipe.yaml\nlora:\n  rank: 4\ntrain:\n  seed: 7\n", encoding="utf-8")
    recipe = load_recipe("sub/child.yaml").recipe
    assert (recipe.lora.rank, recipe.train.seed, recipe.train.max_train_steps) == (4, 7, 10)
    assert recipe.data.path == str(in_folder / "pics")


def test_the_base_of_a_linked_recipe_is_beside_the_link_or_beside_the_file(in_folder: Path) -> None:
    Path("own").mkdir()
    Path("own/child.yaml").write_text("base: parent.yaml\nlora: {rank: 4}\n", encoding="utf-8")
    Path("own/parent.yaml").write_text(MINIMAL.replace("10", "11"), encoding="utf-8")
    try:
        Path("today.yaml").symlink_to(Path("own", "child.yaml"))
    except OSError:
        pytest.skip("no links may be made here")
    assert load_recipe("today.yaml").recipe.train.max_train_steps == 11
    Path("parent.yaml").write_text(MINIMAL.replace("10", "12"), encoding="utf-8")
    assert load_recipe("today.yaml").recipe.train.max_train_steps == 12, "the nearer one"


def folder_of_bytes(parent: Path) -> Path:
    """A folder with a name that is not UTF-8."""
    folder = os.path.join(os.fsencode(parent), b"caf\xe9")
    try:
        os.mkdir(folder)
    except OSError:
        pytest.skip("names are text here")
    return Path(os.fsdecode(folder))


def test_a_name_that_is_no_text_is_refused_before_anything_is_made(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of_bytes(in_folder)
    for path in (folder / "recipe.yaml", folder.with_suffix(".yaml")):
        path.write_text(MINIMAL, encoding="utf-8")
    assert load_recipe(folder / "recipe.yaml").name == "recipe", "nothing of this path is kept"
    with pytest.raises(RecipeError) as caught:
        load_recipe(folder.with_suffix(".yaml"))
    assert wheres(caught) == [r"caf\udce9.yaml"]
    monkeypatch.chdir(folder)
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipe.yaml")
    assert [where.endswith(r"caf\udce9") for where in wheres(caught)] == [True]
    assert str(caught.value).encode("utf-8") and "Rename" in caught.value.problems[0].fix
    with pytest.raises(ResumeError) as refused:
        choose(load_recipe(in_folder / "recipe.yaml", absolute_paths(in_folder)), Path("run"), None)
    assert refused.value.code == "run-dir-name"
    assert sorted(os.listdir(folder)) == ["recipe.yaml"]


def absolute_paths(folder: Path) -> list[str]:
    return [f"{key}={folder / key}" for key in ("data.path", "cache.dir", "output.dir")]


@pytest.mark.skipif(sys.platform != "linux", reason="names are always text there")
def test_a_locale_that_hides_letters_is_named(in_folder: Path) -> None:
    folder = in_folder / "käse"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(MINIMAL, encoding="utf-8")
    command = "from lora_rocm.recipe.load import load_recipe; load_recipe('recipe.yaml')"
    source = Path(load.__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(source), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"}
    ended = subprocess.run([sys.executable, "-c", command], cwd=folder, env=env, capture_output=True, check=False)
    if b"\xc3\xa4" in os.fsencode("ä"):
        assert ended.returncode and b"PYTHONUTF8=1" in ended.stderr


def test_lists_of_a_base_are_replaced() -> None:
    Path("b.yaml").write_text(MINIMAL + "sample:\n  prompts: [a, b]\n", encoding="utf-8")
    Path("child.yaml").write_text("base: b.yaml\nsample:\n  prompts: [c]\n", encoding="utf-8")
    assert load_recipe("child.yaml").recipe.sample.prompts == ("c",)


def test_a_layer_takes_back_the_other_of_a_pair() -> None:
    Path("child.yaml").write_text(
        "base: recipe.yaml\ntrain: {epochs: 2}\ndata:\n  sources:\n    - path: a\n", encoding="utf-8"
    )
    recipe = load_recipe("child.yaml").recipe
    assert (recipe.train.epochs, recipe.train.max_train_steps, recipe.data.path) == (2, None, None)
    back = load_recipe("child.yaml", ["train.max_train_steps=3", "data.path=b"]).recipe
    assert (back.train.epochs, back.train.max_train_steps, back.data.sources) == (None, 3, ())


# keys that have moved


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (MINIMAL + "  min_snr_gamma: 5\n  noise_offset: 0.1\n", []),
        (MINIMAL, ["train.min_snr_gamma=5", "train.noise_offset=0.1"]),
        (MINIMAL, ["train={min_snr_gamma: 5, noise_offset: 0.1}"]),
        ("base: old.yaml\n", []),
        ("base: old.yaml\nobjective: {noise_offset: 0.1}\n", []),
        (MINIMAL + "objective: {min_snr_gamma: 1, noise_offset: 0.1}\n", ["train.min_snr_gamma=5"]),
    ],
)
def test_the_old_place_of_a_key_is_read_with_one_notice(text: str, overrides: list[str]) -> None:
    Path("old.yaml").write_text(MINIMAL + "  min_snr_gamma: 5\n  noise_offset: 0.1\n", encoding="utf-8")
    Path("r.yaml").write_text(text, encoding="utf-8")
    Path("new.yaml").write_text(MINIMAL + "objective: {min_snr_gamma: 5, noise_offset: 0.1}\n", encoding="utf-8")
    loaded, new = load_recipe("r.yaml", overrides), load_recipe("new.yaml")
    assert loaded.recipe == new.recipe and new.notices == ()
    (notice,) = loaded.notices
    assert "train.min_snr_gamma is now objective.min_snr_gamma" in notice and says(notice, "recipe/write-the-new-one")


def test_a_new_place_above_an_old_one_counts_without_a_notice() -> None:
    Path("old.yaml").write_text(MINIMAL + "  min_snr_gamma: 5\n", encoding="utf-8")
    loaded = load_recipe("old.yaml", ["objective.min_snr_gamma=1"])
    assert loaded.notices == () and loaded.recipe == load_recipe("recipe.yaml", ["objective.min_snr_gamma=1"]).recipe


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.min_snr_gamma=5", "objective.min_snr_gamma=1"],
        ["objective.min_snr_gamma=1", "train={min_snr_gamma: 5}"],
    ],
)
def test_both_places_on_the_command_line_are_an_error(overrides: list[str]) -> None:
    before = overrides[0].partition("=")[0]
    with pytest.raises(RecipeError, check=saying("recipe/is-given-twice-it-is-the-same", before=before)):
        load_recipe("recipe.yaml", overrides)
    load_recipe("recipe.yaml", [overrides[0], overrides[0]])  # the control: the last of one name counts


def test_both_places_in_one_file_are_an_error_with_both_lines() -> None:
    Path("both.yaml").write_text(MINIMAL + "  noise_offset: 0\nobjective:\n  noise_offset: 0\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="both.yaml:9") as caught:
        load_recipe("both.yaml")
    assert wheres(caught) == ["both.yaml:7 train.noise_offset"]
    assert load_recipe("recipe.yaml", ["train.noise_offset=0", "objective.min_snr_gamma=5"]).recipe  # a control


@pytest.mark.parametrize(
    ("more", "where", "words"),
    [
        ("  min_snr_gamma: -1\n", "bad.yaml:7 train.min_snr_gamma", worded("recipe/at-least-0")),
        ("  min_snr_gamma: true\n", "bad.yaml:7 train.min_snr_gamma", worded("recipe/expected-a-number")),
        ("  min_snr_gamma: [1]\n", "bad.yaml:7 train.min_snr_gamma", worded("recipe/expected-a-number")),
        ("  min_snr_gama: 1\n", "bad.yaml:7 train.min_snr_gama", worded("recipe/objective-min-snr-gamma")),
        ("  min_snr_gamma: 1\nobjective: 3\n", "bad.yaml:8 objective", worded("recipe/a-section-with-keys")),
    ],
)
def test_an_error_at_an_old_place_names_that_place(more: str, where: str, words: Worded) -> None:
    Path("bad.yaml").write_text(MINIMAL + more, encoding="utf-8")
    with pytest.raises(RecipeError, check=saying(words)) as caught:
        load_recipe("bad.yaml")
    assert wheres(caught) == [where]


# kinds


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.family=sdlx", saying("recipe/no-such-model-family", "recipe/did-you-mean-sdxl")),
        (
            "model.family=chroma",
            saying("recipe/chroma-is-not-supported-yet", "recipe/families-that-can-be-trained", "recipe/sdxl"),
        ),
        (
            "model.family=Chroma1",
            saying("recipe/no-such-model-family", "recipe/did-you-mean-chroma", "recipe/it-is-not-supported-yet"),
        ),
        (
            "model.family=llama",
            saying("recipe/no-such-model-family", "recipe/families-that-can-be-trained", "recipe/sdxl"),
        ),
        ("model.family=[sdxl]", saying("recipe/expected-one-of", "recipe/sdxl-sd15-sd2-z-image-flux-anima")),
        ("lora.type=lokrr", saying("recipe/expected-one-of", "recipe/lora", "recipe/got-lokrr")),
        (
            "optim.optimizer=prodigyy",
            saying("recipe/expected-one-of", "recipe/adamw", "recipe/got-prodigyy", "recipe/did-you-mean-prodigy-2"),
        ),
    ],
)
def test_a_kind_that_does_not_exist(override: str, words: Saying) -> None:
    key = override.partition("=")[0]
    foreign = f"{key.partition('.')[0]}.a_key_of_it=1"
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipe.yaml", [override, foreign, "lora.rank=x"])
    assert [where.split()[-1] for where in wheres(caught) if "lora.rank" not in where] == [
        key,
        foreign.partition("=")[0],  # a key that no kind has
    ]
    (problem,) = [problem for problem in caught.value.problems if problem.where.endswith(key)]
    assert words(f"{problem.what} {problem.fix}")
    with pytest.raises(RecipeError, check=saying("recipe/no-such-key")):
        load_recipe("recipe.yaml", [foreign])


@pytest.mark.parametrize(
    ("child", "where", "words"),
    [
        ("base: child.yaml\n", "child.yaml:1 base", worded("recipe/its-own-base")),
        ("base: [x]\n", "child.yaml:1 base", worded("recipe/path-of-another-recipe")),
        ("base: nope.yaml\n", "child.yaml:1 base: nope.yaml", worded("recipe/no-such-file")),
        ("base: b.yaml\n", "b.yaml:1 base", worded("recipe/has-a-base-itself")),
        ("base: c.yaml\n", "c.yaml:8 lora.rank", worded("recipe/whole-number")),
        ("base: d.yaml\n", "child.yaml:1 base: d.yaml:1", worded("recipe/no-sections")),
    ],
)
def test_wrong_bases(child: str, where: str, words: Worded) -> None:
    Path("child.yaml").write_text(child, encoding="utf-8")
    Path("b.yaml").write_text("base: recipe.yaml\n" + MINIMAL, encoding="utf-8")
    Path("c.yaml").write_text(MINIMAL + "lora:\n  rank: x\n", encoding="utf-8")
    Path("d.yaml").write_text("- 1", encoding="utf-8")
    with pytest.raises(RecipeError, check=saying(words)) as caught:
        load_recipe("child.yaml")
    assert where in wheres(caught) and "is missing" not in str(caught.value)


def test_override_values_are_yaml() -> None:
    recipe = load_recipe(
        "recipe.yaml",
        ["lora.rank=8", "lora.alpha=", "sample.prompts=[a, b c]", "output.author=[x", "optim.learning_rate=2e-4"],
    ).recipe
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.sample.prompts) == (8, None, ("a", "b c"))
    assert (recipe.output.author, recipe.optim.learning_rate) == ("[x", 2e-4)


WINDOWS_PATH = "C:\\new\\table [1] & it's 50% #2"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (WINDOWS_PATH, WINDOWS_PATH),
        ("'" + WINDOWS_PATH.replace("'", "''") + "'", WINDOWS_PATH),  # as train.bat writes a dropped folder
        ("\\\\server\\share\\a #1", "\\\\server\\share\\a #1"),
        ("name  # 1", "name  # 1"),
        ('"tab\\tis read"', "tab\tis read"),
        ("a: b", None),  # a mapping: refused, not shortened
    ],
)
def test_text_of_an_override_is_taken_as_written(written: str, read: str | None) -> None:
    if read is None:
        with pytest.raises(RecipeError):
            load_recipe("recipe.yaml", [f"output.author={written}"])
        return
    assert load_recipe("recipe.yaml", [f"output.author={written}"]).recipe.output.author == read


def test_a_comment_in_a_file_is_one(in_folder: Path) -> None:
    (in_folder / "recipe.yaml").write_text(MINIMAL.replace("pics", "pics #2"), encoding="utf-8")
    assert load_recipe("recipe.yaml").recipe.data.path == str(in_folder / "pics")


@pytest.mark.parametrize(
    "override",
    ["lora.rank", "=3", "lora=3", "lora..rank=3", "lora.rank.x=3", "x.y=3", "lora.rank=x", "lora.rank=!!foo 3", "\0=1"],
)
def test_wrong_overrides(override: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipe.yaml", [override])
    assert all(where.startswith("--set") for where in wheres(caught))


def test_require_files_names_line_and_path(in_folder: Path) -> None:
    loaded = load_recipe("recipe.yaml", ["lora.init_from=x.safetensors"])
    with pytest.raises(RecipeError) as caught:
        loaded.require_files()
    assert wheres(caught) == ["recipe.yaml:4 data.path", "--set lora.init_from"]
    loaded.require_files(begun=True)
    (in_folder / "pics").mkdir()
    (in_folder / "x.safetensors").touch()
    loaded.require_files()


def test_files_and_folders_are_not_mixed_up(in_folder: Path) -> None:
    (in_folder / "file").touch()
    keys = ("model.config", "data.path", "cache.dir", "output.dir")
    loaded = load_recipe("recipe.yaml", [f"{key}=file{'/below' if key == 'cache.dir' else ''}" for key in keys])
    with pytest.raises(RecipeError) as caught:
        loaded.require_files()
    assert wheres(caught) == [f"--set {key}" for key in keys]
    assert all("file" in problem.what and problem.fix for problem in caught.value.problems)


# dump


def test_dump_reads_back_the_same(in_folder: Path) -> None:
    first = load_recipe(
        "recipe.yaml",
        ["output.author='1e-4'", 'output.license="yes: # no\\n\\tx"', "output.name=größe ✓", "optim.epsilon=1e-12"],
    ).recipe
    Path("out.yaml").write_text(dump_recipe(first), encoding="utf-8")
    assert load_recipe("out.yaml").recipe == first
    sources = load_recipe("recipe.yaml", ["data.sources=[{path: a, repeats: 3}, {dataset: some/hub}]"]).recipe
    Path("out.yaml").write_text(dump_recipe(sources), encoding="utf-8")
    assert load_recipe("out.yaml").recipe == sources


@pytest.mark.parametrize("letter", ["\x85", "\u2028", "\u2029", "\ufeff", "\xa0", "\t", "\n", " "])
@pytest.mark.parametrize("place", ["model.name_or_path", "output.author", "lora.targets", "data.sources"])
def test_dump_reads_back_letters_that_yaml_takes_for_others(in_folder: Path, letter: str, place: str) -> None:
    text = json.dumps(f"{{a{letter}b")
    value = {"lora.targets": f"[{text}]", "data.sources": f"[{{path: {text}}}]"}.get(place, text)
    try:
        recipe = load_recipe("recipe.yaml", [f"{place}={value}"]).recipe
    except RecipeError as error:  # a place may refuse it, in words
        assert error.problems
        return
    Path("out.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe("out.yaml").recipe == recipe


@pytest.mark.parametrize(
    ("system", "twice", "said"), [("win32", "false", True), ("win32", "true", False), ("linux", "false", False)]
)
def test_workers_on_windows_are_asked_for_twice(
    system: str, twice: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    loaded = load_recipe("demo.yaml", ["runtime.workers=2", f"runtime.workers_on_windows={twice}"])
    assert says_if(said, loaded.notices, "recipe/counts-as-0-on-windows")


def test_names_of_other_trainers_are_read_only_where_a_name_is_no_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their table takes as long to read as a recipe."""
    asked: list[None] = []
    read = kinds.peer_names
    monkeypatch.setattr(kinds, "peer_names", lambda: (asked.append(None), read())[1])
    path = next(iter(shipped_recipes().values()))
    load_recipe(path)
    assert not asked
    with pytest.raises(RecipeError, match="optimizer_type"):
        load_recipe(path, ["train.optimizer_type=prodgy"])
    assert asked


def text_keys() -> list[str]:
    """Every ``section.key`` that takes one text and nothing else."""
    recipe, found = kinds.kinds_of({}).recipe, []
    for key in all_keys(recipe):
        section, _, name = key.partition(".")
        owner = section_class(recipe.model_fields[section].annotation)
        annotation = owner.model_fields[name].annotation if owner and name else None
        is_text = set(_leaf_types(annotation)) in ({str}, {str, type(None)})
        found += [key] if is_text and "tuple" not in str(annotation) else []
    return found


@pytest.mark.parametrize("written", ["007", "1_000", "0x1F", "1e3", "00.50", "true", "FALSE", "12345678901234567890"])
@pytest.mark.parametrize("in_file", [True, False])
def test_a_text_that_reads_as_a_number_is_quoted_as_it_is_written(written: str, in_file: bool) -> None:
    keys = text_keys()
    assert {"output.name", "data.trigger_word", "model.name_or_path", "cache.dir"} <= set(keys)
    sets = [f"{key}={written}" for key in keys]
    if in_file:
        sections: dict[str, str] = {}
        for section, name in (key.split(".") for key in keys):
            sections[section] = sections.get(section, f"{section}:\n") + f"  {name}: {written}\n"
        sections["train"] = sections.get("train", "train:\n") + "  max_train_steps: 1\n"
        Path("texts.yaml").write_text("".join(sections.values()), encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe("texts.yaml", []) if in_file else load_recipe("recipe.yaml", sets)
    fixes = {problem.where.rpartition(" ")[2]: problem.fix for problem in caught.value.problems}
    assert {key for key, fix in fixes.items() if mentions(fix, "recipe/in-quotes-written", written=written)} == set(
        keys
    )


def test_what_is_no_text_is_not_quoted() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipe.yaml", ["output.name=[7]", "lora.rank=no", "output.author={a: 7}"])
    assert not [problem for problem in caught.value.problems if "quote it" in problem.fix]
    load_recipe("recipe.yaml", ['output.name="007"', "output.author=null", "output.license=Yes"])


def test_a_folder_of_images_in_place_of_a_recipe_gets_the_command(tmp_path: Path) -> None:
    (tmp_path / "my pics").mkdir()
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "my pics")
    words = shlex.split(caught.value.problems[0].fix.partition("images: ")[2])
    assert words[:2] == ["lora-rocm", "train"] and words[3] == "--set"
    assert load_recipe(words[2], words[4:]).recipe.data.path == str(tmp_path / "my pics")


@pytest.mark.parametrize("holds", ["images", "recipes", "a run"])
def test_a_folder_in_place_of_a_recipe_is_answered_by_a_whole_command(tmp_path: Path, holds: str) -> None:
    folder = tmp_path / "my folder"
    folder.mkdir()
    names = {"images": ["a.png"], "recipes": ["b.yaml", "a.yaml"], "a run": ["recipe.yaml", "events.jsonl"]}[holds]
    for name in names:
        (folder / name).touch()
    with pytest.raises(RecipeError) as caught:
        load_recipe(folder)
    (problem,) = caught.value.problems
    command = "resume" if holds == "a run" else "train"
    words = shlex.split(problem.fix[problem.fix.index(f"lora-rocm {command}") :])
    assert words[:2] == ["lora-rocm", command] and "RECIPE" not in words
    assert (
        words[2:]
        == {
            "images": ["sdxl.yaml", "--set", f'data.path="{folder}"'],
            "recipes": [str(folder / "a.yaml")],
            "a run": [str(folder)],
        }[holds]
    )
