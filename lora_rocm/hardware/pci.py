"""PCI ids and adapter names of AMD GPUs with their architectures. Data; standard library only.

The ids come from libdrm's data/amdgpu.ids, which names the products, and the kernel's amdgpu_drv.c, which names the
chips (both read 2026-11-21); the architecture of a product comes from ``archs``. Traps: 1114 is gfx1152
(llama.cpp#26127); 1902 is gfx1153, although some of its products are called 840M like those of 1114; the graphics of
desktop Ryzen (164e, 13c0) is gfx1036. An id that is not listed is unknown; nothing is inferred from its neighbours.
"""

from __future__ import annotations

import re

AMD = "1002"
GFX_IDS: dict[str, str] = {
    "gfx906": "66a0 66a1 66a2 66a3 66a7 66af",
    "gfx908": "738c 738e",
    "gfx90a": "7408 740c 740f",
    "gfx942": "74a0 74a1 74a2 74a5 74a8 74a9 74b5 74b6 74bd",
    "gfx950": "75a0 75a3 75b0 75b3",
    "gfx1010": "7310 7312 7318 7319 731a 731b 731e 731f",
    "gfx1011": "7360 7362",
    "gfx1012": "7340 7341 7347 734f",
    "gfx1030": "73a1 73a2 73a3 73a5 73ab 73ae 73af 73bf",
    "gfx1031": "73df",
    "gfx1032": "73e0 73e1 73e3 73ef 73ff",
    "gfx1033": "163f 1435",
    "gfx1034": "7421 7422 7423 7424 743f",
    "gfx1035": "1681",
    "gfx1036": "164e 13c0",
    "gfx1100": "7448 7449 744a 744b 744c 745e",
    "gfx1101": "7460 7461 7470 747e",
    "gfx1102": "7480 7481 7483 7489 7499",
    "gfx1103": "15bf 15c8 1900 1901",
    "gfx1150": "150e",
    "gfx1151": "1586",
    "gfx1152": "1114",
    "gfx1153": "1902",
    "gfx1200": "7590",
    "gfx1201": "7550 7551",
}
BY_ID = {f"{AMD}:{device}": gfx for gfx, devices in GFX_IDS.items() for device in devices.split()}

NAMES: tuple[tuple[str, str], ...] = (
    (r"9070|R9[67]00", "gfx1201"),
    (r"9060", "gfx1200"),
    (r"80[4-6]0S|8065S|Strix Halo|AI Max", "gfx1151"),
    (r"8[89]0M", "gfx1150"),
    (r"8[46]0M", "gfx1152"),
    (r"820M", "gfx1153"),
    (r"7700S|7[346]00|7650|W7[456]00", "gfx1102"),
    (r"7900|W7800", "gfx1100"),
    (r"7[78]00", "gfx1101"),
    (r"7[468]0M", "gfx1103"),
    (r"6700S|6800S|66[05]0|W6600", "gfx1032"),
    (r"6[89][05]0", "gfx1030"),
    (r"67[05]0", "gfx1031"),
    (r"6[3-5][05]0|W6[345]00", "gfx1034"),
    (r"6[68]0M", "gfx1035"),
    (r"5[67]00", "gfx1010"),
    (r"V520", "gfx1011"),
    (r"5[35]00", "gfx1012"),
    (r"Radeon VII|MI[56]0", "gfx906"),
    (r"MI100", "gfx908"),
    (r"MI2[15]0", "gfx90a"),
    (r"MI3(?:0[08]|25)", "gfx942"),
    (r"MI35[05]", "gfx950"),
)
"""Last resort; the first match decides. Marketing names overlap (a 6800S is no 6800, a 7700S no 7700)."""


def gfx_of_id(pci_id: str | None) -> str | None:
    """The architecture of a PCI id ("1002:744c"); None if the table lacks it."""
    return BY_ID.get(pci_id.lower()) if pci_id else None


def gfx_of_name(name: str) -> str | None:
    """The architecture by an adapter's name ("AMD Radeon(TM) 8060S Graphics"); None if no pattern matches."""
    for pattern, gfx in NAMES:
        if re.search(rf"(?<![0-9A-Za-z])(?:RX ?|PRO ?)?W?(?:{pattern})(?![0-9])", name, re.IGNORECASE):
            return gfx
    return None


def product_name(ids_text: str, device: str, revision: str) -> str | None:
    """The product in the text of an ``amdgpu.ids`` file; ``device`` ("744c") and ``revision`` ("c8") have no 0x."""
    wanted = (device.lower(), revision.lower().zfill(2))
    for line in ids_text.splitlines():
        parts = [part.strip() for part in line.split(",", 2)]
        if len(parts) == 3 and (parts[0].lower(), parts[1].lower()) == wanted:
            return parts[2]
    return None
