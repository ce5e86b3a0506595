"""`python -m aquifer.bench`: Aquifer against what else Python has for data larger than memory.

All contenders read the same batches in turns, under one limit of memory, and their answers are compared; see `_harness`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from typing import Any

import numpy as np

import aquifer

from ._benches import BENCHES, FLOORS, Report, run
from ._harness import Conditions

__all__ = ["main"]

_EXAMPLES = """
examples:
  python -m aquifer.bench --list                   what there is
  python -m aquifer.bench --quick                  tests that all of it works, in about a minute
  sudo python -m aquifer.bench --dir /mnt/disk     measures all of it; root sets the limit of memory
  python -m aquifer.bench --only rows_3k --json    one bench, as a JSON object
"""


def _shown(conditions: Conditions, reports: dict[str, Report]) -> str:
    lines = [
        f"memory: {conditions.unlimited or f'{conditions.limit_bytes >> 20} MiB for each contender'}"
        + ("; --quick: nothing is measured, only tested" if conditions.quick else "")
    ]
    for name, report in reports.items():
        lines += ["", f"{name}: {BENCHES[name].__doc__}"]
        lines += [f"  {one:34} {taken:10.4g} {report.unit}" for one, taken in sorted(report.times.items(), key=lambda of: of[1])]
        lines += [f"  {one:34} missing: {why}" for one, why in report.missing.items()]
        for what, ratio in report.ratios.items():
            line = f"  {what:34} {ratio:10.3g}"
            if what in FLOORS:
                floor, aim = FLOORS[what]
                line += f"     floor {floor:g}, aim {aim:g}" + ("" if ratio >= floor or conditions.quick else "     BELOW THE FLOOR")
            lines.append(line)
        lines += [f"  ({note})" for note in report.notes]
    return "\n".join(lines)


def _json(conditions: Conditions, reports: dict[str, Report]) -> dict[str, Any]:
    return {
        "aquifer": aquifer.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kernel": platform.release(),
        "processors": os.cpu_count(),
        "limit_bytes": None if conditions.unlimited else conditions.limit_bytes,
        "unlimited": conditions.unlimited,
        "quick": conditions.quick,
        "benches": {name: vars(report) for name, report in reports.items()},
        "ratios": {
            what: {"ratio": ratio, "floor": FLOORS.get(what, (None,))[0], "aim": FLOORS.get(what, (None, None))[1]}
            for report in reports.values()
            for what, ratio in report.ratios.items()
        },
    }


def _ended(*_: object) -> None:
    # As Ctrl-C: what has been written is removed.
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m aquifer.bench",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="print the names of the benches, and end")
    parser.add_argument("--only", action="append", choices=list(BENCHES), metavar="NAME", help="one bench; may be given again")
    parser.add_argument("--quick", action="store_true", help="test that it works, on little data")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dir", default=".", help="where data is put, up to 12 GiB, and removed again: a directory on the disk to measure")
    parser.add_argument("--memory-mib", type=int, default=256, metavar="N", help="the limit of memory for each contender; 256 by default")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        for name, bench in BENCHES.items():
            print(f"{name:16} {bench.__doc__}")
        return 0
    before = signal.signal(signal.SIGTERM, _ended)
    try:
        conditions, reports = run(chosen.only or list(BENCHES), chosen.dir, chosen.memory_mib << 20, quick=chosen.quick)
    except KeyboardInterrupt:
        print("interrupted; what was written is removed", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    print(json.dumps(_json(conditions, reports)) if chosen.json else _shown(conditions, reports))
    return 0
