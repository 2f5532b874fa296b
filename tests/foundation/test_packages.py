"""Objects made by imports are not searched for garbage, and later garbage is found."""

from __future__ import annotations

import gc
import subprocess
import sys

from lora_rocm.foundation.packages import imported

CHILD = """
import gc
gc.disable()
from lora_rocm.foundation.packages import imported
imported()
kept = gc.get_freeze_count()
imported()
print(gc.isenabled(), kept > 0, gc.get_freeze_count() == kept)
"""


def test_what_imports_made_is_not_searched_and_the_search_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.split() == ["True", "True", "True"] and done.stderr == ""


def test_nothing_is_kept_where_the_search_is_on() -> None:
    before = gc.get_freeze_count()
    imported()
    assert gc.isenabled() and gc.get_freeze_count() <= before
