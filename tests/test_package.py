"""The package as a whole: its public names, its layers, its seam to the device, and how torch finds it."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sgc_backend

PACKAGE = Path(sgc_backend.__file__).parent
ROOT = PACKAGE.parent

# Lowest first. A file imports only from layers below its own. Files of the emulated device (`_*.py`) have no layer:
# they are its own business, and nobody else's.
LAYERS = (
    ("_version", "below_autograd", "blame", "errors", "settings"),
    ("config", "dict_versions", "drafts", "driver", "executables", "recorders", "shape_key", "sole_call"),
    ("emulated",),
    ("device",),
    ("cuda_device", "emulated_device"),
    ("devices",),
    ("finds", "forms", "growing", "held_graphs", "pool_memory", "replay_guard"),
    ("fakes", "interpret", "pinned", "pool", "reached", "rows", "stats", "tree"),
    ("pools", "repeats"),
    ("interpreter",),
    ("facts",),
    ("marks",),
    ("attention",),
    ("capturable", "capture", "checks", "constants", "input_spec", "inputs", "regions", "symbols"),
    ("arguments", "blocks", "buckets", "groups", "nodes", "prefix_layouts", "spans", "static_inputs", "static_output"),
    ("alike", "buffers", "extents", "group_builder", "keys", "prefix_call", "results"),
    ("prefix_dims", "prefix_places", "prefix_rules", "prefix_views", "steps"),
    ("prefix_ops",),
    ("prefix", "split", "plan"),
    ("by_address", "padding", "piece", "probe", "walk"),
    ("breaks", "kept_plans", "warm_up"),
    ("admission", "recording", "seen", "segments"),
    ("cut_results", "cut_steps", "layout", "outputs"),
    ("builder",),
    ("breaker",),
    ("wrapper", "report", "memory"),
    ("full", "breakable"),
    ("piecewise",),
    ("backend",),
    ("tc_piecewise",),
    ("runner_setup",),
    ("runner",),
    ("runners",),
    ("__init__",),
    ("demo", "bench"),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FILES = sorted(path.stem for path in PACKAGE.glob("*.py"))
LAYERED = [name for name in FILES if name in RANK or not name.startswith("_")]
EMULATED_PARTS = [name for name in FILES if name not in LAYERED]


@pytest.fixture(autouse=True)
def clean_slate() -> None:
    """Nothing here compiles or captures, so nothing is left to clean up after."""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """The files and folders of the package that ``path`` imports from, anywhere in it, as ``LAYERS`` names them."""
    inside = path.parent.relative_to(PACKAGE).parts
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head, _, rest = alias.name.partition(".")
                if head == "sgc_backend":
                    yield rest.split(".")[0] or "__init__"
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - (node.level - 1)] if node.level else ()
            module = tuple((node.module or "").split(".")) if node.module else ()
            if not node.level:
                if module[:1] != ("sgc_backend",):
                    continue
                module = module[1:]
            full = (*base, *module)
            if full:
                yield full[0]
            else:
                for alias in node.names:
                    known = (PACKAGE / f"{alias.name}.py").exists() or (PACKAGE / alias.name).is_dir()
                    yield alias.name if known else "__init__"


# -- public names ----------------------------------------------------------------------------------------------------


def test_every_public_name_exists_and_is_listed_once_in_order() -> None:
    names = sgc_backend.__all__
    assert all(hasattr(sgc_backend, name) for name in names)
    assert len(set(names)) == len(names)
    assert names == sorted(names, key=lambda name: (not name.isupper(), name))  # as ruff sorts them


def test_whatever_the_package_imports_for_its_users_is_listed() -> None:
    bound = {
        alias.asname or alias.name
        for node in tree_of(PACKAGE / "__init__.py").body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    assert bound == set(sgc_backend.__all__)


def test_the_package_file_holds_names_and_nothing_else() -> None:
    kinds = {type(node) for node in tree_of(PACKAGE / "__init__.py").body}
    assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}


@pytest.mark.parametrize("name", [n for n in sgc_backend.__all__ if not n.startswith("__")])
def test_a_public_name_says_what_it_is(name: str) -> None:
    assert (getattr(sgc_backend, name).__doc__ or "").strip()


def test_the_types_are_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


# -- layers ----------------------------------------------------------------------------------------------------------


def test_every_file_has_a_layer() -> None:
    assert [name for name in LAYERED if name not in RANK] == []


@pytest.mark.parametrize("name", LAYERED)
def test_imports_go_strictly_downward(name: str) -> None:
    upward = [n for n in imported(PACKAGE / f"{name}.py") if n in RANK and RANK[n] >= RANK[name]]
    assert upward == []


@pytest.mark.parametrize("name", [n for n in LAYERED if n != "emulated"])
def test_the_emulated_devices_parts_are_its_own(name: str) -> None:
    assert [n for n in imported(PACKAGE / f"{name}.py") if n in EMULATED_PARTS] == []


def test_the_emulated_devices_parts_import_one_another_in_one_direction() -> None:
    needs = {name: set(imported(PACKAGE / f"{name}.py")) for name in EMULATED_PARTS}
    assert set().union(*needs.values()) <= {*EMULATED_PARTS, "errors"}
    while needs:
        free = [name for name, wanted in needs.items() if not wanted & set(needs)]
        assert free, f"a circle among {sorted(needs)}"
        for name in free:
            del needs[name]


def test_the_demo_uses_public_names_only() -> None:
    used = set()
    for path in (PACKAGE / "demo").glob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                ours = node.level > 1 or (not node.level and module.split(".")[0] == "sgc_backend")
                if ours and not module.startswith("sgc_backend.demo"):
                    used |= {alias.name for alias in node.names}
    assert used <= {*sgc_backend.__all__, "emulated"}


# -- the seam --------------------------------------------------------------------------------------------------------


def device_names(path: Path) -> list[str]:
    """What code in ``path`` takes from torch.cuda, torch.xpu or torch's private CUDA functions."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if isinstance(owner, ast.Name) and owner.id == "torch" and node.attr in ("cuda", "xpu"):
                found.append(f"line {node.lineno}: torch.{node.attr}")
            if node.attr.startswith(("_cuda_", "_xpu_")):
                found.append(f"line {node.lineno}: {node.attr}")
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
            found += [f"line {node.lineno}: {n}" for n in names if n.startswith(("torch.cuda", "torch.xpu"))]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{a.name}" for a in node.names]
            found += [f"line {node.lineno}: {n}" for n in names if n.startswith(("torch.cuda", "torch.xpu"))]
    return found


