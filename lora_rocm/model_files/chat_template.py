"""Whether a folder of a language model has a chat template, found without loading its tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

from lora_rocm.foundation.bounded_read import read_plain

OWN_FILE, CONFIG, KEY = "chat_template.jinja", "tokenizer_config.json", b'"chat_template"'
MAX_CONFIG_BYTES = 1 << 24


def lacks_chat_template(model: str) -> bool:
    """Whether a folder on this machine has a tokenizer's configuration and no chat template. False if unknown.

    ``model``: a folder or another name of a model, such as a hub id.
    """
    folder = Path(os.path.expanduser(model))
    if (folder / OWN_FILE).is_file():
        return False
    try:
        return KEY not in read_plain(folder / CONFIG, MAX_CONFIG_BYTES)
    except OSError:
        return False
