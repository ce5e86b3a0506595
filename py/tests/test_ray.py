"""Ray over objects of a server: a cluster of its own on the loopback address, in a process of its own."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest

from object_server import ObjectServer

pytest.importorskip("ray", reason="ray is not installed: python3 -m pip install ray")

CONTENT = np.arange(4096 * 64, dtype=np.int64).reshape(4096, 64)
KEY = "bucket/table.bin"
TIMEOUT = 240

# The files of both "nodes" are in directories of a tier that tasks find in their environments.
PROGRAM = """
import os, signal, sys
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_UV_RUN_RUNTIME_ENV="0", RAY_AUTH_MODE="disabled")
import aquifer, numpy as np, ray
url, tiers, temporary = sys.argv[1], sys.argv[2:4], sys.argv[4]
ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=100 << 20, _temp_dir=temporary)
table = aquifer.memmap(url, np.int64, shape=(4096, 64), budget="16MiB")
rows = aquifer.Rows(url, np.int64, 64, budget="16MiB")
dying = os.path.join(temporary, "dying")

@ray.remote(max_retries=5)
def total(start, of):
    found = int(of.take(np.arange(start, start + 512)).sum())
    if start == 1024:
        try:
            os.close(os.open(dying, os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            pass  # The first of these tasks was killed.
    return found

futures = [
    total.options(runtime_env={"env_vars": {"AQUIFER_TIER": tier}}).remote(start, of)
    for of, tier in zip([table, rows], tiers) for start in range(0, 4096, 512)
]
print("tasks", sum(ray.get(futures, timeout=200)), os.path.exists(dying))

runtime_env = {"env_vars": {"AQUIFER_TIER": tiers[0]}}
batches = ray.data.range(4096, override_num_blocks=2).map_batches(
    lambda batch: {"sum": rows.take(batch["id"]).sum(axis=1)}, batch_size=1024, runtime_env=runtime_env
)
print("data", batches.sum("sum"))
ray.shutdown()
"""


def end_session(process: subprocess.Popen[str]) -> None:
    """Ends it and all that it started: workers that are just being started outlive Ray's own end of a cluster."""
    end = time.monotonic() + 60
    while members := [member for member in map(pid_of, pathlib.Path("/proc").glob("[0-9]*/stat")) if member[1] == process.pid]:
        assert time.monotonic() < end
        for member, _ in members:
            try:
                os.kill(member, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.poll()
        time.sleep(0.01)


def pid_of(status: pathlib.Path) -> tuple[int, int]:
    """A process and its session; none of a process that is gone, or ended and not waited for."""
    try:
        state, _, _, session = status.read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return 0, 0
    return int(status.parent.name), 0 if state == "Z" else int(session)


def run(url: str, tmp_path: pathlib.Path) -> dict[str, list[str]]:
    # Paths of Ray's sockets are long.
    with tempfile.TemporaryDirectory(prefix="aq", dir="/tmp") as temporary:
        tiers = [str(tmp_path / f"tier{node}") for node in range(2)]
        arguments = [sys.executable, "-c", PROGRAM, url, *tiers, temporary]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            out, error = process.communicate(timeout=TIMEOUT)
        finally:
            end_session(process)
    assert process.returncode == 0, error[-4000:]
    # Ray itself writes there as well.
    lines = [line.split() for line in out.splitlines() if line.startswith(("tasks ", "data "))]
    return {name: rest for name, *rest in lines}


def test_tasks_and_data_with_a_worker_that_is_killed(tmp_path: pathlib.Path) -> None:
    with ObjectServer() as server:
        found = run(server.put(KEY, CONTENT.tobytes()), tmp_path)
        assert found == {"tasks": [str(2 * CONTENT.sum()), "True"], "data": [str(CONTENT.sum())]}
        # The killed worker had what it had asked for: each block came once for each of the two.
        assert server.most_sent(KEY, 4096) <= 2 and server.sent_bytes(KEY) <= 2 * CONTENT.nbytes + 1000