@pytest.mark.parametrize("name", [n for n in FILES if n not in ("cuda_device", "devices", "__main__")])
def test_only_the_device_files_name_a_device_module(name: str) -> None:
    assert device_names(PACKAGE / f"{name}.py") == []


@pytest.mark.parametrize("name", ["cuda_device", "devices"])
def test_the_device_files_do_name_one(name: str) -> None:
    assert device_names(PACKAGE / f"{name}.py")


@pytest.mark.parametrize(
    "name", ["split", "facts", "symbols", "marks", "attention", "capturable", "walk", "inputs", "prefix"]
)
def test_what_reads_the_graph_never_sees_a_device(name: str) -> None:
    path = PACKAGE / f"{name}.py"
    if path.exists():
        assert not {"device", "devices", "pool", "pools", "emulated", "config"} & set(imported(path))


def test_only_the_edge_and_the_device_read_the_environment() -> None:
    readers = [
        path.stem
        for path in PACKAGE.glob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
    ]
    assert set(readers) <= {"config", "cuda_device", "__main__"}


# -- how torch finds it ----------------------------------------------------------------------------------------------


def python(code: str, **environment: str) -> str:
    """Run ``code`` in a fresh interpreter where a warning is an error, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_finds_the_backend_by_name_and_loads_nothing_before() -> None:
    out = python(
        """
import sys
def loaded():
    return any(name.split(".")[0] == "sgc_backend" for name in sys.modules)
assert not loaded(), "starting Python imports sgc_backend"
import torch
assert not loaded(), "importing torch imports sgc_backend"
assert "sgc_piecewise" in torch._dynamo.list_backends()
assert not loaded(), "listing the backends imports sgc_backend"
from torch._dynamo.backends.registry import lookup_backend
first = lookup_backend("sgc_piecewise")
assert loaded()
assert lookup_backend("sgc_piecewise") is first
import sgc_backend
assert sgc_backend.sgc_piecewise is first
for name in [n for n in sys.modules if n.split(".")[0] == "sgc_backend"]:
    del sys.modules[name]
import sgc_backend as again
assert again is not sgc_backend and callable(again.sgc_piecewise)
assert lookup_backend("sgc_piecewise") is first
assert torch._dynamo.list_backends().count("sgc_piecewise") == 1
with torch.no_grad():
    compiled = torch.compile(lambda x: x * 2 + 1, backend="sgc_piecewise", options={"inner": "eager"})
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 3.0))
print("done")
""",
        SGC_DEVICE="emulated",
    )
    assert out.strip() == "done"


def test_it_imports_and_runs_without_triton() -> None:
    out = python(
        """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
sys.meta_path.insert(0, Absent())
import sgc_backend, torch
assert "torch._inductor" not in sys.modules, "importing the package imports inductor"
compiled = torch.compile(lambda x: x.relu() + 1, backend="sgc_piecewise", options={"inner": "eager"})
with torch.no_grad():
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 2.0))
print(sgc_backend.stats())
""",
        SGC_DEVICE="emulated",
    )
    assert "'replayed': {'fixed': 2}" in out


def test_the_entry_point_is_declared_once_and_names_the_backend() -> None:
    entries = [e for e in importlib.metadata.entry_points(group="torch_dynamo_backends") if e.name == "sgc_piecewise"]
    assert {e.value for e in entries} == {"sgc_backend.backend:sgc_piecewise"}
    assert entries[0].load() is sgc_backend.sgc_piecewise


# -- versions --------------------------------------------------------------------------------------------------------


def test_the_installed_version_is_the_packages_own() -> None:
    assert importlib.metadata.version("sgc-backend") == sgc_backend.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z]+\d+)?", sgc_backend.__version__)


def test_the_version_is_written_in_one_place() -> None:
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    assert re.search(r"^version = attr: sgc_backend\._version\.__version__$", text, re.M)
    assert sgc_backend.__version__ not in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_the_changelog_begins_with_this_version_or_with_what_is_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## +\[?([^\s\]]+)", text, re.M)
    assert headings and headings[0] in ("Unreleased", sgc_backend.__version__)
