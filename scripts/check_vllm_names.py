#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check statically that vLLM, or vLLM-Ascend with its vLLM, has the names that Tessera uses.

Reads the sources in wheels, source archives or folders with the package vllm, and looks up every name that Tessera
imports, the arguments it passes, the methods of AsyncLLM it calls, and the hooks its connector implements. Where
vLLM-Ascend and torch_npu are given besides, also whether Tessera calls there what only raises, and whether the tests'
fakes of them are like them. Prints a line for each fault and exits with 1 if there are any. Does not check behaviour.

    python3 scripts/check_vllm_names.py .venv/lib/python3.11/site-packages
    pip download --no-deps vllm==0.23.0 vllm-ascend==0.23.0 torch-npu==2.10.0.post4
    python3 scripts/check_vllm_names.py vllm-0.23.0-*.whl vllm_ascend-*.whl torch_npu-*.whl
"""

import ast
import io
import re
import sys
import tarfile
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
ASCEND_INTERNALS = {("vllm_ascend.ascend_config", "AscendConfig"): {"enable_kv_nz"}}
PLATFORM = ("vllm_ascend.platform", "NPUPlatform")
# vLLM-Ascend's own torch.accelerator: torch_npu lacks what it asks devices for.
ACCELERATOR = "vllm_ascend.patch.platform.patch_torch_accelerator"
# What engine_ext/core/moves.py uses of torch's module for the device.
NPU_NAMES = {"Event", "current_stream", "set_device"}
NPU = "torch_npu.npu"
FAKES = "tests/kernels/fake_npu.py"
FAKED = {
    "FakeNpuPlatform": PLATFORM,
    "FakeMLAAttentionSpec": ("vllm_ascend.core.kv_cache_interface", "AscendMLAAttentionSpec"),
    "FakeModelFiles": ("vllm_ascend.quantization.utils", None),
    "FakeCaMemAllocator": ("vllm_ascend.device_allocator.camem", "CaMemAllocator"),
    "DeviceOperatorA2": ("vllm_ascend.device.device_op", "BaseDeviceAdaptor"),
    "DeviceOperatorA5": ("vllm_ascend.device.device_op", "A5DeviceAdaptor"),
}
"""Classes of ``FAKES``, and the module, or class of it, that each stands for."""
FAKED_OPERATORS = "FakeTorchNpu"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Root = zipfile.Path | Path


def opened(path: Path) -> Root:
    """The folder of packages in a wheel, a source archive, or ``path`` itself."""
    if path.suffix == ".whl":
        return zipfile.Path(path)
    if path.suffix != ".gz":
        return path
    buffer = io.BytesIO()
    with tarfile.open(path) as archive, zipfile.ZipFile(buffer, "w") as copy:
        for member in archive:
            if member.name.endswith(".py") and (file := archive.extractfile(member)):
                copy.writestr(member.name.partition("/")[2], file.read())
    return zipfile.Path(zipfile.ZipFile(buffer))


def has_package(root: Root, name: str) -> bool:
    return (root / name / "__init__.py").exists()


class VllmSources:
    """The modules of one vLLM by name, and of what else is in ``roots``."""

    def __init__(self, *roots: Root) -> None:
        self._roots = roots
        self._trees: dict[str, ast.Module] = {}

    def root_of(self, package: str) -> Root | None:
        """Where the package is, if anywhere."""
        return next((root for root in self._roots if has_package(root, package)), None)

    def path(self, module: str) -> Root:
        """Where the module's file or folder would be."""
        package, *names = module.split(".")
        return (self.root_of(package) or self._roots[0]).joinpath(package, *names)

    @cached_property
    def operators(self) -> dict[str, str]:
        """Parameters of torch_npu's operators as in its library: its Python sources have none."""
        files = [file for file in (self.path("torch_npu") / "lib").iterdir() if file.name.endswith(".so")]
        found = [re.findall(rb"\x00(\w+)\(([^\x00]*)\) -> ", file.read_bytes()) for file in files]
        return {name.decode(): spec.decode() for each in found for name, spec in each}

    @cached_property
    def version(self) -> tuple[int, ...]:
        text = (self.path("vllm") / "_version.py").read_text(encoding="utf-8")
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
            path, (parent, _, name) = self.path(module), module.rpartition(".")
            file = path / "__init__.py" if path.is_dir() else self.path(parent) / f"{name}.py"
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
        is_package = self.path(module).is_dir()
        parents = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
        return ".".join([*parents, *([node.module] if node.module else [])])


