"""Reads tokenizer files, explains errors in them, and computes their identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.errors import ModelError
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.model_files.config_file import NAMES, json_fault, read_config

CLIP_LARGEST_ID = 2
"""The value of ``eos_token_id`` with which CLIP pools at the position of the largest id."""
READING_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, StrictDataclassError)
"""Errors while reading a tokenizer. transformers also reads config.json in the tokenizer's folder, which may raise the
last one.
"""
READ_AS_JSON = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    "config.json",
)
"""Files that libraries read to load a tokenizer. Each contains a JSON object."""


Tokenizer = Any  # untyped: transformers' classes share no typed interface
LoadTokenizer = Callable[[Path], Tokenizer]
"""Loads the tokenizer of a folder."""


class Explained:
    """A context that translates exceptions from reading a tokenizer into a ``ModelError``.

    The tokenizers library raises a plain ``Exception`` for a file that it does not understand, and PanicException for
    unexpected content.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and (
            kind is Exception or kind.__name__ == "PanicException" or issubclass(kind, READING_ERRORS)
        ):
            raise _explained(self._folder) from error


def _explained(folder: Path) -> ModelError:
    """Return the error for an unreadable tokenizer. It names the damaged file if one is found."""
    for path in (folder / name for name in READ_AS_JSON):
        if path.exists() and (fault := json_fault(path, path.stat().st_size)):
            return unreadable(path, f"In one of its files, {fault}.")
    whole = folder / "tokenizer.json"
    for key, wanted in (("model", dict), ("added_tokens", list)) if whole.exists() else ():
        if not isinstance(parse_json(whole.read_bytes()).get(key), wanted):
            return unreadable(whole, f"The file does not have {NAMES[wanted]} {key}.")
    for path in (*sorted(folder.glob("*.jinja")), *sorted(folder.glob("*/*.jinja")), *sorted(folder.glob("*.txt"))):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            return unreadable(path, f"In one of its files, byte {error.start + 1} is not UTF-8 text.")
        except OSError as error:
            return unreadable(path, f"One of its files cannot be read: {error.strerror}.")
    if whole.exists():
        return unreadable(whole, "The file is damaged, or has a format that the tokenizers library cannot read.")
    return unreadable(
        folder, "There is no tokenizer.json, and the other files in this folder are not sufficient for a tokenizer."
    )


def unreadable(where: Path, what: str) -> ModelError:
    """Return the error for an unreadable tokenizer. ``where``: one of its files, or its folder."""
    return ModelError(
        "tokenizer-unreadable",
        f"The tokenizer cannot be read. {what}",
        where=str(where),
        fix="Download the tokenizer's files again.",
    )


def require_rows(tokenizer: Any, source: BaseSource, name: str, spare_unwritten: bool = False) -> None:
    """Refuse a tokenizer with ids beyond the model's embedding table.

    On a GPU, such an id would end the process.

    Args:
        tokenizer: the tokenizer. Its vocabulary, added tokens, and tokens that it adds around a text are checked.
        source: the base.
        name: name of the tokenizer in the base.
        spare_unwritten: whether special tokens may lack a row if neither the chat template nor the model writes them.
            Published models have such placeholders (Gemma 3 1B). The caller has to refuse texts that contain them.

    Raises:
        ModelError: tokenizer-unfit.
    """
    rows = source.table_rows(name)
    _require_end(tokenizer, source, name, rows)
    beyond = ids_beyond(tokenizer, rows)
    if spare_unwritten:
        spared = _unwritten(tokenizer)
        beyond = {token: number for token, number in beyond.items() if token not in spared}
    if not beyond:
        return
    token, largest = max(beyond.items(), key=lambda item: item[1])
    more = f", and {len(beyond) - 1} more tokens with too large ids" if len(beyond) > 1 else ""
    raise ModelError(
        "tokenizer-unfit",
        f"The tokenizer has the token {printable(repr(token))[:80]} with the id {largest}{more}, "
        f"but the embedding table of the {source.layout.tokenizers[name].component} has only "
        f"{rows} rows (ids 0 to {rows - 1}).",
        where=str(source.tokenizer_path(name)),
        fix="Use the tokenizer that belongs to this model, or the version of the model with a larger embedding table.",
    )


