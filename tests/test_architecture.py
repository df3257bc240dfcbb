# SPDX-License-Identifier: Apache-2.0
"""Rules about the source: the order of imports, and no monkey-patching or version checks of vLLM."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest

from tests.support.sources import MODULES, PACKAGES, ROOT, parse

ROOMS = (
    "machine",  # the machine that a command runs on: its processes, terminal, folders; independent of the rest
    "kernels",  # copies and rotates KV in the device's memory
    "cache",  # cached chunks, their places in prompts, eviction
    "cache/tiers",  # host memory, directories, object stores
    "replicas",  # the replicas' registry
    "engine_ext/wire",  # data between the app's process and vLLM's
    "engine_ext/core",  # inside vLLM's processes
    "engine_ext/chunks",  # fills, links, tiers: getting chunks into the pool
    "engine_ext/client",  # one request through the engine
    "engine_ext/start",  # starting an engine
    "app/advice.py",
    "app/modes.py",
    "app/profile.py",
    "app/http",
    "app/access",
    "app/settings.py",
    "app/logs.py",
    "app/prometheus.py",
    "app/documents",  # from bodies to documents
    "app/collections",  # files as passages, and those that a question needs
    "app/prompt",  # from documents to segments of a prompt
    "app/errors.py",
    "app/context.py",
    "app/intake.py",  # where requests with documents come in
    "web",
    "app/catalog",  # computing chunks ahead; naming, pinning and dropping them
    "app/cluster",  # router, registration, peers
    "app/routes",
    "app/models",
    "app/server.py",
    "app/models",
    "app/arguments.py",
    "app/ray_serve",
    "training/runs.py",
    "measuring/kit",  # servers, clients, texts, statistics, the folder of a run
    "measuring/quality",  # tessera eval, tessera calibrate
    "training/adapt",  # tessera adapt
    "measuring/speed",  # tessera bench
    "app/commands",
    "app/cli.py",
)
"""The architecture: a room imports from those above it only."""
EXTERNAL = {
    "machine": {"vllm", "fastapi"},
    "kernels": {"vllm", "fastapi"},
    "cache": {"vllm", "fastapi", "torch"},
    "cache/tiers": {"vllm", "fastapi", "torch"},
    "replicas": {"vllm", "fastapi", "torch"},
    "engine_ext/wire": {"fastapi"},
    "engine_ext/core": {"fastapi"},
    "engine_ext/chunks": {"fastapi"},
    "engine_ext/client": {"fastapi"},
    "web": {"vllm", "torch"},
}
"""Modules that a room imports neither directly nor through others, at import time."""
COMPAT = "engine_ext/wire/vllm_compat.py"
# Modules with vLLM's names: vLLM's own, and the module that re-exports them.
VLLM_ORIGINS = {"vllm", "vllm_ascend", "engine_ext.wire.vllm_compat"}
VERSION = re.compile(r"__version(_tuple)?__|\bvllm\._?version\b|\bpackaging\b|\bversion\((?!['\"]tessera-rag)")
# No checks: KV of another version belongs to another engine; the doctor prints the version.
VERSION_READERS = {COMPAT, "engine_ext/start/fingerprint.py", "app/commands/doctor/environment.py"}


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """``(module, bound name)`` of every import in the module; a relative import is an error."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield f"{node.module}", alias.asname or alias.name


def own_imports(node: ast.AST) -> list[tuple[str, str]]:
    return list(imports(node)) if isinstance(node, ast.Import | ast.ImportFrom) else []


@cache
def moved_names() -> set[str]:
    """Names that the compatibility module imports from elsewhere, or defines, depending on the version."""
    branches = [node for node in parse(COMPAT).body if isinstance(node, ast.If)]
    parts = [part for branch in branches for part in ast.walk(branch)]
    defined = {part.name for part in parts if isinstance(part, ast.ClassDef | ast.FunctionDef)}
    imported = {alias.name for part in parts if isinstance(part, ast.ImportFrom) for alias in part.names}
    return imported | defined - {"__init__"}


def is_vllms(module: str) -> bool:
    return any(module == origin or module.startswith(f"{origin}.") for origin in VLLM_ORIGINS)


