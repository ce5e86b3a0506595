"""Trains a line through points, in weights that survive `kill -9` at any moment, with its log and report as files of the same pool.

    python training_state.py STATE.pool [STEPS]

Run it again, and it goes on where it was: each step changes weights, momentum and the step's number together, or not at all.
"""

import sys
from pathlib import Path

import aquifer
import numpy as np


def main(path: Path, steps: int) -> float:
    pool = aquifer.Pool.open(path) if path.exists() else aquifer.Pool.create(path, "16MiB")
    with pool:
        weights = pool.array("weights", shape=2)
        momentum = pool.array("momentum", shape=2)
        done = pool.array("steps", shape=(), dtype="i8")

        points = np.linspace(-1, 1, 100)
        values = 3 * points + 1
        first, last = int(done), int(done) + steps
        for step in range(first, last):
            error = weights[0] * points + weights[1] - values
            gradient = np.array([(error * points).mean(), error.mean()])
            with pool.transaction():
                momentum[:] = 0.9 * momentum - 0.05 * gradient
                weights += momentum
                done[()] = step + 1
        loss = float((error**2).mean()) if steps else float("nan")

        files = pool.files
        with files.open("/log.txt", "a") as log:
            print(f"steps {first} to {last}: loss {loss:.6f}", file=log)
        files.path("/report.txt").write_text(f"y = {weights[0]:.4f} x + {weights[1]:.4f}\n")
        pool.sync()
        # A pool is not closed under its arrays.
        del weights, momentum, done
    return loss


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
