"""A simulated folder of PCI devices with one card; its counters change as other programs take memory."""

from __future__ import annotations

from pathlib import Path

ADDRESS = "0000:03:00.0"


class SimulatedCard:
    """A card below ``devices``; sizes in bytes."""

    def __init__(
        self,
        devices: Path,
        *,
        total: int,
        used: int,
        gtt_total: int | None = None,
        gtt_used: int = 0,
        address: str = ADDRESS,
    ) -> None:
        self.folder = devices / address
        self.put("mem_info_vram_total", str(total))
        self.hold(used)
        if gtt_total is not None:
            self.put("mem_info_gtt_total", str(gtt_total))
            self.put("mem_info_gtt_used", str(gtt_used))

    def hold(self, used: int) -> None:
        """All programs together hold this much of the card's memory from now on."""
        self.put("mem_info_vram_used", str(used))

    def put(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")
