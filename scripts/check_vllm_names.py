#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check statically that vLLM, or vLLM-Ascend's vLLM, has the names that Tessera uses.

Reads the sources in wheels or in folders with the package vllm, and looks up every name that Tessera imports, the
arguments it passes, the methods of AsyncLLM it calls, and the hooks its connector implements. Prints a line for each
missing name and exits with 1 if there are any. Does not check behaviour.

    python3 scripts/check_vllm_names.py .venv/lib/python3.11/site-packages
    pip download --no-deps vllm==0.23.0 && python3 scripts/check_vllm_names.py vllm-0.23.0-*.whl
"""

import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPAT = "engine_ext.wire.vllm_compat"
LLM = ("vllm.v1.engine.async_llm", "AsyncLLM")
# Attributes that are no part of an interface: docs/vllm-versions.md says who uses them.
INTERNALS = {
    ("vllm.v1.request", "Request"): {
        "_block_hasher",
        "all_token_ids",
        "block_hashes",
        "cache_salt",
        "num_preemptions",
        "num_tokens",
        "skip_reading_prefix_cache",
        "update_block_hashes",
    },
    ("vllm.v1.core.block_pool", "BlockPool"): {"cached_block_hash_to_block", "evict_blocks", "null_block"},
    ("vllm.v1.core.block_pool", "BlockHashToBlockMap"): {"get_one_block", "insert"},
}
ASCENDS = (0, 23)
# Names that vLLM-Ascend's vLLM lacks: nothing calls them, or uses what needs them, there.
NEWER_NAMES = {"KVConnectorTransferResults"}
NEWER_HOOKS = {"get_transfer_results", "requires_kv_delivery"}
NEWER_METHODS = {"check_admission", "notify_kv_transfer_request_rejected", "release_kv_cache_memory"}
NEWER_FILES = "engine_ext/core/prefixes/"

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class VllmSources:
    """The modules of one vLLM by name; raises ``FileNotFoundError`` if ``path`` contains none."""

    def __init__(self, path: Path) -> None:
        self._root: zipfile.Path | Path = zipfile.Path(path) if path.suffix == ".whl" else path
        self._trees: dict[str, ast.Module] = {}

    @cached_property
    def version(self) -> tuple[int, ...]:
        text = (self._root / "vllm" / "_version.py").read_text(encoding="utf-8")
        found = re.search(r"^__version_tuple__ = version_tuple = \((\d+), (\d+)", text, re.MULTILINE)
        assert found is not None, "vllm/_version.py has no version"
        return tuple(int(number) for number in found.groups())

    @property
    def is_ascends(self) -> bool:
        return self.version == ASCENDS

    @cached_property
    def llm(self) -> ast.ClassDef:
        found = self.find(*LLM)
        assert isinstance(found, ast.ClassDef), f"{LLM} is not a class"
        return found

    @cached_property
    def llm_members(self) -> set[str]:
        return members(self.llm) | (NEWER_METHODS if self.is_ascends else set())

    def tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            *parents, name = module.split(".")
            path = self._root.joinpath(*parents, name)
            file = path.joinpath("__init__.py") if path.is_dir() else self._root.joinpath(*parents, f"{name}.py")
            if not file.exists():
                return None
            self._trees[module] = ast.parse(file.read_text(encoding="utf-8"))
        return self._trees[module]

    def find(self, module: str, name: str) -> ast.AST | None:
        """Definition of ``name`` in ``module``, or in the module that ``module`` imports it from."""
        if (tree := self.tree(module)) is None:
            return None
        for node in ast.walk(tree):
            if isinstance(node, Definition) and node.name == name:
                return node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._origin(module, node), alias.name) or self.tree(f"{module}.{name}")
            if isinstance(node, ast.Name | ast.Constant) and name == getattr(node, "id", getattr(node, "value", None)):
                return node  # a constant, or a lazily imported name
        return self.tree(f"{module}.{name}")

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return str(node.module)
        is_package = self._root.joinpath(*module.split(".")).is_dir()
        parents = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
        return ".".join([*parents, *([node.module] if node.module else [])])


def active(body: list[ast.stmt], *, is_ascends: bool) -> Iterator[ast.stmt]:
    """Statements without the inactive branch of ``if IS_ASCENDS``."""
    for node in body:
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "IS_ASCENDS":
            yield from node.body if is_ascends else node.orelse
        else:
            yield node


def problems(sources: VllmSources) -> Iterator[str]:
    """Names and arguments that Tessera uses and ``sources`` lack."""
    files = [path for package in ("app", "engine_ext") for path in sorted((ROOT / package).rglob("*.py"))]
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    for tree in trees.values():
        tree.body = list(active(tree.body, is_ascends=sources.is_ascends))
    for (module, name), used in INTERNALS.items():
        definition = sources.find(module, name)
        has = members(definition) if isinstance(definition, ast.ClassDef) else set()
        yield from (f"{module}: {name} has no {attribute}" for attribute in sorted(used - has))
    compat = imported(trees[f"{COMPAT.replace('.', '/')}.py"])
    for file, tree in trees.items():
        if sources.is_ascends and file.startswith(NEWER_FILES):
            continue
        names = imported(tree)
        for module, name in names.values():
            if sources.is_ascends and name in NEWER_NAMES:
                continue
            if module != COMPAT and sources.find(module, name) is None:
                yield f"{file}: {module} has no {name}"
        names = {
            bound: compat.get(origin[1], origin) if origin[0] == COMPAT else origin for bound, origin in names.items()
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield from (f"{file}:{node.lineno}: {each}" for each in wrong_call(node, names, sources))
            elif isinstance(node, ast.ClassDef):
                yield from (f"{file}:{node.lineno}: {each}" for each in wrong_hooks(node, names, sources))
            elif isinstance(node, ast.Attribute) and is_llm(node.value) and node.attr not in sources.llm_members:
                yield f"{file}:{node.lineno}: AsyncLLM has no {node.attr}"


def members(definition: ast.ClassDef) -> set[str]:
    """Methods of a class, and attributes that it sets on itself."""
    set_on_self = {node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute) and is_stored(node)}
    return set_on_self | {getattr(node, "name", "") for node in definition.body}


def imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Names bound to ``(module, name)`` of vLLM or ``vllm_compat``, except names defined in ``tree``."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    vllms = [node for node in nodes if node.module == COMPAT or str(node.module).partition(".")[0] == "vllm"]
    names = {alias.asname or alias.name: (str(node.module), alias.name) for node in vllms for alias in node.names}
    own = {node.name for node in tree.body if isinstance(node, Definition)}
    return {bound: origin for bound, origin in names.items() if bound not in own}


def is_llm(node: ast.expr) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")) == "llm"


def is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self"


def wrong_call(call: ast.Call, names: dict[str, tuple[str, str]], sources: VllmSources) -> Iterator[str]:
    """Keyword arguments that the called function does not accept."""
    called = getattr(call.func, "id", "")
    definition = sources.find(*names[called]) if called in names else None
    if isinstance(call.func, ast.Attribute) and is_llm(call.func.value):
        members = {node.name: node for node in sources.llm.body if isinstance(node, Definition)}
        definition = members.get(call.func.attr)
    if not isinstance(definition, Definition):
        return
    accepted = parameters(definition)
    for keyword in call.keywords:
        if keyword.arg and accepted is not None and keyword.arg not in accepted:
            yield f"{definition.name} takes no {keyword.arg}"


def parameters(definition: Definition) -> set[str] | None:
    """Parameter names of a function or class; ``None`` if it accepts any."""
    if isinstance(definition, ast.ClassDef):
        for node in definition.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return parameters(node)
        targets = [node.target for node in definition.body if isinstance(node, ast.AnnAssign)]
        return {target.id for target in targets if isinstance(target, ast.Name)} or None
    spec = definition.args
    return None if spec.kwarg else {each.arg for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}


def wrong_hooks(ours: ast.ClassDef, names: dict[str, tuple[str, str]], sources: VllmSources) -> Iterator[str]:
    """Methods that vLLM's class lacks, so that nothing calls them; abstract methods that ours lacks."""
    found = [sources.find(*names[base.id]) for base in ours.bases if isinstance(base, ast.Name) and base.id in names]
    bases = [theirs for theirs in found if isinstance(theirs, ast.ClassDef) and "Error" not in theirs.name]
    newer = NEWER_HOOKS if sources.is_ascends else set()
    own, of_bases = methods_of(ours), {name for theirs in bases for name in methods_of(theirs)}
    for name in own if bases else ():
        if not name.startswith("_") and name not in of_bases | newer | helpers(ours):
            yield f"{bases[0].name} has no {name}"
    for theirs in bases:
        for name, method in methods_of(theirs).items():
            is_abstract = any(getattr(each, "id", "") == "abstractmethod" for each in method.decorator_list)
            if is_abstract and name not in own:
                yield f"{ours.name} lacks {name}"
            if name in own and not takes(own[name].args, method.args):
                yield f"{ours.name}.{name} does not take what {theirs.name}'s does"


def methods_of(definition: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}


def helpers(ours: ast.ClassDef) -> set[str]:
    """Methods that only Tessera calls."""
    return {"moved", "refused"} if ours.name == "TransferStats" else set()


def takes(ours: ast.arguments, theirs: ast.arguments) -> bool:
    return bool(ours.vararg) or len(ours.args) >= len(theirs.args)


def main(paths: list[str]) -> int:
    if not paths:
        print(__doc__)
        return 2
    failed = False
    for path in paths:
        sources = VllmSources(Path(path))
        found = list(problems(sources))
        print(f"vLLM {'.'.join(map(str, sources.version))} in {path}: {len(found)} missing", *found, sep="\n  ")
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
