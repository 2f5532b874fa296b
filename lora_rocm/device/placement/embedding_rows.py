"""Keeps the token embedding in main memory, and sends the rows of a batch's tokens to the device.

An embedding is only looked up, so a step needs only the rows of its tokens. They are gathered on the host, and sent
with the batch. The device compares each row's fingerprint with the one of this token, taken when the embedding was
loaded, so a row that was gathered or copied wrongly is detected. Dimensions: V tokens of the vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lora_rocm.device.transfer import DeviceTransfer, fingerprint, salted, whole_fingerprint

ROWS = "embedding_rows"
"""Name of the rows in a batch. They have the shape of the token ids, with D as last dimension."""
ROWS_AT_ONCE = 4096
"""Number of rows with fingerprints that are computed together, to limit memory."""


@dataclass(frozen=True)
class TokenTable:
    """A token embedding that is only looked up: frozen, without adapter, not used by the output head.

    name: of its weight, with the component ("transformer.embed.weight"). ids_name: of the token ids in a batch.
    """

    module: nn.Embedding
    name: str
    ids_name: str


class EmbeddingRows:
    """Keeps an embedding in main memory. Two hooks then make it look up rows there, which waits for the device.

    Args:
        table: the embedding. Its weight may be on the device.
        wanted: fingerprint of the weight when it was loaded, or None to take it now.
        transfer: transfer to the device. It records failed checks.

    Attributes:
        sent_bytes: bytes of rows sent with batches since the start.
    """

    def __init__(self, table: TokenTable, wanted: int | None, transfer: DeviceTransfer) -> None:
        self.table, self.sent_bytes, self._transfer = table, 0, transfer
        weight_VD = table.module.weight.data
        if weight_VD.device.type != "cpu":
            weight_VD = transfer.receive({table.name: weight_VD})[table.name]
        self._wanted = int(whole_fingerprint(weight_VD)) if wanted is None else wanted
        self._weight = table.module.weight
        self._weight.data = weight_VD
        self._sums_V = torch.cat([fingerprint(rows_RD) for rows_RD in weight_VD.split(ROWS_AT_ONCE)])
        self._hooks = (
            table.module.register_forward_pre_hook(lambda module, inputs: inputs[0].cpu()),
            table.module.register_forward_hook(self._to_device),
        )
        transfer.extra = self.sent

    def close(self) -> None:
        """Stop sending rows. The weight stays a CPU tensor."""
        for hook in self._hooks:
            hook.remove()
        self._transfer.extra = None

    def changed(self) -> list[str]:
        """Return the weight's name if its bytes in main memory have changed."""
        return [self.table.name] if int(whole_fingerprint(self._weight)) != self._wanted else []

    def sent(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send the rows of a batch's tokens, and queue their check. Returns nothing for a batch without token ids."""
        ids = tensors.get(self.table.ids_name)
        if ids is None:
            return {}
        rows = self._send(ids)
        self.sent_bytes += rows.nbytes
        return {ROWS: rows}

    def _send(self, ids: Tensor) -> Tensor:
        transfer, ids_N = self._transfer, ids.reshape(-1)
        salt = transfer.next_salt()
        rows_ND = transfer.copied(self._weight.data.index_select(0, ids_N))
        expected_1N = transfer.copied(salted(self._sums_V[ids_N][None], salt))
        transfer.compare([rows_ND], expected_1N, salt)
        transfer.checks += len(ids_N)
        return rows_ND.view(*ids.shape, -1)

    def _to_device(self, module: nn.Module, inputs: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        """Send rows that were looked up outside a batch, as for previews."""
        return self._transfer.send_checked(rows.flatten(0, -2), self.table.name).view(rows.shape)