def _require_end(tokenizer: Any, source: BaseSource, name: str, rows: int) -> None:
    """Refuse a CLIP text encoder that expects a different end token than its tokenizer writes.

    CLIPTextModel pools at the first ``eos_token_id``. If ``eos_token_id`` is 2, as in many published configs, it pools
    at the largest id (transformers' modeling_clip.py). If the text does not contain the id, it pools at the first
    position.

    Raises:
        ModelError: config-unreadable, tokenizer-unfit.
    """
    of = source.layout.tokenizers[name]
    cls, config = source.layout.parts[of.component].cls, source.config(of.component)
    if not issubclass(cls, CLIPTextModel | CLIPTextModelWithProjection):
        return
    end = config.whole("eos_token_id", CLIPTextConfig().eos_token_id, least=0)
    if of.pools and end not in (CLIP_LARGEST_ID, tokenizer.eos_token_id):
        raise ModelError(
            "tokenizer-unfit",
            f"The {of.component} expects the id {end} at the end of a text, but its tokenizer writes "
            f"{tokenizer.eos_token_id}. So the pooled embedding would come from the wrong position.",
            where=f"{config.path}: eos_token_id",
            fix=f"Set eos_token_id to {tokenizer.eos_token_id} in this file, or download the model again.",
        )


def ids_beyond(tokenizer: Any, rows: int) -> dict[str, int]:
    """Return the tokens with ids that have no row in a table of ``rows`` rows, and these ids."""
    given: dict[str, int] = dict(tokenizer.get_vocab())
    given |= {str(added): int(number) for number, added in tokenizer.added_tokens_decoder.items()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and backend.post_processor is not None:
        given |= {f"token {number} of the post-processor": number for number in _written_around(backend.post_processor)}
    return {token: number for token, number in given.items() if number >= rows}


def _written_around(post_processor: Any) -> Iterator[int]:
    """Yield the ids that a post-processor adds around a text, read from its JSON."""
    parts: list[Any] = [json.loads(post_processor.__getstate__())]  # json: a library prints it
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            parts += [value for key, value in part.items() if key not in ("cls", "sep")]
            parts += [{"ids": [pair[1]]} for key in ("cls", "sep") if (pair := part.get(key))]
            yield from (number for number in part.get("ids") or () if isinstance(number, int))
        parts += part if isinstance(part, list) else []


def _unwritten(tokenizer: Any) -> set[str]:
    """Return the special tokens that only a text can contain.

    No chat template contains them, and the tokenizer does not use them as begin, end or similar tokens.
    """
    templates = tokenizer.chat_template
    named = "".join(templates.values()) if isinstance(templates, dict) else str(templates or "")
    roles = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.cls_token, tokenizer.sep_token}
    special = {str(added) for added in tokenizer.added_tokens_decoder.values() if added.special}
    return {token for token in special - roles if token not in named}


def tokenizer_identity(source: BaseSource, names: Sequence[str]) -> str:
    """Return a SHA-256 digest of the files of the named tokenizers."""
    folders = [source.tokenizer_path(name) for name in names]
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    return digest([f"{path.parent.name}/{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files])


def digest(parts: Sequence[str]) -> str:
    """Return a SHA-256 digest of several texts."""
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()


def load_tokenizer(folder: Path) -> Any:
    """Load a tokenizer from a local folder.

    Raises:
        ModelError: tokenizer-unreadable, or custom-code if transformers has no class for the tokenizer.
    """
    try:
        with Explained(folder):
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            token_ids(tokenizer, "a")
    except ModelError as error:
        config = folder / "tokenizer_config.json"
        if not config.exists() or "auto_map" not in read_config(config):
            raise
        raise ModelError(
            "custom-code",
            "This tokenizer comes with its own code, which would run with all your permissions, so it is not loaded.",
            where=f"{config}: auto_map",
            fix="Use a tokenizer of a class that is part of transformers.",
        ) from error
    return tokenizer


@dataclass(frozen=True)
class Limited:
    """Loads a tokenizer that truncates and pads to this number of tokens."""

    tokens: int

    def __call__(self, folder: Path) -> Tokenizer:
        tokenizer = load_tokenizer(folder)
        tokenizer.model_max_length = self.tokens
        return tokenizer


def shared_tokenizer(load: LoadTokenizer, folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder, which is loaded once while its files stay the same.

    A start needs each tokenizer three times: to count tokens, to check the base, and to encode. All share the object,
    so they must not change it.
    """
    try:
        files = tuple(FileVersion.of(path) for path in sorted(folder.rglob("*")) if path.is_file())
    except OSError:  # loading explains it
        return load(folder)
    return _loaded(load, folder, files)


@lru_cache(maxsize=8)
def _loaded(load: LoadTokenizer, folder: Path, files: tuple[FileVersion, ...]) -> Tokenizer:
    return load(folder)


def token_ids(tokenizer: Any, text: str) -> Tensor:
    """Return the token ids of a text, int64 [S], neither padded nor truncated."""
    ids_S: Tensor = tokenizer(text, return_tensors="pt").input_ids[0]
    return ids_S


def token_limit(tokenizer: Any, template: str, max_tokens: int) -> TokenLimit:
    """Return the tokenizer and the number of caption tokens that fit after the beginning of the template."""
    begin = len(token_ids(tokenizer, template.partition("{}")[0]))
    return TokenLimit(tokenizer.backend_tokenizer.to_str(), max_tokens - begin)
