# SPDX-License-Identifier: Apache-2.0
"""The command ``tessera doctor``: a line per check, and a verdict."""

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from app.arguments import parse, refusal
from app.commands.doctor import environment
from app.commands.doctor.finding import Finding
from app.models.default_model import present_model
from app.models.packaged_models import local_model
from machine.folders import tessera_home
from machine.progress import first_line, say
from machine.server_process import ended_by_signals

_USAGE = """usage: tessera doctor [MODEL] [--json] [any flag of tessera serve]

Check whether tessera serve MODEL, with these flags, would reuse chunks here. Examines the installation, device, memory
and everything that the flags name, starts the engine and runs its self-check; gives advice where something is wrong.
Without MODEL: the default model if it was downloaded, else the tiny demo model. With --json the findings are one JSON
object on standard output.

exit code: 0 chunks are reused, 1 they are not, 2 invalid flags for tessera serve, 130 interrupted"""


class FailedError(Exception):
    """A check has failed, so later checks are skipped."""


def main(arguments: Sequence[str]) -> int:
    """Runs all checks; returns the exit code documented in the usage."""
    if {"-h", "--help"} & set(arguments):
        print(_USAGE)
        return 0
    flags = [argument for argument in arguments if argument != "--json"]
    report = _Report(as_json=len(flags) < len(arguments))
    try:
        with ended_by_signals():
            code = _examine(flags, report)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    if code != 2:
        report.end(f"tessera serve {shlex.join(flags)}".strip())
    return code


def _examine(flags: list[str], report: "_Report") -> int:
    # vLLM's INFO log would bury the findings.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        report.add_all(environment.findings())
        return _examine_flags(flags, report)
    except FailedError:
        return 1


def _examine_flags(flags: list[str], report: "_Report") -> int:
    from app.commands.doctor import flags as flag_checks
    from app.commands.doctor.trial import refused_before_start, tried
    from app.settings import load_settings
    from engine_ext.start.support import check_flags

    args = parse(flags, "tessera doctor")
    try:
        settings = load_settings(args)
        check_flags(args)
        args.model = local_model(args.model_tag) if args.model_tag else present_model()
        report.add_all(flag_checks.findings(args, settings))
        report.add_all(refused_before_start(args, settings))
    except FailedError:
        raise
    except Exception as error:
        say(refusal(error, args) or f"{args.model}: {type(error).__name__}: {first_line(error)}")
        return 2
    report.add_all(tried(flags, settings, tessera_home() / "doctor.log"))
    return 0


class _Report:
    """Prints each finding at once, or all of them as JSON at the end."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._findings: list[Finding] = []

    def add_all(self, findings: Iterable[Finding]) -> None:
        """Adds findings; then raises :class:`FailedError` if one is a failure."""
        for finding in findings:
            self._findings.append(finding)
            if not self._as_json:
                print(
                    f"{finding.state:4} {finding.text}" + (f"\n     → {finding.fix}" if finding.fix else ""), flush=True
                )
        if self._failure() is not None:
            raise FailedError

    def end(self, command: str) -> None:
        """Prints the verdict on a command."""
        failure = self._failure()
        if self._as_json:
            reason = failure.text if failure else None
            checks = [asdict(finding) for finding in self._findings]
            print(json.dumps({"reuse": failure is None, "reason": reason, "checks": checks}, indent=1))
        elif failure is None:
            print(f"\nChunks are reused: {command}")
        else:
            print(f"\nNothing would be reused: {failure.text}")

    def _failure(self) -> Finding | None:
        return next((finding for finding in self._findings if finding.state == "FAIL"), None)
