"""Checks whether the weights of one component can be trained on, using only its config and the files' headers."""

from __future__ import annotations

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.errors import ModelError
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.model_files import storage_formats

MAX_NAMED = 3


def check_component(source: BaseSource, name: str, fix: str) -> str:
    """Refuse a component with weights that do not match its config. Returns a notice, or an empty string.

    Args:
        source: the base.
        name: name of the component.
        fix: advice for a base with tensors that its config does not describe.

    Raises:
        ModelError: weights-unfit, weights-unknown, weights-quantised or config-absurd, or a config or header cannot be
            read.
    """
    headers, _ = source.weights(name)
    storage_formats.refuse_quantised_config(source.config_path(name), source.config(name).values)
    for header in headers:
        storage_formats.refuse_scaled(header.path, header.tensors)
    found = source.predict_loading(name)
    where = headers[0].path
    if found.unread:
        given = source.place(name).startswith(f"model.{name}:")
        named = ", ".join(printable(key)[:200] for key in found.unread[:MAX_NAMED])
        count = "1 tensor" if len(found.unread) == 1 else f"{len(found.unread)} tensors"
        raise ModelError(
            "weights-unknown",
            f"The {name} has {count} that its config does not describe: {named}. Training without "
            "them would train a different model.",
            where=source.place(name) if given else str(where),
            fix=f"Use the {name} that belongs to this model." if given else fix,
        )
    tensors, read = source.tensors(name), set().union(*found.made_of.values())
    storage_formats.refuse_whole_numbers(where, tensors.entries, read - found.codes)
    rounded = storage_formats.rounding(name, [tensors.entries[key] for key in read])
    return rounded or storage_formats.scales_notice(name, tensors.stored_formats)
