"""`python -m aquifer doctor`."""

from __future__ import annotations

import json
import subprocess
import sys


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Without a program of that name in the path.
    command = [sys.executable, "-m", "aquifer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={"PATH": "", "PYTHONPATH": ":".join(sys.path)})


def test_it_shows_what_the_machine_offers() -> None:
    shown = doctor("doctor")
    assert shown.returncode == 0 and "userfaultfd" in shown.stdout, shown.stderr
    report = json.loads(doctor("doctor", "--json").stdout)
    assert report["python"].startswith("3.") and any("userfaultfd" in feature["name"] for feature in report["features"])


def test_a_wrong_command_says_how() -> None:
    wrong = doctor("nurse")
    assert wrong.returncode == 2 and "usage" in wrong.stderr
    assert doctor("--help").returncode == 0
