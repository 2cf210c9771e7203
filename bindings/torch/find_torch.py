"""Prints the folder of the torch package of this interpreter's environment, or nothing."""

import importlib.util
import sysconfig
from pathlib import Path


def main():
    # Without importing it: that takes seconds, and fails where a dependency is missing.
    spec = importlib.util.find_spec("torch")
    folders = list(spec.submodule_search_locations or []) if spec else []
    folders += [str(Path(sysconfig.get_path(name)) / "torch") for name in ("platlib", "purelib")]
    for folder in folders:
        if (Path(folder) / "include/torch/csrc/stable/library.h").exists():
            print(folder)
            return


main()
