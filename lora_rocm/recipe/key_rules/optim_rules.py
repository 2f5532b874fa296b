"""Rules about the keys of ``optim``, some in combination with the trained weights."""

from __future__ import annotations

from lora_rocm.recipe.optim_sections import OPTIMIZERS, READ_BY_SCHEDULE, OptimSection
from lora_rocm.recipe.rule import Breach, RecipeRule, not_both

OPTIMIZER = "optim.optimizer"
UNTIL = ("embedding_until_step", "embedding_until_ratio")


def _averages(optimizer: str) -> bool:
    return OPTIMIZERS[optimizer].averages


def _unfit_weights(optimizer: str, dtype: str) -> list[Breach]:
    dtypes = OPTIMIZERS[optimizer].weight_dtypes
    others = [name for name, section in OPTIMIZERS.items() if dtype in section.weight_dtypes]
    return [] if dtype in dtypes else [{"usual": dtypes[0], "others": ", ".join(others)}]


RULES: tuple[RecipeRule, ...] = (
    not_both("optim.lr_warmup_steps", "optim.lr_warmup_ratio"),
    not_both("optim.embedding_until_step", "optim.embedding_until_ratio"),
    # The schedule
    *(
        RecipeRule(
            f"schedule-reads:{key}",
            (f"optim.{key}", "optim.lr_scheduler"),
            lambda _, scheduler, readers=readers: scheduler not in readers,
            f"{key} is not read with lr_scheduler: {{1}}",
            f"Remove it, or set lr_scheduler to {' or '.join(readers)}.",
            at=f"optim.{key}",
            only_if_set=True,
            is_idle=True,
        )
        for key, readers in READ_BY_SCHEDULE.items()
    ),
    RecipeRule(
        "no-effect:optim.lr_warmup_from_zero,lr_warmup_steps",
        ("optim.lr_warmup_from_zero", "optim.lr_warmup_steps", "optim.lr_warmup_ratio"),
        lambda _, steps, ratio: not steps and not ratio,
        "has no effect without a warm-up",
        "Remove it, or set lr_warmup_steps.",
        at="optim.lr_warmup_from_zero",
        only_if_set=True,
        is_idle=True,
    ),
    RecipeRule(
        "average-needs-a-first-rate",
        (OPTIMIZER, "optim.lr_warmup_from_zero"),
        lambda optimizer, from_zero: _averages(optimizer) and from_zero,
        "{0} weights each update by its learning rate, so the first one cannot be 0",
        "Remove lr_warmup_from_zero; a warm-up is fine.",
        at="optim.lr_warmup_from_zero",
    ),
    RecipeRule(
        "average-in-place-of-schedule",
        (OPTIMIZER, "optim.lr_scheduler"),
        lambda optimizer, scheduler: _averages(optimizer) and scheduler != "constant",
        "{0} averages weights in place of a schedule, but lr_scheduler is {1}",
        "Remove lr_scheduler; a warm-up is fine.",
        at="optim.lr_scheduler",
        is_idle=True,
    ),
    RecipeRule(
        "warmup-init-needs-relative-step",
        ("optim.warmup_init", "optim.relative_step"),
        lambda warmup_init, relative_step: warmup_init and not relative_step,
        "warmup_init does nothing without relative_step",
        "Set relative_step: true.",
        at="optim.warmup_init",
        is_idle=True,
    ),
    *(
        RecipeRule(
            f"relative-step-has-its-rate:{name}",
            (f"optim.{name}", "optim.relative_step"),
            lambda _, relative_step: relative_step,
            f"{name} is not read with relative_step, which has its own rate",
            f"Remove {name}, or set relative_step: false.",
            at=f"optim.{name}",
            only_if_set=True,
            is_idle=True,
        )
        for name in OptimSection.model_fields
        if name.startswith("lr_") or name.endswith("learning_rate")
    ),
    # The trained weights
    RecipeRule(
        "average-is-the-result",
        (OPTIMIZER, "train.ema_decay"),
        lambda optimizer, decay: _averages(optimizer) and bool(decay),
        "{0} already averages the weights, and its average is the result",
        "Remove train.ema_decay.",
        at="train.ema_decay",
    ),
    RecipeRule(
        "average-is-not-scaled",
        (OPTIMIZER, "lora.scale_weight_norms"),
        lambda optimizer, norm: _averages(optimizer) and norm is not None,
        "{0} cannot be used with it: it averages the weights, and the average would not be scaled down",
        "Remove it, or use another optimizer.",
        at="lora.scale_weight_norms",
    ),
    *(
        RecipeRule(
            f"relative-step-reads-no-rates:{key}",
            (OPTIMIZER, "optim.relative_step", f"lora.{key}"),
            lambda _, relative_step, rates, sets=sets: relative_step and sets(rates),
            "{0} with relative_step does not read the learning rates in lora",
            "Set it to false, or remove loraplus_lr_ratio and learning_rate from lora.",
            at="optim.relative_step",
        )
        for key, sets in (("loraplus_lr_ratio", lambda ratio: ratio != 1.0), ("overrides[all].learning_rate", any))
    ),
    RecipeRule(
        "optimizer-fits-weights",
        (OPTIMIZER, "lora.weight_dtype"),
        _unfit_weights,
        "{0} does not support lora.weight_dtype: {1}",
        "Set lora.weight_dtype: {usual}, or use another optimizer: {others}.",
        at=OPTIMIZER,
    ),
    *(
        RecipeRule(
            f"average-after:{key}",
            (OPTIMIZER, f"optim.{key}"),
            lambda optimizer, until: _averages(optimizer) and bool(until),
            f"{{0}} averages the weights even after {key}, so the new tokens would still change",
            "Use another optimizer, or remove it.",
            at=f"optim.{key}",
        )
        for key in UNTIL
    ),
    *(
        RecipeRule(
            f"new-tokens-are-there:{key}",
            (f"optim.{key}", "lora.new_tokens"),
            lambda until, tokens: bool(until) and not tokens,
            "has no effect without new tokens",
            "Remove it, or set lora.new_tokens.",
            at=f"optim.{key}",
            is_idle=True,
        )
        for key in UNTIL
    ),
)
