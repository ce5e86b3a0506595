"""`python -m aquifer doctor`: what this machine offers to Aquifer."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys

import numpy as np

from . import __version__, _native

USAGE = """usage: python -m aquifer doctor [--json]

Shows what the kernel offers to Aquifer. The program `aquifer`, where it is installed, shows more: it measures costs, and takes
the options that `aquifer doctor --help` lists."""


def main(arguments: list[str]) -> int:
    if arguments[:1] != ["doctor"]:
        print(USAGE, file=sys.stderr if arguments[:1] not in (["-h"], ["--help"]) else sys.stdout)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    program = shutil.which("aquifer")
    if program is not None:
        os.execv(program, [program, *arguments])
    if arguments[1:] not in ([], ["--json"]):
        print(USAGE, file=sys.stderr)
        return 2
    versions = {
        "aquifer": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kernel": platform.release(),
        "machine": platform.machine(),
    }
    features = _native.features()
    if arguments[1:]:
        rows = [
            {"name": name, "available": available, "purpose": purpose, "detail": detail}
            for name, available, purpose, detail in features
        ]
        print(json.dumps({**versions, "features": rows}, indent=2))
        return 0
    for what, version in versions.items():
        print(f"{what:10} {version}")
    print()
    width = max(len(name) for name, *_ in features)
    for name, available, purpose, detail in features:
        print(f"{'yes' if available else 'no ':3}  {name:{width}}  {purpose}{f' ({detail})' if detail else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
