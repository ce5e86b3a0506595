"""The programs and notebooks in `examples/python` and the first program of the documentation run."""

import ast
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aquifer import Pool
from object_server import ObjectServer

# Beside the tests' directory in a copy of it, or in the repository.
PLACES = [Path(__file__).parents[depth] for depth in (1, 2)]


def found(name: str) -> Path:
    for place in PLACES:
        if (place / name).exists():
            return place / name
    pytest.skip(f"{name} is not beside these tests")


def run(*arguments: object) -> None:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_training_state(tmp_path: Path) -> None:
    program, path = found("examples/python/training_state.py"), tmp_path / "state.pool"
    run(program, path, 150)
    process = subprocess.Popen([sys.executable, program, path, "1000000"])
    # Until it has begun to work, or is gone.
    while process.poll() is None:
        with Pool.open(path, read_only=True) as pool:
            if any(array.state != "D" for array in pool.arrays()):
                break
    process.kill()
    process.wait(60)
    run(program, path, 100)
    with Pool.open(path) as pool:
        steps = int(pool.array("steps"))
        assert steps >= 250
        assert re.fullmatch(r"y = (2\.9|3\.0)\d* x \+ (0\.9|1\.0)\d*\n", pool.files.read_text("/report.txt"))
        log = pool.files.read_text("/log.txt").splitlines()
        assert log[0].startswith("steps 0 to 150: loss") and log[-1].startswith(f"steps {steps - 100} to {steps}: loss")
    path.unlink()


def test_the_first_program_of_the_documentation(tmp_path: Path) -> None:
    text = found("docs/python-pools.md").read_text()
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0].replace("4GiB", "32MiB")
    directory = os.getcwd()
    os.chdir(tmp_path)
    try:
        exec(compile(program, "python-pools.md", "exec"), {})
    finally:
        os.chdir(directory)
    with Pool.open(tmp_path / "data.pool") as pool:
        assert pool.array("weights").sum() == pytest.approx(768 * 1.5 * 0.9)
        assert pool.files.read_text("/notes/today") == "begun"
    (tmp_path / "data.pool").unlink()


def test_the_examples_with_objects_in_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the documentation, in order, in one namespace; Ray's has a test of its own."""
    section = found("docs/python.md").read_text().split("## Objects in stores\n")[1].split("\n## ")[0]
    arrays, frames, blocks, _ = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    table = np.random.default_rng(1).random((100_000, 64), np.float32)
    with ObjectServer() as server:
        server.put("bucket/embeddings.f32", table.tobytes())
        settings = {
            "ENDPOINT_URL": server.endpoint,
            "ALLOW_HTTP": "true",
            "ACCESS_KEY_ID": "name",
            "SECRET_ACCESS_KEY": "secret",
            "DEFAULT_REGION": "us-east-1",
        }
        for name, value in settings.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AQUIFER_TIER", str(tmp_path / "tier"))
        names: dict[str, Any] = {}
        exec(compile(arrays.replace("GiB", "0MiB"), "python.md", "exec"), names)
        assert (names["many"] == table[[7, 99_999, 7]]).all() and (names["part"] == table[1000:2000]).all()
        if has("dask.array"):
            exec(compile(blocks.replace(".compute()", ".compute(scheduler='threads')"), "python.md", "exec"), names)
        if has("s3fs") and has("pandas") and has("pyarrow"):
            import pandas

            content = io.BytesIO()
            pandas.DataFrame({"key": [1, 2, 1], "value": [1.5, 2.5, 3.5]}).to_parquet(content)
            server.put("bucket/table.parquet", content.getvalue())
            exec(compile(frames, "python.md", "exec"), names)
            assert names["frame"].value.sum() == 7.5


def has(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def cells(notebook: Path) -> list[str]:
    content = json.loads(notebook.read_text())
    assert content["nbformat"] == 4
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code), "it is kept without outputs"
    return ["".join(cell["source"]) for cell in code]


NOTEBOOKS = ["larger_than_memory.ipynb"]


def test_all_notebooks_are_run() -> None:
    assert sorted(path.name for path in found("examples/python").glob("*.ipynb")) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, in order, in one namespace, and the value at the end of each as a notebook shows it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    for number, source in enumerate(cells(found(f"examples/python/{name}"))):
        place = f"{name}, cell {number}"
        tree = ast.parse(source, place)
        shown = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, place, "exec"), names)
        if isinstance(shown, ast.Expr):
            value = eval(compile(ast.Expression(shown.value), place, "eval"), names)
            assert getattr(value, "_repr_html_", value.__repr__)()
            del value
    assert not list(tmp_path.iterdir()), "it removes what it wrote"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_in_jupyter(name: str, tmp_path: Path) -> None:
    nbformat: Any = pytest.importorskip("nbformat", reason="pip install nbformat")
    nbclient: Any = pytest.importorskip("nbclient", reason="pip install nbclient")
    pytest.importorskip("ipykernel", reason="pip install ipykernel")
    notebook = nbformat.read(found(f"examples/python/{name}"), as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
