"""Host code stays host code: no framework, and the optional package only when it is used."""

import subprocess
import sys

PROGRAM = """
import sys
import msds.checkpoint
loaded = [name for name in ("mindspore", "torch", "transformers", "gguf") if name in sys.modules]
assert not loaded, loaded
"""


def test_importing_the_package_loads_no_framework():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
