# SPDX-License-Identifier: Apache-2.0
"""Decisions of profiles, and invalid profile files."""

import pytest
from vllm.sampling_params import SamplingParams

from app.documents.openai_documents import DocumentsRequest
from app.intake import open_ticket
from app.profile import Profile, ProfileError
from app.settings import Settings
from cache.positions.layout import Chunk, ChunkedPrompt, PositionStrategy, pack
from cache.report import FoundDocument
from cache.sparse import Sparse
from engine_ext.client.adapters import Adapters
from engine_ext.client.request import CacheOptions, ChunkedRequest, Ticket, resolve
from engine_ext.start.weights import PROFILE_NAME, files_digest
from tests.support.context import make_context
from tests.support.profiles import make_profile

PROFILE = make_profile(up_to_4="shared", up_to_8="offset+15%", up_to_16="full")


@pytest.mark.parametrize(
    ("chunks", "mode", "strategy", "recompute"),
    [
        *((number, "shared", "shared", 0) for number in (1, 4)),
        *((number, "offset+15%", "offset", 0.15) for number in (5, 8)),
        *((number, "full", None, None) for number in (9, 17)),
    ],
)
def test_it_decides_by_the_number_of_chunks(chunks, mode, strategy, recompute):
    options = PROFILE.applied(CacheOptions(recompute=0.03), chunks)
    assert options.decision.mode == mode
    assert (options.decision.why == "the profile has nothing for 17 chunks") == (chunks == 17)
    assert (options.why_full is not None) == (mode == "full")
    assert mode == "full" or (options.position_strategy, options.recompute) == (strategy, recompute)


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


def test_a_budget_and_what_is_read_again_are_applied_on_servers_that_measure_attention():
    profile = make_profile(up_to_4="offset%25")
    default = CacheOptions(sparse=Sparse(budget_share=0.5))
    for each, sparse in ((profile, Sparse(budget_share=0.25)), (PROFILE, None)):
        assert each.placed("copy", measures_attention=True).applied(default, 3).sparse == sparse
    again = make_profile(up_to_4="offset~25%")
    assert again.placed("copy", measures_attention=True).applied(CacheOptions(recompute=0.1), 3).reread == 0.25
    for each in (profile, again):
        assert each.placed("copy").decide(3).mode == "full"


def test_a_profile_beside_other_weights_is_ignored(tmp_path, caplog):
    assert Profile.beside(str(tmp_path)) is None
    assert not caplog.records
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    of_these = PROFILE.model_copy(update={"weights": files_digest(tmp_path)})
    (tmp_path / PROFILE_NAME).write_text(of_these.model_dump_json())
    assert Profile.beside(str(tmp_path)) == of_these
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert Profile.beside(str(tmp_path)) is None
    assert "is of other weights" in caplog.text
    adapted = PROFILE.model_copy(update={"weights": files_digest(tmp_path), "adapter": "a"})
    (tmp_path / PROFILE_NAME).write_text(adapted.model_dump_json())
    assert Profile.beside(str(tmp_path)) is None
    assert "is of an adapter" in caplog.text


def test_documents_found_in_a_prompt_stay_where_they_are():
    """There, text stands around them."""
    chunks = tuple(Chunk(pack((i,))) for i in range(3))
    found = (FoundDocument(by="marks", at="prompt", start=0, end=1),) * 3
    for strategy, recompute in ((PositionStrategy.OFFSET, 0.25), (PositionStrategy.SHARED, 0)):
        options = CacheOptions(reread=0.25, position_strategy=strategy)
        request = ChunkedRequest(Ticket(options, found=found), ChunkedPrompt((1,), chunks, (2,)))
        resolved = resolve(request, Adapters(), SamplingParams()).options
        assert (resolved.reread, resolved.recompute) == (0, recompute)


def ticket_of(cache: dict) -> Ticket:
    context = make_context(settings=Settings(chunk_mode="offset"), profile=PROFILE)
    return open_ticket(context, DocumentsRequest({}, [], cache, lambda marked: None))


@pytest.mark.parametrize(
    "given",
    [
        *({"mode": "chunked"}, {"position_strategy": "offset"}, {"scope": "isolated"}),
        *({"recompute": 0}, {"reread": 0}, {"sparse": {"budget_share": 0.5}}),
    ],
)
def test_requests_and_flags_that_say_what_they_want_get_that(given):
    assert ticket_of(given).decide is None
    assert not Settings(chunk_mode="offset").leaves_the_choice
    assert Settings().leaves_the_choice
    assert Settings(chunk_scope="system").leaves_the_choice


@pytest.mark.parametrize("given", [{}, {"mode": "auto", "explain": True}, {"namespace": "n"}])
def test_others_follow_the_profile(given):
    ticket = ticket_of(given)
    options = ticket.decide(ticket.options, 6, "")
    assert (options.recompute, options.decision.mode) == (0.15, "offset+15%")
    assert options.namespace == given.get("namespace", "default")


@pytest.mark.parametrize(("adapter", "chunks", "mode"), [("", 2, "shared"), ("a", 1, "shared"), ("a", 2, "full")])
def test_adapters_were_not_measured(adapter, chunks, mode):
    assert PROFILE.decide(chunks, adapter).mode == mode


def test_chunks_are_counted_as_they_are_computed_not_as_documents_are_sent():
    ticket = Ticket(CacheOptions(), ("one document",), decide=PROFILE.applied)
    parts = tuple(Chunk(pack((1, 2)), document=0, part=(i, 9)) for i in range(1, 10))
    prompts = (ChunkedPrompt((), parts[:1], (9,)), ChunkedPrompt((), parts, (9,)), None)
    requests = [ChunkedRequest(ticket, prompt) for prompt in prompts]
    decisions = [resolve(each, Adapters(), SamplingParams()).options.decision for each in requests]
    assert [decision and decision.mode for decision in decisions] == ["shared", "full", None]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("", "is not a profile of tessera calibrate: it"),
        ('{"format": 2}', "format"),
        (PROFILE.model_dump_json().replace("offset+15%", "link-x"), "there is no mode 'link-x'"),
        (PROFILE.model_dump_json().replace('"model"', '"modle"'), "model"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.model_dump_json())
    assert Profile.read(path) == PROFILE
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(ProfileError, match=words) as raised:
        Profile.read(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