class Active(ast.NodeTransformer):
    """Drops the branches that don't run, of those that depend on ``IS_ASCENDS`` or ``is_ascend()``."""

    def __init__(self, *, is_ascends: bool) -> None:
        self._is_ascends = is_ascends

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        is_active = self._value(node.test)
        return node if is_active is None else node.body if is_active else node.orelse or [ast.Pass()]

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        is_active = self._value(node.test)
        return node if is_active is None else node.body if is_active else node.orelse

    def _value(self, test: ast.expr) -> bool | None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            value = self._value(test.operand)
            return None if value is None else not value
        called = test.func if isinstance(test, ast.Call) else test
        name = getattr(called, "id", getattr(called, "attr", ""))
        return self._is_ascends if name in ("IS_ASCENDS", "is_ascend") else None


def problems(sources: VllmSources) -> Iterator[str]:
    """Names and arguments that Tessera uses and ``sources`` lack."""
    files = [path for package in ("app", "engine_ext", "kernels") for path in sorted((ROOT / package).rglob("*.py"))]
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    for tree in trees.values():
        Active(is_ascends=sources.is_ascends).visit(tree)
    yield from lacking(INTERNALS, sources)
    if sources.is_ascends:
        yield from problems_on_ascend(trees, sources)
    compat = imported(trees[f"{COMPAT.replace('.', '/')}.py"])
    for file, tree in trees.items():
        if sources.is_ascends and file.startswith(NEWER_FILES):
            continue
        names = imported(tree)
        for module, name in names.values():
            if sources.is_ascends and name in NEWER_NAMES:
                continue
            if module != COMPAT and sources.root_of(module.split(".")[0]) and sources.find(module, name) is None:
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


def lacking(internals: dict[tuple[str, str], set[str]], sources: VllmSources) -> Iterator[str]:
    """Attributes that classes lack."""
    for (module, name), used in internals.items():
        definition = sources.find(module, name)
        has = members(definition) if isinstance(definition, ast.ClassDef) else set()
        yield from (f"{module}: {name} has no {attribute}" for attribute in sorted(used - has))


def problems_on_ascend(trees: dict[str, ast.Module], sources: VllmSources) -> Iterator[str]:
    """Report names that vLLM-Ascend or torch_npu lacks, methods that only raise there, and fakes that differ from them.

    A package that isn't given is skipped.
    """
    if sources.root_of("vllm_ascend"):
        yield from lacking(ASCEND_INTERNALS, sources)
        for file, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and (fault := fault_of_platform(node, sources)):
                    yield f"{file}:{node.lineno}: {fault}"
        for fake, (module, name) in FAKED.items():
            yield from unlike(fake, module, name, sources)
    if sources.root_of("torch_npu"):
        yield from (f"torch_npu.npu has no {name}" for name in sorted(NPU_NAMES) if not sources.find(NPU, name))
        for file, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and is_missing_in_torch_npu(ast.unparse(node), sources):
                    yield f"{file}:{node.lineno}: there is no {ast.unparse(node)}"
        yield from unlike_operators(sources)


def members(definition: ast.ClassDef) -> set[str]:
    """Methods of a class, and attributes that it sets on itself."""
    set_on_self = {node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute) and is_stored(node)}
    fields = {getattr(getattr(node, "target", None), "id", "") for node in definition.body}
    return set_on_self | fields | {getattr(node, "name", "") for node in definition.body}


def imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Names bound to ``(module, name)`` of vLLM or ``vllm_compat``, except names defined in ``tree``."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    packages = ("vllm", "vllm_ascend")
    vllms = [node for node in nodes if node.module == COMPAT or str(node.module).partition(".")[0] in packages]
    names = {alias.asname or alias.name: (str(node.module), alias.name) for node in vllms for alias in node.names}
    own = {node.name for node in tree.body if isinstance(node, Definition)}
    return {bound: origin for bound, origin in names.items() if bound not in own}


def fault_of_platform(node: ast.Attribute, sources: VllmSources) -> str | None:
    """Say why an attribute of ``current_platform`` or ``torch.accelerator`` can't be used on Ascend, if it can't."""
    match ast.unparse(node.value):
        case "current_platform":
            definition = member(sources, *PLATFORM, node.attr)
            if definition is None:
                return f"vLLM-Ascend's platform has no {node.attr}"
            return f"vLLM-Ascend's {node.attr} only raises" if only_raises(definition) else None
        case "torch.accelerator":
            tree = sources.tree(ACCELERATOR)
            has = {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)} if tree else set()
            return None if node.attr in has else f"torch.accelerator.{node.attr} is not for NPUs"
    return None


