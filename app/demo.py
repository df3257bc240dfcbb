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
from evaluation.client import Answer, AskOptions, Mode, ServerError, TesseraClient
from evaluation.questions import Question
from evaluation.server import started_server
from training.language import DEFAULT_SYSTEM

DOCUMENTS = (
    Document("The access code of Falcon is 7342. Falcon's owner is Mira Tolan. The budget of Falcon is 640 euros."),
    Document("The access code of Condor is 1958. The deadline for Condor is March 14. Condor's status is paused."),
    Document("Heron's owner is Tobin Vesta. The room number of Heron is 217. The access code of Heron is 4406."),
    Document("The mayor of Lovik is Sena Maro. Lovik's population is 48210. The river of Lovik is Drena."),
    Document("Gredan's mayor is Jolun Bara. The founding year of Gredan is 1907. The postal code of Gredan is 30518."),
    Document("The population of Sholvan is 91377. Sholvan's river is Tesk. Sholvan has the market day June 3."),
    Document("Mira Tolan's job is pilot. The phone number of Mira Tolan is 583026. The badge number of Mira is 7719."),
    Document("Tobin Vesta's job is baker. The home town of Tobin Vesta is Lovik. Tobin Vesta's birth year is 1984."),
    Document("The favorite color of Sena Maro is green. As for Sena Maro, the employer is Zunor."),
    Document("The price of Milux is 349 dollars. Milux's maker is Zunor. The weight of Milux is 820 grams."),
    Document("The material of Kortas is bamboo. Kortas's designer is Vera Stolm. The price of Kortas is 75 dollars."),
    Document("Brenol's color is orange. The serial number of Brenol is 660142. The release date of Brenol is May 9."),
)
QUESTIONS = (
    "What is the access code of Falcon?",
    "Do you know Lovik's mayor?",
    "Tell me the price of Milux.",
    "What is Tobin Vesta's job?",
    "What is the access code of Milux?",
)
_MODES: dict[Mode, str] = {"shared": "chunks reused", "full": "full attention"}

_CURL = """\
curl -s {url}/v1/rag/chat -H 'content-type: application/json' -d '{{
    "system": "Answer from the documents.", "max_tokens": 32,
    "chunks": ["The access code of Falcon is 7342.", "The access code of Heron is 4406."],
    "question": "What is the access code of Heron?"}}'"""


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
        await _ingest(client, info.model, console)
        await _ask_all(client, info.model, console)


async def _ingest(client: TesseraClient, model: str, console: Console) -> None:
    """Each document's KV is computed once, behind the system prompt."""
    console.print("\n[bold]Twelve documents[/], each computed once:")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("documents", total=len(DOCUMENTS))
        tokens = 0
        for document in DOCUMENTS:
            answer = await client.ask(_question("?", [document]), "shared", AskOptions(model, max_tokens=1))
            tokens += sum(chunk["tokens"] for chunk in answer.cache["chunks"])
            bar.update(task, advance=1, description=f"documents, {tokens} tokens")


async def _ask_all(client: TesseraClient, model: str, console: Console) -> None:
    console.print("\n[bold]Five questions[/], the documents in another order each time:")
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
