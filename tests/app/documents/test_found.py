# SPDX-License-Identifier: Apache-2.0
"""Documents found in a prompt: nothing but the boundaries of segments changes."""

import itertools
import json
import random

from hypothesis import given
from hypothesis import strategies as st

from app.documents.document import MOST_DOCUMENTS
from app.documents.found import KNOWN, FoundIn, finder
from app.documents.openai_documents import EXTRACTORS, from_anthropic, from_chat, from_completion, from_responses
from app.documents.patterns import PATTERNS
from app.prompt.known import KnownPassages
from app.prompt.marks import Marks
from engine_ext.client.request import CacheOptions, Ticket
from tests.support.app_prompts import FORMS
from tests.support.cpu_time import cpu_seconds

ONE = "The Milton Bridge is 320 meters long, and it carries two lanes."
TWO = "The bakery on Quay Street was founded in 1987 by two sisters."
PASSAGES = (ONE, TWO, f"{ONE}\n\n{TWO}", "Ägypten: 5 € für die Fähre – täglich außer montags, 9–17 Uhr.")


def find_known(*passages):
    known = KnownPassages()
    known.add_all("n", passages)
    return finder(PATTERNS, lambda text: known.find("n", text))


FIND = find_known(*PASSAGES)


def marked(text, find=FIND):
    """The text's segments as vLLM's template would pass them through."""
    found, marks = FoundIn.of("prompt", text, find), Marks()
    if not found.spans:
        return found, None
    with marks.issue_within(Ticket(CacheOptions()), len(found.spans)) as issued:
        return found, marks.split(found.marked(iter(issued)))


MARKERS = (
    *('<source id="1">', "</source>", "[CONTEXT 3]:\n", "\n[END CONTEXT 3]", "<context>\n", "\n</context>"),
    *("└── Content:\n", "\n------\n", "Source 2:\n", "\nContext: ", "\nAnswer:", "\n\n", " "),
)
pieces = st.one_of(st.sampled_from([*PASSAGES, ONE[:40], TWO[10:], *MARKERS]), st.text(max_size=12))


@given(st.lists(pieces, max_size=12))
def test_the_prompt_stays_as_it_is(parts):
    text = "".join(parts)
    found, split = marked(text)
    assert all(before.end <= after.start for before, after in itertools.pairwise(found.spans))
    if split is not None:
        assert split.text == text
        assert list(split.chunks) == [text[span.start : span.end] for span in found.spans]
        assert all(chunk == chunk.rstrip() for chunk in split.chunks)
        starts, ends = [span.start for span in found.spans], [span.end for span in found.spans]
        outside = [text[end:start] for end, start in zip([0, *ends], [*starts, len(text)], strict=True)]
        assert [split.system, *split.between, split.question] == outside


@given(
    st.lists(st.sampled_from(PASSAGES), max_size=5),
    st.lists(st.text(alphabet="xyz .\n", max_size=30), min_size=6, max_size=6),
)
def test_every_known_passage_is_found(passages, between):
    text = "".join(a + b for a, b in zip(between, [*passages, ""], strict=False))
    found, _ = marked(text)
    covered = [text[span.start : span.end] for span in found.spans]
    assert "".join(covered).count(ONE) >= sum(ONE in passage for passage in passages)
    assert {span.by for span in found.spans} <= {KNOWN}


def test_of_overlapping_passages_the_longest_is_taken():
    text = f'<source id="1">{ONE} More.</source> {TWO}'
    found, _ = marked(text)
    spans = [(span.by, text[span.start : span.end]) for span in found.spans]
    assert spans == [("Open WebUI", f"{ONE} More."), (KNOWN, TWO)]
    # White space at the ends of a message stays for the template.
    _, split = marked('<source id="1">  x</source>')
    assert split.chunks == ("  x",)
    found, _ = marked(f"\n  {ONE}  \n", find_known(f"  {ONE}"))
    assert [tuple(span)[:2] for span in found.spans] == [(3, 3 + len(ONE))]


def body_of(path, system, user):
    turns = [{"role": "user", "content": user}]
    if path == "/v1/completions":
        return {"prompt": f"{system}\n{user}"}
    if path == "/v1/responses":
        return {"instructions": system, "input": turns}
    if path == "/v1/messages":
        return {"messages": turns, "system": [{"type": "text", "text": system}]}
    return {"messages": [{"role": "system", "content": system}, *turns]}