def base_name(node: ast.expr) -> str | None:
    """``a`` of ``a.b[0].c``."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def targets(node: ast.AST) -> list[ast.expr]:
    """Targets of a statement or ``setattr``."""
    if isinstance(node, ast.Assign | ast.Delete):
        return [part for target in node.targets for part in ast.walk(target) if isinstance(part, ast.expr)]
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
        return [ast.Attribute(node.args[0], "?")]
    return []


def patches(tree: ast.AST) -> list[int]:
    """Lines that change an attribute or item of something imported from vLLM."""
    names = {bound for module, bound in imports(tree) if is_vllms(module)}
    return [
        node.lineno
        for node in ast.walk(tree)
        for target in targets(node)
        if isinstance(target, ast.Attribute | ast.Subscript) and base_name(target) in names
    ]


def test_there_are_modules_to_check():
    assert {name.partition("/")[0] for name in MODULES} == set(PACKAGES)
    assert COMPAT in MODULES


def room(name: str) -> str:
    """The room of a module, the innermost one."""
    return max((each for each in ROOMS if name == each or name.startswith(f"{each}/")), key=len)


def rank(name: str) -> int:
    return ROOMS.index(room(name))


def imported_modules(nodes: Iterator[ast.AST]) -> set[str]:
    """Which of :data:`MODULES` are imported."""
    names = set()
    for node in nodes:
        for module, _ in own_imports(node):
            aliases = [f"{module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            names.update(f"{each.replace('.', '/')}.py" for each in (module, *aliases))
    return names & MODULES.keys()


def reached(name: str) -> set[str]:
    """Modules imported directly or indirectly with this one, including itself."""
    found, left = {name}, [name]
    while left:
        new = imported_modules(iter(parse(left.pop()).body)) - found
        found |= new
        left += new
    return found


PLACED = [name for name in MODULES if not name.endswith("__init__.py")]


def test_imports_between_rooms_run_one_way():
    graph = {name: imported_modules(ast.walk(parse(name))) for name in PLACED}
    against = [(name, each) for name in graph for each in sorted(graph[name]) if rank(each) > rank(name)]
    assert against == []


def test_the_product_imports_nothing_that_is_not_in_the_wheel():
    taken = [(name, module) for name in MODULES for module, _ in imports(parse(name))]
    assert [each for each in taken if each[1].partition(".")[0] in ("research", "scripts", "tests")] == []


def test_no_file_imports_itself_by_way_of_others():
    graph = {name: imported_modules(ast.walk(parse(name))) for name in PLACED}
    left = dict(graph)
    while leaves := [name for name, imported in left.items() if not imported & left.keys() - {name}]:
        for name in leaves:
            del left[name]
    users = dict(left)
    while roots := [name for name in users if not any(name in users[other] for other in users if other != name)]:
        for name in roots:
            del users[name]
    assert set(users) == set()


def external_packages(name: str) -> set[str]:
    """Packages that a module imports, or that are imported with it."""
    return {
        module.partition(".")[0]
        for each in reached(name)
        for node in (ast.walk(parse(each)) if each == name else iter(parse(each).body))
        for module, _ in own_imports(node)
    }


def test_rooms_do_without_what_is_not_theirs():
    used = {name: external_packages(name) & EXTERNAL[room(name)] for name in PLACED if room(name) in EXTERNAL}
    assert {name: packages for name, packages in used.items() if packages} == {}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("app.cluster.router.command", {"vllm", "torch", "transformers"}),
        ("app.models.random_model", {"torch", "transformers"}),
        ("engine_ext.client.tracing", {"opentelemetry"}),
    ],
)
def test_what_starts_quickly_imports_nothing_heavy(module, absent):
    code = f"import sys, {module}; print({absent} & {{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_nothing_of_vllm_is_patched():
    assert [(name, line) for name in MODULES for line in patches(parse(name))] == []


def test_versions_of_vllm_are_looked_at_in_one_module():
    texts = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
    assert [name for name, text in texts.items() if VERSION.search(text)] == [COMPAT]


def test_no_import_of_vllm_may_fail():
    """It would be a check of its version."""
    blocks = [
        (name, node) for name in MODULES for node in ast.walk(parse(name)) if isinstance(node, ast.Try | ast.With)
    ]
    assert [(name, node.lineno) for name, node in blocks if any(is_vllms(module) for module, _ in imports(node))] == []


def test_the_version_is_asked_for_in_few_modules():
    readers = {name for name in MODULES if "vllm_version" in {bound for _, bound in imports(parse(name))}}
    assert sorted(readers - VERSION_READERS) == []


def test_what_moved_between_versions_is_imported_from_one_module():
    nodes = [(name, node) for name in MODULES if name != COMPAT for node in ast.walk(parse(name))]
    taken = [
        (name, alias.name)
        for name, node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm")
        for alias in node.names
        if alias.name in moved_names()
    ]
    assert taken == []
    assert {"build_app", "GracefulHTTPError", "setup_server", "make_arg_parser"} <= moved_names()


def test_modules_have_a_licence():
    first = {name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in MODULES.items()}
    without = [name for name, line in first.items() if line != "# SPDX-License-Identifier: Apache-2.0"]
    assert without == ["kernels/__init__.py"]


def test_no_test_imports_from_another():
    modules = {path: imports(ast.parse(path.read_text(encoding="utf-8"))) for path in (ROOT / "tests").rglob("*.py")}
    taken = [(path.name, module) for path, names in modules.items() for module, _ in names]
    assert [each for each in taken if re.match(r"tests\.(.*\.)?test_", each[1])] == []


def test_the_kernels_package_itself_is_empty():
    """Importing one kernel imports nothing else."""
    assert MODULES["kernels/__init__.py"].read_bytes() == b""


@pytest.mark.parametrize(
    ("code", "is_patch"),
    [
        ("import vllm.config\nvllm.config.X.y = 1", True),
        ("from vllm.config import X as Y\nY.z.y[0] += 1", True),
        ("def f():\n    from vllm import config\n    a, config.X = 1, 2", True),
        ("from vllm.config import X\nsetattr(X, 'y', 1)", True),
        ("from engine_ext.wire.vllm_compat import build_app\ndel build_app.x", True),
        ("from vllm.config import X\nX = X()\nx.y = X.z", False),
        ("import a\na.vllm = 1", False),
    ],
)
def test_a_patch_would_be_noticed(code, is_patch):
    assert bool(patches(ast.parse(code))) == is_patch
