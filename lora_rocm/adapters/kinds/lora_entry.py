"""The LoRA (or DoRA) of one module as values, and its file format."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lora_rocm.adapters.entry import (
    ARITHMETIC,
    CANCELLATION,
    Entry,
    FileKind,
    FileModule,
    Form,
    file_error,
    norm_of,
    other_shape,
    product_of,
    rounded,
)
from lora_rocm.model_files.adapter_parts import kind_named


@dataclass
class LoraEntry(Entry):
    """One module's low-rank update, ``scale * up @ down``: float32 on the CPU.

    down: matrix A, of shape [r, in] or [r, in, kh, kw].
    up: matrix B, of shape [out, r] or [out, r, 1, 1].
    scale: factor of the product (alpha / rank, or alpha / sqrt(rank) for rsLoRA).
    magnitude: magnitudes [out] of a DoRA that normalises each output's row, or None.
    input_magnitude: magnitudes [in] of a DoRA that normalises each input's column, or None. OneTrainer does so by
        default, and LyCORIS with wd_on_output=False.
    """

    down: Tensor
    up: Tensor
    scale: float
    magnitude: Tensor | None = None
    input_magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def needs_weight(self) -> bool:
        return self.magnitude is not None or self.input_magnitude is not None

    def update(self) -> Tensor:
        """Return the update, in the weight's shape. It is added to the weight before DoRA's normalisation."""
        product = (self.scale * self.up.flatten(1)) @ self.down.flatten(1)
        return product.reshape(self.up.shape[0], *self.down.shape[1:])

    def effect(self, weight: Tensor) -> Tensor:
        """Return the weight's total change: ``update``, or for a DoRA ``m * (W + update) / ||W + update|| - W``.

        Args:
            weight: the base weight W, float32. The norm is computed per output row, or per input column if the
                magnitudes are per input. (DoRA, arXiv 2402.09353, eq. 5, normalises one axis; programs differ in which
                one.)
        """
        if self.input_magnitude is not None:
            shape = (1, -1, *[1] * (weight.ndim - 2))
            return (weight + self.update()) * self.input_scale(weight).view(shape) - weight
        if self.magnitude is None:
            return self.update()
        moved = weight + self.update()
        shape = (-1, *[1] * (weight.ndim - 1))
        change: Tensor = moved * (self.magnitude / moved.flatten(1).norm(dim=1)).view(shape) - weight
        return change

    def input_scale(self, weight: Tensor) -> Tensor:
        """Return ``input_magnitude / ||W + update||``, [in], for a DoRA that normalises each input's column."""
        assert self.input_magnitude is not None, "a DoRA with magnitudes per input"
        norm = (weight + self.update()).transpose(0, 1).flatten(1).norm(dim=1)
        scale: Tensor = self.input_magnitude / (norm + torch.finfo(norm.dtype).eps)  # ComfyUI and LyCORIS add it, too
        return scale

    def norm(self) -> float:
        """Return the Frobenius norm of ``update``, computed from the small Gram matrices of its factors."""
        up, down = self.scale * self.up.flatten(1), self.down.flatten(1)
        return math.sqrt(max(0.0, float(((up.T @ up) * (down @ down.T)).sum())))

    def additive(self) -> LoraEntry:
        return replace(self, magnitude=None, input_magnitude=None)

    def difference(self, other: Entry) -> Tensor:
        """Return ``other.update() - self.update()``.

        U2 V2 - U1 V1 is computed as (U2 - U1) V2 + U1 (V2 - V1), which avoids cancellation.
        """
        if not isinstance(other, LoraEntry) or (other.up.shape, other.down.shape) != (self.up.shape, self.down.shape):
            return super().difference(other)
        ours, theirs = self.scale * self.up.flatten(1), other.scale * other.up.flatten(1)
        down, moved = self.down.flatten(1), other.down.flatten(1)
        return torch.cat([theirs - ours, ours], dim=1) @ torch.cat([moved, moved - down])

    def allowance(self, dtype: torch.dtype, weight: Tensor | None = None) -> float:
        """Return a first-order bound of the product's error.

        For a DoRA, it is multiplied by magnitude / norm to bound the error of the scaled product. This is doubled to
        cover the norm's error as well.
        """
        size, off = product_of(rounded(self.down, dtype), rounded(self.up, dtype))
        bound = abs(self.scale) * (off + ARITHMETIC * size)
        if self.magnitude is None or weight is None:
            return bound
        norms = (weight + self.update()).flatten(1).norm(dim=1)
        stretch = float((self.magnitude / norms).abs().nan_to_num(posinf=0.0).max())
        return 2 * stretch * bound + CANCELLATION * (norm_of(weight) + norm_of(self.magnitude))

    def of_base_norm(self, weight: Tensor) -> LoraEntry:
        """Return an entry with the same effect for programs that take DoRA's norm from the base weight (ComfyUI).

        ComfyUI computes ``m * (W + update) / ||W||`` (``comfy/weight_adapter/base.py``). So this method multiplies
        ``m`` by ``||W|| / ||W + update||``.

        Args:
            weight: the base weight W, float32.
        """
        if self.magnitude is None:
            return self
        ratio_O = weight.flatten(1).norm(dim=1) / (weight + self.update()).flatten(1).norm(dim=1)
        return replace(self, magnitude=self.magnitude * ratio_O)

    def tensors(self, file_format: Form, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of a file, keyed by name suffix.

        In a kohya file alpha is ``scale * rank``, so that alpha / rank is the trained scale, even for rsLoRA. In a PEFT
        file magnitudes have the shape of PEFT's layers: [1, out, 1, 1] for a convolution.
        """
        if file_format == "kohya":
            found = {"lora_down.weight": self.down.to(dtype), "lora_up.weight": self.up.to(dtype)}
            found["alpha"] = torch.tensor(self.scale * self.rank, dtype=torch.float32)
            if self.magnitude is not None:
                found["dora_scale"] = self.magnitude.reshape(-1, *[1] * (self.down.ndim - 1))
            return found
        if file_format == "folded" and self.scale != 1.0:
            return self.folded().tensors(file_format, dtype)
        found = {"lora_A.weight": self.down.to(dtype), "lora_B.weight": self.up.to(dtype)}
        if self.magnitude is not None and file_format == "folded":
            found["dora_scale"] = self.magnitude.reshape(-1, *[1] * (self.down.ndim - 1))
        elif self.magnitude is not None:
            shape = (1, -1, *[1] * (self.down.ndim - 2)) if self.down.ndim > 2 else (-1,)
            found["lora_magnitude_vector"] = self.magnitude.reshape(shape)
        return found

    def with_scale(self, scale: float) -> LoraEntry:
        """Return an entry with the same update but another scale; ``up`` is changed accordingly."""
        return replace(self, up=self.up * (self.scale / scale), scale=scale)

    def folded(self) -> LoraEntry:
        return self.with_scale(1.0)

    def of_rank(self, rank: int) -> LoraEntry:
        """Return a folded entry (scale 1) with the same effect, with its factors padded with zeros to a higher rank."""
        more, entry = rank - self.rank, self.folded()
        down = torch.cat([entry.down, entry.down.new_zeros(more, *entry.down.shape[1:])])
        up = torch.cat([entry.up, entry.up.new_zeros(len(entry.up), more, *entry.up.shape[2:])], dim=1)
        return replace(entry, down=down, up=up)

    def rows(self, first: int, count: int) -> LoraEntry:
        """Return an entry with these rows of ``up`` and only the ranks that these rows use (at least one).

        On the meta device the values are unknown, so all ranks are kept.
        """
        if (first, count) == (0, len(self.up)):
            return self
        if self.input_magnitude is not None:
            raise ValueError("a DoRA with one magnitude per input cannot be split into modules")
        part = slice(first, first + count)
        magnitude = None if self.magnitude is None else self.magnitude[part]
        if self.up.is_meta:
            return replace(self, up=self.up[part], magnitude=magnitude)
        used_R = self.up[part].flatten(1).any(dim=0)
        used_R[0] |= not used_R.any()
        return replace(self, down=self.down[used_R], up=self.up[part][:, used_R], magnitude=magnitude)

    def joined(self, parts: Sequence[tuple[int, Entry]], rows: int) -> LoraEntry:
        """Return the entry of a weight, joined from its parts.

        If all parts have the same ``down``, it is shared. Otherwise the ranks are concatenated, and ``up`` becomes
        block-diagonal. On the meta device the values are unknown, so the parts of several modules count as different.
        """
        found = [(first, entry) for first, entry in parts if isinstance(entry, LoraEntry)]
        if len(found) == 1 and len(self.up) == rows:
            return self
        if any(entry.input_magnitude is not None for _, entry in found) or len(found) != len(parts):
            raise ValueError("these modules cannot be written as one weight")
        with_magnitude = [entry.magnitude for _, entry in found if entry.magnitude is not None]
        if with_magnitude and (len(with_magnitude) < len(found) or sum(map(len, with_magnitude)) < rows):
            raise ValueError("only some of these modules have DoRA magnitudes, so they cannot be written as one weight")
        shared = all(
            entry.down is self.down or (not self.down.is_meta and torch.equal(entry.down, self.down))
            for _, entry in found
        )
        scale = self.scale if all(entry.scale == self.scale for _, entry in found) else 1.0
        down = self.down if shared else torch.cat([entry.down for _, entry in found])
        # place each part's rows, in its own rank columns unless down is shared
        up, column = self.up.new_zeros(rows, len(down), *self.up.shape[2:]), 0
        for first, entry in found:
            up[first : first + len(entry.up), column : column + entry.rank] = entry.up * (entry.scale / scale)
            column += 0 if shared else entry.rank
        return LoraEntry(down, up, scale, torch.cat(with_magnitude) if with_magnitude else None)


def with_one_alpha(entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Return entries with the same effects but one common alpha (scale = alpha / rank), if all of them are LoRAs.

    diffusers ignores the alphas of a kohya file that differ from the most frequent one. If any entry is not a LoRA, all
    entries are returned unchanged.
    """
    loras = {name: entry for name, entry in entries.items() if isinstance(entry, LoraEntry)}
    alphas = {name: round(entry.scale * entry.rank, 6) for name, entry in loras.items()}
    if len(loras) < len(entries) or len(set(alphas.values())) < 2:
        return entries
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    return {
        name: entry if alphas[name] == alpha else entry.with_scale(alpha / entry.rank) for name, entry in loras.items()
    }


def _entry(name: str, module: FileModule, shape: tuple[int, ...], path: Path) -> LoraEntry:
    """Build the entry of one module. Without an alpha the scale is 1, as every program assumes.

    Raises:
        ValueError: the tensors cannot be a low-rank update.
        AdapterError: the tensors do not fit this layer.
    """
    down, up = module.parts["down"].float(), module.parts["up"].float()
    rank = down.shape[0]
    scale = 1.0 if module.alpha is None else module.alpha / (math.sqrt(rank) if module.use_rslora else rank)
    if up.numel() != shape[0] * rank or down.numel() != rank * math.prod(shape[1:]):
        raise other_shape(name, (up.shape[0], math.prod(down.shape[1:])), shape, path)
    down, up = down.reshape(rank, *shape[1:]), up.reshape(shape[0], rank, *[1] * (len(shape) - 2))
    return LoraEntry(down, up, scale, *_magnitudes(module, shape, path))


def _magnitudes(module: FileModule, shape: tuple[int, ...], path: Path) -> tuple[Tensor | None, Tensor | None]:
    """Return a DoRA's magnitudes as (per output, per input), each None if the file has none of this type.

    The shape of ``dora_scale`` decides, as in ComfyUI: [out, 1, ...] is per output, [1, in, 1, ...] per input. This
    distinguishes the two even for a square weight.

    Raises:
        AdapterError: "lora-magnitudes", the magnitudes fit neither axis of the weight.
    """
    for role in ("magnitude", "toolkit_magnitude", "dora_scale"):
        if role not in module.parts:
            continue
        found = module.parts[role].float()
        count, first = found.numel(), found.shape[0] if found.ndim else 0
        if count == shape[0] and (role != "dora_scale" or first == shape[0]):
            return found.flatten(), None
        if role == "dora_scale" and first == 1 and found.ndim > 1 and count == found.shape[1] == shape[1]:
            return None, found.flatten()
        raise file_error(
            "lora-magnitudes",
            f"The DoRA magnitudes of {module.key} have the shape {list(found.shape)}; its weight is {list(shape)}, so "
            f"{shape[0]} are needed (one per output), or {[1, shape[1]]} (one per input).",
            path,
            "Use another file. This one is damaged, or made for another model.",
        )
    return None, None


LORA = FileKind(kind_named("LoRA"), _entry, text_endings={"lora_magnitude_vector": "lora_magnitude_vector.weight"})
