# SPDX-License-Identifier: Apache-2.0
"""`tessera demo`: serves the demo model, and shows what happens to a dozen documents and five questions."""

import argparse
import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from app.demo_model import DEMO_MODEL
from app.documents import Document
from app.folders import tessera_home
from app.progress import say
from app.server_process import ServerProcess
from evaluation.client import Answer, AskOptions, ServerError, TesseraClient
from evaluation.questions import Question
from evaluation.server import started_server
from training.language import DEFAULT_SYSTEM

DOCUMENTS = (
    Document("The access code of Falcon is 7342. The owner of Falcon is Mira Tolan. The budget of Falcon is 64 euros."),
    Document("The access code of Condor is 1958. The deadline of Condor is March 14. The status of Condor is paused."),
    Document("The owner of Tivek is Tobin Vesta. The room number of Tivek is 217. The access code of Tivek is 4406."),
    Document("The mayor of Lovik is Sena Maro. The population of Lovik is 48210. The river of Lovik is Drena."),
    Document("We know that the mayor of Gredan is Jolun Bara. The postal code of Gredan is 30518."),
    Document("The population of Sholvan is 91377. The river of Sholvan is Tesk. The market day of Sholvan is June 3."),
    Document("Since last year the job of Dana Wirel is pilot. The phone number of Dana Wirel is 583026."),
    Document("The job of Korin Hadas is baker. The home town of Korin Hadas is Lusten."),
    Document("The favorite color of Otira is green. On file the employer of Otira is Zunor."),
    Document("The price of Milux is 349 dollars. The maker of Milux is Pelar. The weight of Milux is 820 grams."),
    Document("The material of Kortas is bamboo. On file the designer of Kortas is Vera Stolm."),
    Document("The color of Brenol is orange. The serial number of Brenol is 660142."),
)
QUESTIONS = (
    "What is the access code of Falcon?",
    "Do you know the mayor of Lovik?",
    "Tell me the price of Milux.",
    "What is the job of Korin Hadas?",
    "Tell me the room number of Falcon.",
)
_MODES: dict[str, str] = {"shared": "chunks reused", "full": "full attention"}

_CURL = """\
curl -s {url}/v1/rag/chat -H 'content-type: application/json' -d '{{
    "system": "Answer from the documents.", "max_tokens": 32,
    "chunks": ["The access code of Falcon is 7342.", "The access code of Tivek is 4406."],
    "question": "What is the access code of Tivek?"}}'"""


def main(argv: Sequence[str]) -> int:
    """Runs `tessera demo`; returns its exit code: 0, 2 if it can't be shown, 130 on Ctrl-C."""
    args = _parser().parse_args(argv)
    log = tessera_home() / "demo.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with started_server(str(DEMO_MODEL), (), log, args.port) as server:
            asyncio.run(_tell(server.url, Console(highlight=False)))
            return 0 if args.once else _serve_on(server, log)
    except (ServerError, OSError) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("stopped")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tessera demo", description=__doc__.partition(": ")[2].strip())
    parser.add_argument("--port", type=int, default=8000, help="of the server (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="end after the last question instead of serving on")
    return parser


def _serve_on(server: ServerProcess, log: Path) -> int:
    say(f"serving on at {server.url} (interactive API page: {server.url}/docs); Ctrl-C stops. Try:")
    print(_CURL.format(url=server.url), flush=True)
    server.process.wait()
    say(f"the server has ended; what it said is in {log}")
    return 2


async def _tell(url: str, console: Console) -> None:
    async with TesseraClient(url) as client:
        info = await client.describe()
        if info.cache_off:
            console.print(f"The chunk cache is off: {info.cache_off}", style="red", markup=False)
        await _ingest(client, console)
        await _ask_all(client, info.model, console)


async def _ingest(client: TesseraClient, console: Console) -> None:
    """Each document's KV is computed ahead of time, behind the system prompt."""
    console.print("\n[bold]Twelve documents[/], each computed once:")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("documents", total=len(DOCUMENTS))
        tokens = 0
        async for line in client.ingest(DEFAULT_SYSTEM, DOCUMENTS):
            if "error" in line:
                raise ServerError(f"a document can't be cached: {line['error']}")
            if "progress" in line:
                tokens += line["tokens"]
                done = line["progress"]["done"]
                bar.update(task, completed=done, description=f"documents, {tokens} tokens")


async def _ask_all(client: TesseraClient, model: str, console: Console) -> None:
    console.print("\n[bold]Five questions[/], the documents in another order each time:")
    for mode in _MODES:  # so that no first time is among those shown
        await client.ask(_question(QUESTIONS[0], DOCUMENTS[:2]), mode, AskOptions(model, max_tokens=2))
    rng = random.Random(0)
    for text in QUESTIONS:
        question = _question(text, rng.sample(DOCUMENTS, len(DOCUMENTS)))
        console.print(f"\n  [bold]{text}[/]")
        for mode, label in _MODES.items():
            answer = await client.ask(question, mode, AskOptions(model, max_tokens=32))
            console.print(_line(label, answer), soft_wrap=True)
    console.print("\n  [green]■[/] found in the cache  [yellow]□[/] computed for this request\n")


def _question(text: str, documents: Sequence[Document]) -> Question:
    return Question("demo", DEFAULT_SYSTEM, tuple(documents), text, ())


def _line(label: str, answer: Answer) -> Text:
    """What one way of answering gave, and what it took."""
    tokens, chunks = answer.cache["tokens"], answer.cache["chunks"]
    squares = Text(" ")
    for chunk in chunks if answer.cache["mode"] == "chunked" else ():
        squares.append(*("■", "green") if chunk["status"] == "hit" else ("□", "yellow"))
    first = f"{1000 * answer.ttft_s:5.0f} ms" if answer.ttft_s is not None else "   –"
    took = f"  first token {first}, {tokens['reused']} of {tokens['prompt']} tokens reused"
    return Text.assemble(f"    {label:15}", (f"{answer.text:45}", "cyan"), took, squares)
