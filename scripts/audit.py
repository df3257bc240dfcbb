# SPDX-License-Identifier: Apache-2.0
"""Writes a software bill of materials (CycloneDX) and checks it for known vulnerabilities (pip-audit, PyPI).

    python scripts/audit.py [--environment DIR] [--output DIR] [-- FLAG OF PIP-AUDIT ...]

The interpreter has both tools (`make audit` installs them in .venv-audit) and is not the audited environment. Exits
with 1 if there are vulnerabilities. Packages that can't be checked (all of them without a network) are reported, but
are no failure.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NO_NETWORK = ("ConnectionError", "Could not connect")
"""Marks of a missing network in pip-audit's output, a traceback or a message."""


def list_installed(environment: Path, path: Path) -> None:
    """Writes the bill of materials of a virtual environment."""
    program = [sys.executable, "-m", "cyclonedx_py", "environment", str(environment)]
    flags = ["--no-validate", "--pyproject", str(ROOT / "pyproject.toml")]  # validating takes half a minute
    subprocess.run([*program, *flags, "-o", str(path)], check=True)


def look_up(path: Path, flags: list[str]) -> list[dict[str, Any]]:
    """Packages with their vulnerabilities or the reason for skipping them; also written to ``path``.

    Empty without a network. Raises ``SystemExit`` with pip-audit's output on other failures.
    """
    program = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--skip-editable"]
    path.unlink(missing_ok=True)
    done = subprocess.run([*program, "-f", "json", "-o", path, *flags], stderr=subprocess.PIPE, text=True, check=False)
    if not path.exists():
        if any(name in done.stderr for name in NO_NETWORK):
            return []
        sys.exit(done.stderr)
    packages: list[dict[str, Any]] = json.loads(path.read_text())["dependencies"]
    return packages


def words(packages: list[dict[str, Any]]) -> list[str]:
    """One line per vulnerability, and a summary."""
    if not packages:
        return ["audit: nothing could be looked up: no connection to PyPI"]
    found = [(package, flaw) for package in packages for flaw in package.get("vulns", [])]
    lines = [
        f"{package['name']} {package['version']}: {flaw['id']}, fixed in {', '.join(flaw['fix_versions']) or 'none'}"
        for package, flaw in found
    ]
    num_skipped = sum("skip_reason" in package for package in packages)
    skipped = f"; {num_skipped} could not be looked up" if num_skipped else ""
    return [*lines, f"audit: known vulnerabilities: {len(found)}, in {len(packages) - num_skipped} packages{skipped}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv", help="the audited virtual environment")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="folder for sbom.json and audit.json")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="for pip-audit, such as --ignore-vuln ID")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    list_installed(arguments.environment, arguments.output / "sbom.json")
    (site_packages,) = arguments.environment.glob("lib/python3.*/site-packages")
    flags = ["--path", str(site_packages), *arguments.flags]
    packages = look_up(arguments.output / "audit.json", flags)
    print(*words(packages), sep="\n")
    return int(any(package.get("vulns") for package in packages))


if __name__ == "__main__":
    sys.exit(main())