def member(sources: VllmSources, module: str, name: str | None, attribute: str) -> ast.AST | None:
    """Definition of a module's, a class's or its bases' attribute."""
    if name is None:
        return sources.find(module, attribute)
    definition = sources.find(module, name)
    if not isinstance(definition, ast.ClassDef):
        return None
    for node in definition.body:
        if attribute == getattr(node, "name", ""):
            return node
    if attribute in members(definition):
        return definition  # a field, or set by a method
    bases = [(module, base.id) for base in definition.bases if isinstance(base, ast.Name) and base.id != name]
    return next(filter(None, (member(sources, *base, attribute) for base in bases)), None)


def only_raises(definition: ast.AST) -> bool:
    """Whether it is a function of a docstring, perhaps, and ``raise``."""
    if not isinstance(definition, Function):
        return False
    body = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
    return len(body) == 1 and isinstance(body[0], ast.Raise)


def unlike(fake: str, module: str, name: str | None, sources: VllmSources) -> Iterator[str]:
    """Attributes of a fake that what it stands for lacks, and methods that take something else, or raise."""
    for attribute, ours in attributes_of_fake(fake).items():
        theirs = member(sources, module, name, attribute)
        where = f"{FAKES}: {fake}.{attribute}"
        if theirs is None:
            yield f"{where}: {name or module} has none"
        elif isinstance(ours, Function) and isinstance(theirs, Function):
            if signature(ours) != signature(theirs):
                yield f"{where} takes {signature(ours)}, {name or module}'s {signature(theirs)}"
            if only_raises(ours) != only_raises(theirs):
                yield f"{where}: one only raises, of it and {name or module}'s"


def attributes_of_fake(name: str) -> dict[str, ast.AST]:
    """Public methods of a class in ``FAKES``, and attributes that it sets."""
    tree = ast.parse((ROOT / FAKES).read_text(encoding="utf-8"))
    [fake] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    methods: dict[str, ast.AST] = {node.name: node for node in fake.body if isinstance(node, Function)}
    found = dict.fromkeys(members(fake) - {""}, fake) | methods
    return {attribute: node for attribute, node in found.items() if not attribute.startswith("_")}


def signature(function: Function) -> list[str]:
    """Parameters but the first ``self`` or ``cls``, with their defaults, without types."""
    spec = function.args
    named = [*spec.posonlyargs, *spec.args]
    missing: list[ast.expr | None] = [None] * (len(named) - len(spec.defaults))
    pairs = [*zip(named, [*missing, *spec.defaults], strict=True)]
    pairs = pairs[1:] if named and named[0].arg in ("self", "cls") else pairs
    keywords = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    return [*map(written, pairs), *(["*"] if spec.kwonlyargs else []), *map(written, keywords)]


def written(pair: tuple[ast.arg, ast.expr | None]) -> str:
    return pair[0].arg if pair[1] is None else f"{pair[0].arg}={ast.unparse(pair[1])}"


def is_missing_in_torch_npu(name: str, sources: VllmSources) -> bool:
    """Whether it is an operator or a function of torch_npu that is not there."""
    package, _, attribute = name.rpartition(".")
    if package == NPU:
        return sources.find(NPU, attribute) is None
    return package == "torch_npu" and attribute not in sources.operators and sources.tree(name) is None


def unlike_operators(sources: VllmSources) -> Iterator[str]:
    """Fakes of operators that take something else than the operators."""
    tree = ast.parse((ROOT / FAKES).read_text(encoding="utf-8"))
    [fake] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == FAKED_OPERATORS]
    for name, method in methods_of(fake).items():
        schema = sources.operators.get(name, "")
        theirs = [each.split()[-1] for each in schema.split(", ")]
        if signature(method) != theirs:
            yield f"{FAKES}: {name} takes {signature(method)}, torch_npu's {theirs}"


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
    if only_raises(definition):
        yield f"{definition.name} only raises"
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
    roots = {path: opened(Path(path)) for path in paths}
    vllms = {path: root for path, root in roots.items() if has_package(root, "vllm")}
    if not vllms:
        print(__doc__)
        return 2
    failed = False
    for path, root in vllms.items():
        sources = VllmSources(root, *(each for other, each in roots.items() if other not in vllms))
        found = list(problems(sources))
        beside = [name for name in ("vllm_ascend", "torch_npu") if sources.is_ascends and sources.root_of(name)]
        names = " and ".join([f"vLLM {'.'.join(map(str, sources.version))}", *beside])
        print(f"{names} in {path}: {len(found)} faults", *found, sep="\n  ")
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
