# SPDX-License-Identifier: Apache-2.0
"""`tessera demo`: serves a small model, and shows how documents and questions are processed."""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from app.advice import off_message
from app.documents.document import Document
from app.models.default_model import DEFAULT_MODEL_FLAGS, default_model
from app.models.packaged_models import MODELS, PackagedModelError, local_model
from machine.folders import tessera_home
from machine.progress import say
from machine.server_process import ServerProcess
from measuring.kit.client import Answer, ServerError
from measuring.kit.servers import started_server
from measuring.quality.client import AskOptions, ServerInfo, TesseraClient
from measuring.quality.questions.questions import Question
from web.example import Example, example_file

_MAX_TOKENS = 24

_CURL = """\
curl -s {url}/v1/rag/chat -H 'content-type: application/json' -d '{{
    "system": "Answer from the documents.", "max_tokens": 24,
    "chunks": ["The Milton Bridge is 320 meters long.", "The Old Mill Museum shows farm tools."],
    "question": "How long is the Milton Bridge?"}}'"""


def main(argv: Sequence[str]) -> int:
    """Runs `tessera demo`. Returns the exit code: 0, 2 if the demo fails, 130 on Ctrl-C."""
    args = _parser().parse_args(argv)
    log = tessera_home() / "demo.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        model = local_model(args.model) if args.model else default_model()
        with started_server(model, DEFAULT_MODEL_FLAGS, log, args.port) as server:
            asyncio.run(_tell(server.url, Example.read(example_file(model)), Console(highlight=False)))
            return 0 if args.once else _serve_on(server, log)
    except (PackagedModelError, ServerError, OSError) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("stopped")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tessera demo", description=(__doc__ or "").partition(": ")[2].strip())
    model = f"a folder, or one of {', '.join(MODELS)}, downloaded first (default: smollm2)"
    parser.add_argument("--model", help=model)
    parser.add_argument("--port", type=int, default=8000, help="port of the server (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="end after the last question instead of serving on")
    return parser


def _serve_on(server: ServerProcess, log: Path) -> int:
    say(f"serving on at {server.url}, where a page takes your own text and questions; Ctrl-C stops. Or try:")
    print(_CURL.format(url=server.url), flush=True)
    server.process.wait()
    say(f"the server has ended; its log is {log}")
    return 2


async def _tell(url: str, example: Example, console: Console) -> None:
    async with TesseraClient(url) as client:
        info = await client.describe()
        if info.cache_off:
            console.print(off_message(info.cache_off), style="red", markup=False)
        await _ingest(client, example, console)
        await _ask_all(client, info, example, console)


async def _ingest(client: TesseraClient, example: Example, console: Console) -> None:
    """Computes each document's KV ahead of time, behind the system prompt."""
    number = len(example.documents)
    console.print(f"\n[bold]{number} documents[/], each computed once:")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("documents", total=number)
        tokens = 0
        async for line in client.ingest(example.system, list(map(Document, example.documents))):
            if "error" in line:
                raise ServerError(f"a document can't be cached: {line['error']}")
            if "progress" in line:
                tokens += line["tokens"]
                done = line["progress"]["done"]
                bar.update(task, completed=done, description=f"documents, {tokens} tokens")


async def _ask_all(client: TesseraClient, info: ServerInfo, example: Example, console: Console) -> None:
    modes = {info.strategy: "chunks reused", "full": "full attention"}
    options = AskOptions(info.model, _MAX_TOKENS)
    console.print(f"\n[bold]{len(example.questions)} questions[/], the documents in another order each time:")
    for mode in modes:  # warm up both modes first
        await client.ask(_question(example, 0, range(2)), mode, options)
    for number, order in enumerate(example.orders):
        question = _question(example, number, order)
        console.print(f"\n  [bold]{question.question}[/]")
        for mode, label in modes.items():
            answer = await client.ask(question, mode, options)
            console.print(_line(label, answer), soft_wrap=True)
    console.print("\n  [green]■[/] found in the cache  [yellow]□[/] computed for this request\n")


def _question(example: Example, number: int, order: Sequence[int]) -> Question:
    documents = tuple(Document(example.documents[i]) for i in order)
    return Question("demo", example.system, documents, example.questions[number], ())


def _line(label: str, answer: Answer) -> Text:
    """Formats the time of an answer, the chunks that were found, and its text."""
    tokens, chunks = answer.cache["tokens"], answer.cache["chunks"]
    squares = Text()
    for chunk in chunks if answer.cache["mode"] == "chunked" else ():
        squares.append(*("■", "green") if chunk["status"] == "hit" else ("□", "yellow"))
    squares.pad_right(len(chunks) - len(squares))
    first = f"{1000 * answer.ttft_s:5.0f} ms" if answer.ttft_s is not None else "    –   "
    took = f"{first} to the first token, {tokens['reused']:4} of {tokens['prompt']} tokens reused  "
    return Text.assemble(f"    {label:15}", took, squares, "  ", (" ".join(answer.text.split()), "cyan"))
