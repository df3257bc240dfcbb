# SPDX-License-Identifier: Apache-2.0
"""Extracts the text of PDF and HTML files in a limited process.

Run as a program with the file's suffix, it reads the file from standard input and writes JSON: ``{"text": …}`` or
``{"error": …}``.
"""

import asyncio
import io
import json
import os
import resource
import sys
from typing import Any, Final

MAX_PAGES = 2000
MAX_CHARACTERS = 16 << 20
MAX_SECONDS = 60
MAX_MEMORY_BYTES = 2 << 30


class ExtractionError(ValueError):
    """A file without readable text; the message says why."""


async def extracted(file: bytes, suffix: str) -> str:
    """Text of a file with one of the suffixes in ``READERS``. Raises :class:`ExtractionError`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # keeps this folder's modules from shadowing the standard library
        __file__,
        suffix,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(MAX_SECONDS):
            said, _ = await process.communicate(file)
    except TimeoutError as error:
        raise ExtractionError(f"reading this file takes longer than {MAX_SECONDS} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return _parsed(said)


def _parsed(said: bytes) -> str:
    try:
        answer: dict[str, Any] = json.loads(said)
    except ValueError as error:  # it was killed: out of memory or CPU time
        raise ExtractionError(f"reading this file takes more than {MAX_MEMORY_BYTES >> 30} GiB of memory") from error
    if "error" in answer:
        raise ExtractionError(answer["error"])
    return str(answer["text"])


def read_pdf(file: bytes) -> str:
    """Text of all pages, a blank line and a form feed between them. Runs in the process of its own."""
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    try:
        reader = PdfReader(io.BytesIO(file))
        if reader.is_encrypted and not reader.decrypt(""):
            raise ExtractionError("this PDF is encrypted: remove its password first")
        if len(reader.pages) > MAX_PAGES:
            raise ExtractionError(f"this PDF has {len(reader.pages)} pages; at most {MAX_PAGES} are read")
        text = _joined(reader)
    except PyPdfError as error:
        raise ExtractionError(f"this is not a PDF that can be read: {error}") from error
    if not text.strip():
        raise ExtractionError("there is no text in this PDF; a scan would have to go through OCR first")
    return text


def read_html(file: bytes) -> str:
    """A page as Markdown, without scripts, links and pictures. Runs in the process of its own."""
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    page = BeautifulSoup(file, "html.parser")
    for unread in page(["script", "style", "noscript", "template", "head"]):
        unread.decompose()
    text = str(MarkdownConverter(heading_style="atx", strip=["a", "img"]).convert_soup(page))
    if not text.strip():
        raise ExtractionError("there is no text in this HTML file")
    if len(text) > MAX_CHARACTERS:
        raise ExtractionError(f"there are more than {MAX_CHARACTERS >> 20} million characters in this file")
    return text


READERS: Final = {".pdf": read_pdf, ".html": read_html, ".htm": read_html}
"""Reads a file's bytes; raises :class:`ExtractionError`."""


def _joined(reader: Any) -> str:
    pages: list[str] = []
    length = 0
    for page in reader.pages:
        pages.append(page.extract_text().strip())
        length += len(pages[-1])
        if length > MAX_CHARACTERS:
            raise ExtractionError(f"there are more than {MAX_CHARACTERS >> 20} million characters in this PDF")
    return "\n\n\f".join(pages)


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    os.nice(10)  # requests have priority
    try:
        answer = {"text": READERS[sys.argv[1]](sys.stdin.buffer.read())}
    except ExtractionError as error:
        answer = {"error": str(error)}
    except MemoryError:
        return
    except Exception as error:  # a broken file may cause any error in the parser
        answer = {"error": f"this file can't be read: {type(error).__name__}: {error}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main()
