"""Did-you-mean."""

import pytest

from lora_rocm.recipe.schema import LoraSection, Recipe, TrainSection
from lora_rocm.recipe.suggest import NOT_NEEDED, OTHER_NAMES, all_keys, suggest

TOP = list(Recipe.model_fields)
LORA = list(LoraSection.model_fields)
TRAIN = list(TrainSection.model_fields)


def test_the_table_points_at_keys_that_exist() -> None:
    assert set(OTHER_NAMES.values()) <= set(all_keys())


def test_the_table_does_not_hide_a_key_of_ours() -> None:
    leaves = {key.rpartition(".")[2] for key in all_keys()}
    hidden = {name for name in (*OTHER_NAMES, *NOT_NEEDED) if name in leaves}
    assert not hidden - {"sample_prompts"}


@pytest.mark.parametrize(
    ("name", "siblings", "section", "answer"),
    [
        ("network_dim", TOP, "", "Did you mean lora.rank? (Other trainers call it network_dim.)"),
        ("unet_lr", TRAIN, "train", "Did you mean optim.learning_rate? (Other trainers call it unet_lr.)"),
        ("snr_gamma", TRAIN, "train", "Did you mean train.min_snr_gamma? (Other trainers call it snr_gamma.)"),
        ("learning_rate", TRAIN, "train", "Did you mean optim.learning_rate?"),
        ("seed", LORA, "lora", "Did you mean train.seed or sample.seed?"),
        ("rnk", LORA, "lora", "Did you mean lora.rank?"),
        ("Rank", LORA, "lora", "Did you mean lora.rank?"),
        ("use-dora", LORA, "lora", "Did you mean lora.use_dora?"),
        ("num_repeats", ["path", "repeats"], "data.sources[0]", "Did you mean data.sources[0].repeats?"),
        ("max_train_step", LORA, "lora", "Did you mean train.max_train_steps?"),
        ("cache_latents", TOP, "", NOT_NEEDED["cache_latents"]),
        ("zzz", ["a", "b"], "lora", "Keys of lora: a, b."),
        ("zzz", ["a", "b"], "", "Keys at the top: a, b."),
    ],
)
def test_suggestions(name: str, siblings: list[str], section: str, answer: str) -> None:
    assert suggest(name, siblings, section).startswith(answer)
