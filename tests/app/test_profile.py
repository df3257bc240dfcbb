# SPDX-License-Identifier: Apache-2.0
"""Decisions of profiles, and invalid profile files."""

import pytest
from vllm.sampling_params import SamplingParams

from app.documents.openai_documents import DocumentsRequest
from app.intake import open_ticket
from app.profile import Kind, Profile, ProfileError
from app.settings import Settings
from cache.positions.layout import Chunk, ChunkedPrompt, PositionStrategy, pack
from cache.sparse import Sparse
from engine_ext.client.adapters import Adapters
from engine_ext.client.request import CacheOptions, ChunkedRequest, Ticket, resolve
from tests.support.context import make_context


def make_profile(**modes: str) -> Profile:
    """``up_to_4="shared"``, and so on."""
    kinds = [
        Kind(min_chunks=2, max_chunks=int(name.removeprefix("up_to_")), mode=mode, is_certain=True, measured=())
        for name, mode in modes.items()
    ]
    return Profile(
        model="m",
        weights="w",
        trained_for=(),
        questions="q.jsonl",
        questions_sha256="ab",
        tolerance=0.02,
        tessera="0.1.0",
        vllm="0.32.0",
        kinds=tuple(kinds),
    )


PROFILE = make_profile(up_to_4="shared", up_to_8="offset+15%", up_to_16="full")


@pytest.mark.parametrize(
    ("chunks", "mode"),
    [(1, "shared"), (2, "shared"), (4, "shared"), (5, "offset+15%"), (8, "offset+15%"), (9, "full"), (17, "full")],
)
def test_it_decides_by_the_number_of_chunks(chunks, mode):
    assert PROFILE.decide(chunks).mode == mode
    options = PROFILE.applied(CacheOptions(recompute=0.03), chunks)
    assert options.decision == PROFILE.decide(chunks)
    assert (options.why_full is not None) == (mode == "full")
    if mode != "full":
        strategy = PositionStrategy.SHARED if mode == "shared" else PositionStrategy.OFFSET
        assert (options.position_strategy, options.recompute) == (strategy, 0.15 if mode == "offset+15%" else 0)


def test_what_was_never_measured_is_full_attention():
    decision = PROFILE.decide(17)
    assert (decision.mode, decision.why) == ("full", "the profile has nothing for 17 chunks")


@pytest.mark.parametrize(
    ("mode", "holds", "placement", "placed"),
    [
        ("offset%25", ("offset%25", "offset"), "copy", "offset"),
        ("offset+15%", ("offset+15%", "offset%25"), "copy", "full"),
        ("offset%25", ("offset%25",), "copy", "full"),
        ("offset%25", ("offset%25", "shared"), "in-place", "shared"),
        ("offset", ("shared", "parallel", "offset"), "in-place", "parallel"),
        ("offset", ("offset",), "in-place", "offset"),
        ("full", ("shared",), "in-place", "full"),
    ],
)
def test_a_server_gets_what_its_placement_can_do(mode, holds, placement, placed):
    (kind,) = make_profile(up_to_4=mode).kinds
    assert kind.model_copy(update={"holds": holds}).placed(placement).mode == placed


def test_a_budget_is_applied_on_servers_that_measure_attention():
    profile = make_profile(up_to_4="offset%25")
    default = CacheOptions(sparse=Sparse(7))
    assert profile.placed("copy", measures_attention=True).applied(default, 3).sparse == Sparse(budget_share=0.25)
    assert PROFILE.placed("copy", measures_attention=True).applied(default, 3).sparse == default.sparse
    assert profile.placed("copy").decide(3).mode == "full"


def ticket_of(cache: dict) -> Ticket:
    context = make_context(settings=Settings(chunk_position_strategy="offset"), profile=PROFILE)
    return open_ticket(context, DocumentsRequest({}, [], cache, lambda marked: None))


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "chunked"},
        {"mode": "full"},
        {"position_strategy": "offset"},
        {"recompute": 0},
        {"sparse": {"budget_share": 0.5}},
        {"scope": "isolated"},
    ],
)
def test_requests_that_say_what_they_want_get_that(given):
    assert ticket_of(given).decide is None


@pytest.mark.parametrize("given", [{}, {"mode": "auto"}, {"explain": True}, {"namespace": "n"}])
def test_others_follow_the_profile(given):
    ticket = ticket_of(given)
    options = ticket.decide(ticket.options, 6, "")
    assert (options.recompute, options.decision.mode, options.namespace) == (
        0.15,
        "offset+15%",
        given.get("namespace", "default"),
    )


@pytest.mark.parametrize(("adapter", "chunks", "mode"), [("", 2, "shared"), ("a", 1, "shared"), ("a", 2, "full")])
def test_adapters_were_not_measured(adapter, chunks, mode):
    assert PROFILE.decide(chunks, adapter).mode == mode


def test_chunks_are_counted_as_they_are_computed_not_as_documents_are_sent():
    ticket = Ticket(CacheOptions(), ("one document",), decide=PROFILE.applied)
    parts = tuple(Chunk(pack((1, 2)), document=0, part=(i, 9)) for i in range(1, 10))
    prompts = (ChunkedPrompt((), parts[:1], (9,)), ChunkedPrompt((), parts, (9,)), None)
    decisions = [
        resolve(ChunkedRequest(ticket, prompt), Adapters(), SamplingParams()).options.decision for prompt in prompts
    ]
    assert [decision and decision.mode for decision in decisions] == ["shared", "full", None]


def test_it_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.model_dump_json())
    assert Profile.read(path) == PROFILE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("", "is not a profile of tessera calibrate: it"),
        ("[]", "is not a profile"),
        ('{"format": 2}', "format"),
        (PROFILE.model_dump_json().replace("offset+15%", "link-x"), "there is no mode 'link-x'"),
        (PROFILE.model_dump_json().replace('"model"', '"modle"'), "model"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ProfileError) as raised:
        Profile.read(path)
    assert words in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
