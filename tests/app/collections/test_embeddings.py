# SPDX-License-Identifier: Apache-2.0
"""Embeddings from an endpoint, whatever it answers, and from a model in this process."""

import json

import numpy as np
import pytest

from app.collections import embeddings
from app.collections.embeddings import EmbeddingError, Endpoint, LocalModel
from tests.app.collections.endpoint import LONGEST, vector


async def test_each_text_gets_its_vector_of_unit_length(stand_in):
    texts = ["a cat", "a car", *(f"house {number}" for number in range(150))]
    found = await Endpoint(f"{stand_in.url}?model=m").embed(texts)
    expected = np.array([vector(text) for text in texts])
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected, axis=1, keepdims=True), rtol=1e-6)
    assert stand_in.texts == texts
    assert {body["model"] for _, body in stand_in.asked} == {"m"}
    assert len(stand_in.asked) == 3


async def test_model_and_key_are_sent_only_if_given(stand_in):
    await Endpoint(stand_in.url + "/").embed(["a"])
    assert ("model" in stand_in.asked[0][1], stand_in.keys) == (False, [None])
    await Endpoint(stand_in.url.replace("//", "//:s%2Fecret@") + "?model=m").embed(["a"])
    assert stand_in.keys[1] == "Bearer s/ecret"


async def test_of_a_text_that_is_too_long_its_beginning_counts(stand_in):
    long = "cat " + "x" * 5 * LONGEST
    found = await Endpoint(f"{stand_in.url}?model=m").embed(["car", long, "house"])
    assert [list(row).index(max(row)) for row in found] == [1, 0, 2]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (500, "broken", "/embeddings answered 500: broken"),
        (400, "never", "/embeddings answered 400: never"),
        (200, "<html>", "gave no JSON"),
        (200, "[]", "gave no vectors"),
        (200, '{"data": null}', "gave no vectors"),
        (200, '{"data": [{"index": 0, "embedding": "AAAA"}]}', "gave no vectors"),
        (200, '{"data": [{"index": 0, "embedding": []}]}', "no vector for each text"),
        (200, '{"data": [{"index": 0, "embedding": [NaN]}]}', "no vector for each text"),
        (200, '{"data": []}', "no vector for each text"),
    ],
)
async def test_what_is_no_answer_is_told(stand_in, status, body, message):
    stand_in.answers["/v1/embeddings"] = status, body
    with pytest.raises(EmbeddingError, match=message):
        await Endpoint(f"{stand_in.url}?model=m").embed(["a" * 300])


async def test_who_can_not_be_reached_is_not_asked_by_every_question(stand_in, monkeypatch):
    endpoint = Endpoint("http://:secret@127.0.0.1:9/v1")
    with pytest.raises(EmbeddingError, match=r"http://127\.0\.0\.1:9/v1/embeddings: ConnectError"):
        await endpoint.embed(["a"])
    broken = Endpoint(f"{stand_in.url}?model=m")
    stand_in.answers["/v1/embeddings"] = 503, "loading"
    with pytest.raises(EmbeddingError, match="503: loading"):
        await broken.embed(["a"])
    del stand_in.answers["/v1/embeddings"]
    with pytest.raises(EmbeddingError, match="503: loading"):
        await broken.embed(["a"])
    assert len(stand_in.keys) == 1
    monkeypatch.setattr(embeddings.time, "monotonic", lambda: broken._retry_at)
    assert (await broken.embed(["a"])).shape == (1, 5)


async def test_a_reranker_scores_each_text(stand_in):
    assert await Endpoint(f"{stand_in.url}?reranker=r").rerank("q", ["aaa", "b", "cc"]) == [3, 1, 2]
    path, body = stand_in.asked[0]
    assert (path, body) == ("/v1/rerank", {"model": "r", "query": "q", "documents": ["aaa", "b", "cc"]})
    stand_in.answers["/v1/rerank"] = 200, json.dumps({"results": [{"index": 0, "relevance_score": 1}]})
    with pytest.raises(EmbeddingError, match="no score for each text"):
        await Endpoint(f"{stand_in.url}?reranker=r").rerank("q", ["aaa", "b", "cc"])


async def test_a_model_in_this_process_knows_what_texts_mean(minilm):
    model = LocalModel(minilm)
    cat, car, question = await model.embed(["A kitten sleeps on the sofa.", "The automobile needs petrol.", "my cat"])
    assert np.linalg.norm(cat) == pytest.approx(1, abs=1e-5)
    assert question @ cat > question @ car + 0.05
    assert LocalModel(minilm).name == model.name
    assert np.isfinite(await model.embed(["word " * 5000])).all()


async def test_the_order_and_number_of_texts_do_not_matter(minilm):
    """Beyond rounding: the model's weights are of 8 bits, and its activations are rounded by the batch."""
    texts = [f"Sentence number {number} about birds. " * (1 + number % 7) for number in range(100)]
    model = LocalModel(minilm)
    together = await model.embed(texts)
    for number in (0, 50, 99):
        assert together[number] @ (await model.embed([texts[number]]))[0] > 0.98


def test_a_folder_with_a_damaged_model_is_told(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"x")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EmbeddingError, match="has no model of embeddings"):
        LocalModel(tmp_path)
