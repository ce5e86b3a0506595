"""Ray over objects of a server: a cluster of its own on the loopback address, in a process of its own."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from object_server import ObjectServer

pytest.importorskip("ray", reason="ray is not installed: python3 -m pip install ray")

CONTENT = np.arange(4096 * 64, dtype=np.int64).reshape(4096, 64)
KEY = "bucket/table.bin"
TIMEOUT = 240

BEGINNING = """
import os, signal, sys
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
import aquifer, numpy as np, ray
url, tiers, temporary = sys.argv[1], sys.argv[2:4], sys.argv[4]
ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=100 << 20, _temp_dir=temporary,
         log_to_driver=False, configure_logging=False)
table = aquifer.memmap(url, np.int64, shape=(4096, 64), budget="16MiB")
"""

TASKS = """
@ray.remote(max_retries=5)
def total(start, of, dying):
    # Of the tasks with this number one is killed, the first.
    rows = of.take(np.arange(start, start + 256))
    try:
        if start == 1024:
            os.close(os.open(dying, os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)
    except FileExistsError:
        pass
    return int(rows.sum())

dying = os.path.join(temporary, "dying")
futures = [
    total.options(runtime_env={"env_vars": {"AQUIFER_TIER": tier}}).remote(start, table, dying)
    for tier in tiers for start in range(0, 4096, 256)
]
print(sum(ray.get(futures, timeout=200)), os.path.exists(dying))
"""

DATA = """
rows = aquifer.Rows(url, np.int64, 64, budget="16MiB")
found = ray.data.range(4096, override_num_blocks=8).map_batches(lambda batch: {"sum": rows.take(batch["id"]).sum(axis=1)}, batch_size=512)
print(found.sum("sum"), len(ray.get(ray.put(table))))
"""


def run(program: str, url: str, tmp_path: pathlib.Path) -> list[str]:
    # Paths of Ray's sockets are long.
    import tempfile

    with tempfile.TemporaryDirectory(prefix="aq", dir="/tmp") as temporary:
        tiers = [str(tmp_path / f"tier{node}") for node in range(2)]
        arguments = [sys.executable, "-c", BEGINNING + program + "\nray.shutdown()\n", url, *tiers, temporary]
        # Its other processes end with it, as Ray ties them to it.
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            out, error = process.communicate(timeout=TIMEOUT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert process.returncode == 0, error[-4000:]
    return out.split()


def test_tasks_with_a_worker_that_is_killed(tmp_path: pathlib.Path) -> None:
    with ObjectServer() as server:
        found = run(TASKS, server.put(KEY, CONTENT.tobytes()), tmp_path)
        assert found == [str(2 * CONTENT.sum()), "True"]
        # The killed worker had what it had asked for.
        assert server.most_sent(KEY, 4096) <= 2 and server.sent_bytes(KEY) <= 2 * CONTENT.nbytes + 1000


def test_data(tmp_path: pathlib.Path) -> None:
    with ObjectServer() as server:
        assert run(DATA, server.put(KEY, CONTENT.tobytes()), tmp_path) == [str(CONTENT.sum()), "4096"]
