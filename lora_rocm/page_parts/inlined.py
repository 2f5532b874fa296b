"""The program's own styles and scripts as text inside a single HTML file, and the policy that allows only them."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markupsafe import Markup

STATIC = Path(__file__).with_name("static")
STYLES = ("vendored/uPlot.min.css", "page.css")
LIBRARY, MODULE = "vendored/uPlot.iife.min.js", "chart.js"


@dataclass(frozen=True)
class InlinedFiles:
    """The texts of a single file. They are the program's own files, and contain nothing of a run."""

    style: Markup
    library: Markup
    module: Markup

    @property
    def policy(self) -> str:
        """The Content-Security-Policy: only these texts are used, images are in the file, nothing is loaded."""
        scripts = " ".join(map(_hash, (self.library, self.module)))
        return (
            f"default-src 'none'; img-src data:; style-src {_hash(self.style)}; script-src {scripts}; "
            "base-uri 'none'; form-action 'none'"
        )


@cache
def inlined_files() -> InlinedFiles:
    """Return the texts that each single file contains."""
    return InlinedFiles(Markup("\n").join(map(_text, STYLES)), _text(LIBRARY), _text(MODULE))


def _text(name: str) -> Markup:
    return Markup((STATIC / name).read_text(encoding="utf-8"))


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
    return f"'sha256-{digest}'"