def test_system_and_user_messages_of_every_endpoint_are_searched():
    for path, extract in EXTRACTORS.items():
        body = body_of(path, f"Use this.\n{ONE}\nBe brief.", f"{TWO} Why?")
        before = json.dumps(body)
        request = extract(body, None, FIND)
        assert [document.text for document in request.documents] == [ONE, TWO], path
        assert len({found.at for each in request.found for found in each.reported}) == (1 if "prompt" in body else 2)
        request.insert(["<1>", "<2>", "<3>", "<4>"])
        after = json.dumps(request.body)
        assert f"<1>{ONE}<2>" in after
        assert f"<3>{TWO}<4> Why?" in after
        assert json.dumps(body) == before  # the caller's own is unchanged


def test_results_of_tools_are_searched_and_answers_are_not():
    answer = {"role": "assistant", "content": ONE}
    request = from_chat({"messages": [answer, {"role": "tool", "tool_call_id": "c", "content": TWO}]}, None, FIND)
    assert [each.path for each in request.found if each.spans] == ["messages.1.content"]
    contents = ONE, [{"type": "text", "text": TWO}]
    results = [{"type": "tool_result", "tool_use_id": "t", "content": each} for each in contents]
    request = from_anthropic({"messages": [answer, {"role": "user", "content": results}]}, None, FIND)
    assert [document.text for document in request.documents] == [ONE, TWO]
    output = {"type": "function_call_output", "call_id": "c", "output": ONE}
    assert from_responses({"input": [{"role": "user", "content": "?"}, output]}, None, FIND).documents[0].text == ONE


def test_nothing_is_found_in_requests_without_documents():
    auto = {"cache": {"documents": "auto"}}
    assert from_chat({"messages": [{"role": "user", "content": "Why?"}]}, None, FIND) is None
    assert from_chat({"messages": [], **auto}, None, FIND) is None
    assert from_completion({"prompt": [1, 2]}, None, FIND) is None
    assert from_completion({"prompt": "Why?", **auto}, None, FIND) is None
    assert from_responses({"input": "Why?"}, None, FIND) is None


def test_given_documents_come_first():
    body = {"messages": [{"role": "user", "content": f"{ONE}##Why?"}]}
    given = from_chat({**body, "documents": [TWO]}, None, FIND)
    assert [document.text for document in given.documents] == [TWO]
    assert not given.found
    assert not from_chat(body, "##", FIND).found


def test_a_call_has_no_more_documents_than_it_may_bring():
    """The rest of the prompt stays ordinary text."""
    turns = [{"role": "user", "content": f"{ONE}\n" * number} for number in (MOST_DOCUMENTS - 2, 7, 3)]
    request = from_chat({"messages": turns}, None, FIND)
    assert [len(each.documents) for each in request.found] == [MOST_DOCUMENTS - 2, 2]
    request.insert(["<>"] * 2 * MOST_DOCUMENTS)
    left = [turn["content"].replace("<>", "") for turn in request.body["messages"]]
    assert left == [each["content"] for each in turns]


def test_a_long_prompt_without_documents_costs_little():
    """In proportion to its length: 100,000 characters take about a millisecond."""
    source = random.Random(1)
    words = ["".join(source.choices("abcdefghijklmnop", k=source.randint(2, 9))) for _ in range(2000)]
    find = find_known(*(" ".join(source.choices(words, k=60)) for _ in range(2000)), *PASSAGES)
    texts = [" ".join(source.choices(words, k=n)) for n in (2_000, 16_000)]
    assert find(texts[0]) == []
    short, long = (cpu_seconds(find, text, tries=5) for text in texts)
    assert long < 16 * max(short, 0.0005)


def test_forms_share_their_chunks():
    """A passage is the same document in all forms, and when it is given in a field."""
    find = finder(PATTERNS, lambda _: [])
    requests = (from_chat({"messages": form([ONE, TWO], 1)}, None, find) for form in FORMS.values())
    texts = {document.given.render() for request in requests for document in request.documents}
    assert texts == {f"{ONE}\n\n", f"{TWO}\n\n"}
