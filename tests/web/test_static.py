# SPDX-License-Identifier: Apache-2.0
"""The page's files and their responses."""

import re

import pytest
from fastapi import FastAPI

from app.models.demo_model import DEMO_MODEL
from tests.serving import client_of
from web.example import STATIC, Example, example_file
from web.page import pages, read

FILES = sorted(path.name for path in STATIC.iterdir())
POLICY = {
    **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'"),
    **dict.fromkeys(("script-src", "style-src", "connect-src"), "'self'"),
    "img-src": "'self' data:",
}


async def get(path, example=None, **headers):
    app = FastAPI()
    app.include_router(pages(example))
    async with client_of(app) as client:
        return await client.get(path, headers=headers)


async def test_every_answer_has_strict_headers():
    for path in ("/", *(f"/web/{name}" for name in FILES), "/web/none.js"):
        answer = await get(path)
        rules = answer.headers["content-security-policy"].split("; ")
        assert dict(rule.split(" ", 1) for rule in rules) == POLICY, path
        assert answer.headers["x-content-type-options"] == "nosniff", path
        assert answer.headers["referrer-policy"] == "no-referrer", path
        assert answer.headers["cache-control"] == "no-cache", path


async def test_what_has_not_changed_is_not_sent_again():
    for path in ("/", "/web/main.js"):
        answer = await get(path)
        again = await get(path, **{"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", answer.headers["etag"])
    assert (await get("/", **{"if-none-match": '"other"'})).status_code == 200


@pytest.mark.parametrize("path", ["/web/", "/web/x", "/web/../page.py", "/web/%2e%2e/page.py", "/web//etc/passwd"])
async def test_there_is_nothing_else(path):
    assert (await get(path)).status_code == 404


@pytest.mark.parametrize(
    ("model", "begins"), [("some/model", "The Sparrow"), (str(DEMO_MODEL), "The access code of Falcon")]
)
async def test_a_model_that_brings_an_example_is_shown_with_it(model, begins):
    """With an order of its documents for each question."""
    file = example_file(model)
    assert (await get("/web/example.json", read(file))).json()["documents"][0].startswith(begins)
    example = Example.read(file)
    assert len(example.orders) == len(example.questions)
    assert all(sorted(order) == list(range(len(example.documents))) for order in example.orders)


def test_files_have_a_licence_and_name_no_other_host():
    for name in FILES:
        if not name.endswith(".json"):
            text = (STATIC / name).read_text()
            assert "SPDX-License-Identifier: Apache-2.0" in text, name
            hosts = set(re.findall(r"https?://[^\"' /]+", text))
            assert hosts <= {"http://www.w3.org"}, name  # SVG's namespace, never fetched


def test_nothing_is_read_as_html_or_code():
    forbidden = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser")
    scripts = {name: (STATIC / name).read_text() for name in FILES if name.endswith(".js")}
    assert [(name, word) for name, text in scripts.items() for word in forbidden if word in text] == []


def test_the_page_has_no_inline_script_and_no_inline_style():
    text = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)[^>]*>|<style| style=| on[a-z]+=|javascript:", text) == []
