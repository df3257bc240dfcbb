# SPDX-License-Identifier: Apache-2.0
"""Tries a folder of troublesome documents without a server; prints RIGHT or WRONG, and what was seen.

    python tests/try_all.py FOLDER [NUMBER …]

The inputs (NUMBER-NAME/FILE) are after public bug reports of comparable projects; the project's tests have inputs of
their own for each.
"""

import argparse
import asyncio
import os
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from app.collections.passages import FileRecord, Passage, passages_of
from app.collections.retrieval import Retrieval
from app.collections.retrievers import Bm25
from app.collections.store import About, Collections, Corpus
from app.commands import ingest
from app.documents.document import Document
from app.documents.document_tokenizer import DocumentTokenizer
from app.documents.readers import read
from app.documents.splitting import split
from machine.http_client import http_client

SMOLLM2 = Path("~/.cache/tessera/models/SmolLM2-135M-Instruct/tokenizer.json").expanduser()
Seen = tuple[bool, Any]
"""Whether it is right, and what was seen."""


class Cases:
    """The cases of a folder, by number."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self._folder = folder
        self._tokenizer = DocumentTokenizer(tokenizer.read_text())

    def _file(self, path: str) -> bytes:
        return (self._folder / path).read_bytes()

    def _text(self, path: str) -> str:
        return read(self._file(path), path).text

    def _count(self, document: Document) -> int:
        return len(self._tokenizer.encode(document.render()))

    def _passages(self, path: str, most: int = 256) -> tuple[Passage, ...]:
        pieces = split(read(self._file(path), path), most, self._count)
        return passages_of(pieces, Path(path).name, "c")

    def _asked(self, query: str, paths: Sequence[str]) -> list[str]:
        """The files that a question finds."""
        files = {path: FileRecord(path, "", 1, 256, self._passages(path)) for path in paths}
        corpus = Corpus(About("c", "default", "", 256, 0.0), files)
        ranked = asyncio.run(Bm25().rank(query, corpus, 4))
        return [corpus.passages[place].file for place, _ in ranked]

    def case_01(self) -> Seen:
        found = [(each.title, each.text[:40]) for each in self._passages("01-heading-spaces/table.md")]
        return len(found) == 1, found

    def case_02(self) -> Seen:
        found = [each.text for each in self._passages("02-head-not-closed/hours.html")]
        return "nine" in str(found) and "\n- " in found[-1], found

    def case_03(self) -> Seen:
        text = self._text("03-superscript/bridge.html")
        return "3201" not in text and "106" not in text, text

    def case_04(self) -> Seen:
        found = [self._text(f"04-utf8-guessed/{name}").strip()[-40:] for name in ("brand.html", "family.html")]
        return "Brand™" in found[0] and "👧" in found[1], found

    def case_06(self) -> Seen:
        pages = [each.page for each in self._passages("06-page-numbers/manual.pdf", 140)]
        alone = self._passages("06-page-numbers/one-page.pdf")[0].page
        return (pages, alone) == ([1, 2, 3, 4], 1), (pages, alone)

    def case_08(self) -> Seen:
        text = "\n".join(each.text for each in self._passages("08-code-indentation/config.md"))
        return all(line in text for line in ("\n  tls:", "\n    key:", "\n   - Use")), text

    def case_09(self) -> Seen:
        found = [
            (p.title, p.text) for name in ("faq.html", "card.md") for p in self._passages(f"09-headings-only/{name}")
        ]
        return "320" in str(found) and "4711" in str(found), found

    def case_10(self) -> Seen:
        path = "10-underscores/settings.html"
        text, found = self._passages(path)[0].text, self._asked("PUMP_MAX_PRESSURE", [path])
        return bool(found) and "\\" not in text, (text[:40], found)

    def case_12(self) -> Seen:
        paths = ["12-stop-words/it.txt", "12-stop-words/bread.txt"]
        found = {query: self._asked(query, paths) for query in ("IT", "Who is in IT?")}
        return all(found.values()), found

    def case_13(self) -> Seen:
        collections = Collections(Path(tempfile.mkdtemp()))
        about = collections.begin("default", "m", None, None, 256)
        collections.put(about, FileRecord("bridge.txt", "", 1, 256, self._passages("13-agent-turns/bridge.txt")))
        turns: list[Any] = [{"role": "user", "content": "How long is the Milton Bridge?"}]
        for number in "12":
            use = {"type": "tool_use", "id": number, "name": "f", "input": {}}
            result = {"type": "tool_result", "tool_use_id": number, "content": "ok"}
            turns += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        body = {"retrieve": {"collection": "m"}, "messages": turns}
        found = asyncio.run(Retrieval(collections, Bm25()).fill_body("/v1/messages", body))
        return bool(list(found)), found

    def case_14(self) -> Seen:
        names = [path.name for path in (self._folder / "14-file-names" / "folder").iterdir()]
        found = {ascii(name): {unicodedata.category(each) for each in name} & {"Cc", "Cs"} for name in names}
        return bool(names) and not any(found.values()), found

    def case_15(self) -> Seen:
        folder = Path(tempfile.mkdtemp())
        Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt")).write_text("x")
        os.mkfifo(folder / "pipe.txt")
        with redirect_stderr(StringIO()) as said:
            code = ingest.main([str(folder), "--collection", "c", "--server", "http://127.0.0.1:9"])
        return code == 1 and "not UTF-8" in said.getvalue() and "not a regular file" in said.getvalue(), said.getvalue()

    def case_16(self) -> Seen:
        os.environ["HTTP_PROXY"] = "http://proxy.example:3128"
        client = http_client("http://127.0.0.1:8000")
        pool: Any = client._transport_for_url(client.base_url)
        del os.environ["HTTP_PROXY"]
        return "Proxy" not in type(pool._pool).__name__, type(pool._pool).__name__

    def case_18(self) -> Seen:
        titles = [[p.title for p in self._passages(f"18-fences/{name}")] for name in ("readme.md", "nested.md")]
        return titles == [["Install", "Use", "Clean"], ["How to write docs", "Next"]], titles

    def case_20(self) -> Seen:
        found = [each.text for each in self._passages("20-chinese/bridge.txt", 128)]
        return len(found) > 1 and all(text[-1] in "。！？；" for text in found), [text[-6:] for text in found]

    def case_23(self) -> Seen:
        found = self._passages("23-base64-picture/notes.md")
        return len(found) < 5, [(each.text, each.tokens) for each in found][:5]

    def case_28(self) -> Seen:
        text = self._text("28-form/form.pdf")
        return "7342" in text, text

    def case_30(self) -> Seen:
        text = self._text("30-utf16/notes.txt")
        return "7342" in text and "UTF" not in text, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(";")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("numbers", nargs="*")
    parser.add_argument("--tokenizer", type=Path, default=SMOLLM2, help="tokenizer.json of a model")
    args = parser.parse_args()
    cases = Cases(args.folder, args.tokenizer)
    for name in sorted(each for each in dir(cases) if each.startswith("case_")):
        number = name.removeprefix("case_")
        if args.numbers and number not in args.numbers:
            continue
        tried: Callable[[], Seen] = getattr(cases, name)
        try:
            is_right, seen = tried()
        except Exception as error:
            is_right, seen = False, f"{type(error).__name__}: {error}"
        print(f"{number} {'RIGHT' if is_right else 'WRONG'}  {seen!r:.300}")


if __name__ == "__main__":
    main()
