"""The floors of the package: a module imports only from its own floor and lower ones, without circular imports."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From the lowest floor up; docs/architecture.md describes them.
FLOORS = {
    "seqpar": (
        ("base", "patching", "ranks", "masks", "triton_kernels"),
        ("schedule", "comm", "kernels", "placement"),
        ("strategies", "sharding"),
        ("functional", "scaled_dot_product", "flex_and_varlen", "decoding", "verification"),
        ("factory", "layers", "megatron", "memory", "mixers", "shifting", "adapters", "planner"),
        ("hf", "diffusers", "cli"),
        ("peers",),
    ),
    "seqpar.hf": (
        ("batch", "prompts", "state", "randomness"),
        ("mechanisms", "data"),
        ("inspection",),
        ("losses",),
        ("calls",),
        ("verification",),
        ("patch", "shared_batches"),
        ("accelerate",),
    ),
}


def modules() -> dict[str, Path]:
    """Every module of the package by its installed name, without the package's own ``__init__``."""
    found = {}
    folders = {"seqpar": "seqpar", "triton_kernels": "seqpar.triton_kernels", "benchmarks/peers": "seqpar.peers"}
    for folder, prefix in folders.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = [prefix, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return {name: path for name, path in found.items() if name not in ("seqpar", "seqpar.__main__")}


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that a module imports, inside functions and for type checkers too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            base = ".".join(x for x in (base, node.module) if x)
            imported |= {f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    return {module for module in imported & known.keys() if module != name}


@cache
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports(name, path, known) for name, path in known.items()}


def room(module: str, package: str) -> str:
    return module.removeprefix(f"{package}.").split(".")[0]


def imports_of_rooms(package: str) -> dict[str, set[str]]:
    """Of each room of a package: the rooms that its modules import."""
    rooms: dict[str, set[str]] = {}
    for name, others in graph().items():
        if name.startswith(f"{package}."):
            inside = {room(other, package) for other in others if other.startswith(f"{package}.")}
            rooms.setdefault(room(name, package), set()).update(inside - {room(name, package)})
    return rooms


@pytest.mark.parametrize("package", FLOORS)
def test_no_room_imports_a_higher_floor(package: str) -> None:
    floor = {name: i for i, names in enumerate(FLOORS[package]) for name in names}
    rooms = imports_of_rooms(package)
    assert floor.keys() == rooms.keys()
    upward = [f"{name} imports {x}" for name, others in rooms.items() for x in others if floor[x] > floor[name]]
    assert not upward, upward
    # static_order raises a CycleError that names the rooms of a circle.
    assert len(list(TopologicalSorter(rooms).static_order())) == len(rooms)


def test_no_modules_import_each_other() -> None:
    assert len(list(TopologicalSorter(graph()).static_order())) == len(modules())


def test_the_root_has_few_modules() -> None:
    assert {path.stem for path in (ROOT / "seqpar").glob("*.py")} == {
        *("__init__", "__main__", "decoding", "factory", "flex_and_varlen", "functional", "mixers"),
        *("scaled_dot_product", "shifting"),
    }


def test_there_is_one_entrance_to_attention() -> None:
    """One module calls the operator, and the operators name no algorithm."""
    importers = {name for name, others in graph().items() if "seqpar.strategies.operators" in others}
    calling = {name for name in importers if "operators.attention(" in modules()[name].read_text()}
    assert calling == {"seqpar.strategies.attend"}
    used = graph()["seqpar.strategies.operators"]
    assert not used & {f"seqpar.strategies.{name}" for name in ("ring", "ulysses", "head_exchange")}


def test_no_module_bears_the_name_of_a_function_beside_it() -> None:
    """``import seqpar.x.y`` and ``from seqpar.x import y`` must mean the same: the module."""
    clashes = []
    for name, path in {**modules(), "seqpar": ROOT / "seqpar" / "__init__.py"}.items():
        if path.name != "__init__.py":
            continue
        tree = ast.parse(path.read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:  # not ``from . import submodule``
                defined |= {alias.asname or alias.name for alias in node.names}
        submodules = {other.rpartition(".")[2] for other in modules() if other.rpartition(".")[0] == name}
        clashes += [f"{name}.{clash}" for clash in defined & submodules]
    assert not clashes, clashes


# A public name of two rooms, each imported under its room's own name.
_TWO_PUBLIC_CLASSES = {"Plan"}


def test_a_class_name_means_one_thing() -> None:
    """No two modules define a class of the same name, or an alias of the same name for another type, private or not."""
    meanings: dict[str, dict[str, str]] = {}  # by the name of a class or an alias, the modules that define each meaning
    for module, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                meanings.setdefault(node.name.lstrip("_"), {})[module] = module
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name) and re.match("_?[A-Z].*[a-z]", target.id):
                    meanings.setdefault(target.id.lstrip("_"), {})[ast.unparse(node.value)] = module
    clashes = {name: sorted(of.values()) for name, of in meanings.items() if len(of) > 1}
    for name in _TWO_PUBLIC_CLASSES:
        del clashes[name]
    assert not clashes, f"a reader takes one for the other; give each a name that says what it holds: {clashes}"
