"""Rules about the run's length, batches and machine, and about keys without effect unless another key is set."""

from __future__ import annotations

from lora_rocm.recipe.rule import RecipeRule, exactly_one, not_both

VALIDATION = ("train.validation_every_n_steps", "train.validation_every_n_epochs")
MANY_CAPTIONS = tuple(
    f"data.{name}" for name in ("shuffle_caption", "caption_tag_dropout_rate", "enable_wildcard", "sources")
)


def _alone(key: str, others: tuple[str, ...], off: str) -> RecipeRule:
    """Return a rule against a key that has no effect because none of ``others`` is set.

    The rule does not apply if the user has written one of ``others`` as off (false, 0 or []). Such a user has switched
    the feature off and keeps its settings.

    Args:
        key: the key without effect.
        others: at least one of these keys must be set.
        off: default of the first of ``others``, as YAML.
    """
    named = " or ".join(others)
    return RecipeRule(
        f"alone:{key}",
        (key, *others),
        lambda value, *others: bool(value) and not any(others),
        f"this does nothing without {named}",
        f"Set {named}, or remove this key. To keep it for later, write {others[0]}: {off}.",
        at=key,
        only_if_set=True,
        unless_written=others,
    )


ALONE: tuple[RecipeRule, ...] = (
    _alone("optim.text_encoder_learning_rate", ("lora.train_text_encoder", "lora.new_tokens"), "false"),
    _alone("optim.embedding_learning_rate", ("lora.new_tokens",), "[]"),
    *(_alone(key, ("data.validation_split", "data.watched"), "0.0") for key in VALIDATION),
    _alone("data.watched", VALIDATION, "0"),
    *(_alone(f"data.{key}", MANY_CAPTIONS, "false") for key in ("keep_tokens", "caption_variants")),
    # `compare --prompt` uses the other keys of sample too
    *(
        _alone(f"sample.{key}", ("sample.prompts",), "[]")
        for key in ("every_n_steps", "every_n_epochs", "control_prompts")
    ),
    *(_alone(f"runtime.{key}", ("runtime.workers",), "0") for key in ("worker_timeout_s", "persistent_workers")),
    _alone("output.log_project", ("output.log_with",), "[]"),
)

RULES: tuple[RecipeRule, ...] = (
    *exactly_one("train.max_train_steps", "train.epochs"),
    not_both(*VALIDATION),
    not_both("sample.every_n_steps", "sample.every_n_epochs"),
    not_both("output.save_every_n_steps", "output.save_every_n_epochs"),
    RecipeRule(
        "a-source-has-no-larger-batches",
        ("data.sources[each].max_batch_size", "train.batch_size"),
        lambda own, batch_size: (own or 0) > batch_size,
        "max_batch_size of this source is above train.batch_size, which is {1}",
        "Lower it, or raise train.batch_size.",
        at="data.sources[each].max_batch_size",
    ),
    RecipeRule(
        "compiled-for-gpus",
        ("runtime.device", "runtime.compile"),
        lambda device, compile: device == "cpu" and compile in ("regional", "full"),
        "torch.compile is for GPUs, but runtime.device is cpu",
        "Remove compile, or device: cpu.",
        at="runtime.compile",
    ),
    RecipeRule(
        "activations-are-kept-or-recomputed",
        ("runtime.memory", "train.gradient_checkpointing"),
        lambda memory, recomputes: recomputes and memory in ("keep", "selective"),
        "{0} keeps activations, but train.gradient_checkpointing recomputes all of them",
        "Remove one of them.",
        at="runtime.memory",
    ),
    *ALONE,
)
