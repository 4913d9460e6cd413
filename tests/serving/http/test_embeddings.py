"""Vectors of texts beside transformers' states, by openai's client, joined, and in base64."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

import spmd
from spmd.scripts import export_llama
from spmd.serving.bundle.read import load_bundle
from spmd.serving.load import load_model
from tests.models.llama.weights import checkpoints
from tests.models.training.data.test_beginnings import both_ends, saved
from tests.serving.http.live import Live, post, serving

TEXTS = ["hello", "a longer text", "hell", "0" * 30]


@pytest.fixture(scope="module", params=["last", "mean"])
def pooled(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Any]]:
    """A server of a Qwen 3's vectors over two axes, and transformers' own states."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp(request.param)
    checkpoints.write("qwen3", folder / "qwen3", vocab_size=300, tie_word_embeddings=True)
    model = transformers.AutoModel.from_pretrained(folder / "qwen3")
    model.save_pretrained(folder / "qwen3")  # as such models are: names lack `model.`
    saved(both_ends(), folder / "qwen3")  # its marks count, too
    flags = f"--init_from {folder / 'qwen3'} --embeddings {request.param} --max_length 32"
    flags += f" --dtype float32 --platforms cpu --out {folder / 'bundle'}"
    export_llama.main(flags.split())
    bundle = load_bundle(folder / "bundle", spmd.make_mesh(data=2, model=2), symbols={"b": (2, 4)})
    loaded = load_model(bundle, folder / "bundle")
    with serving(load=False) as live:
        live.service.become_ready(loaded)
        yield live, (model, request.param)


def ids_of(text: str) -> list[int]:
    ids: list[int] = both_ends().encode(text).ids
    return ids


def by_transformers(theirs: tuple[Any, str], text: str) -> Any:
    import torch

    model, pooling = theirs
    with torch.no_grad():
        states = model(torch.tensor([ids_of(text)])).last_hidden_state[0].numpy()
    pooled = states[-1] if pooling == "last" else states.mean(axis=0)
    return pooled / np.linalg.norm(pooled)


def test_vectors_are_transformers(pooled: tuple[Live, Any]) -> None:
    live, theirs = pooled
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="-")
    several: Any = [*TEXTS, *TEXTS]  # more than a call has rows
    found = client.embeddings.create(model="bundle", input=several)  # which asks for base64
    wanted = np.array([by_transformers(theirs, text) for text in several])
    np.testing.assert_allclose(np.array([one.embedding for one in found.data]), wanted, atol=2e-5)
    assert [one.index for one in found.data] == [*range(8)]
    assert found.usage.prompt_tokens == sum(len(ids_of(text)) for text in several)
    answer = post(
        f"{live.url}/v1/embeddings", json={"input": ids_of(TEXTS[0]), "dimensions": 3}
    ).json()
    short = wanted[0, :3] / np.linalg.norm(wanted[0, :3])
    np.testing.assert_allclose(answer["data"][0]["embedding"], short, atol=2e-5)


def test_documents_are_ordered_by_cosine(pooled: tuple[Live, Any]) -> None:
    live, theirs = pooled
    body = {"query": TEXTS[0], "documents": [*TEXTS[1:], {"text": TEXTS[0]}], "top_n": 3}
    found = post(f"{live.url}/v1/rerank", json=body).json()["results"]
    unit = np.array([by_transformers(theirs, text) for text in (*TEXTS[1:], TEXTS[0])])
    scores = unit @ unit[-1]
    assert [one["index"] for one in found] == np.argsort(-scores)[:3].tolist()
    np.testing.assert_allclose(
        [x["relevance_score"] for x in found], np.sort(-scores)[:3] * -1, atol=2e-5
    )
    assert found[0]["document"] == {"text": TEXTS[0]}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("embeddings", {"input": "0" * 31}, "input[0]: 33 tokens; 1 to 32 fit"),
        ("embeddings", {"input": [[1, 999]]}, "input[0]: ids are integers below "),
        ("embeddings", {"input": []}, "input: 1 to 2048 texts, not 0"),
        ("embeddings", {"input": 7}, "input[0]: a string is needed, not 7"),
        ("embeddings", {"input": "a", "dimensions": 999}, "dimensions: 32 are the most"),
        ("embeddings", {"input": "a", "encoding_format": "hex"}, "float or base64"),
        ("rerank", {"query": "a", "documents": "b"}, "documents: a list"),
        ("rerank", {"query": "a", "documents": [3]}, "documents[0]: a string is needed"),
    ],
)
def test_what_is_refused(pooled: tuple[Live, Any], path: str, body: Any, says: str) -> None:
    answer = post(f"{pooled[0].url}/v1/{path}", json=body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_a_model_of_texts_makes_none() -> None:
    with serving() as live:
        answer = post(f"{live.url}/v1/embeddings", json={"input": "a"})
        assert answer.status_code == 404
        assert "makes no embeddings" in answer.json()["error"]["message"]
