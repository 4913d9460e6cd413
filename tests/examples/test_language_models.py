"""The language models under examples, served: each request gets its own library's text.

`tests/test_examples.py` runs each of them always, with one prompt.
"""

import asyncio
import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

import spmd
from spmd.models.decode import ServingShape
from spmd.serving.bundle.read import load_bundle
from spmd.serving.engine.actions import Job
from spmd.serving.engine.backend import Sampling
from spmd.serving.engine.core import Core
from spmd.serving.engine.engine import Engine
from spmd.serving.engine.model_backend import ModelBackend
from spmd.serving.language_backend import model_backend
from tests.serving.http.live import TEXT, serving
from tests.waiting import PATIENCE

SHAPE = ServingShape(8, 48, (8,), (48,), page=8, groups=4, top_logprobs=1, cache_dtype="float32")
pytestmark = pytest.mark.heavy

MESHES: tuple[dict[str, int], ...] = ({"data": 1}, {"data": 2}, {"data": 4, "model": 2})
LIKE = tuple(b"def main(arguments):")

Alone = Callable[[Sequence[int], int], list[int]]
"""(prompt, number of tokens) -> what a model's own library continues it with, greedily."""


class Served:
    """A bundle of an example's model.

    Args:
      folder: the bundle's.
      shape: the sizes that it was written with.
      alone: see `Alone`.
    """

    def __init__(self, folder: Path, shape: ServingShape, alone: Alone) -> None:
        self.folder, self.shape, self.alone = folder, shape, alone

    @functools.cached_property
    def expected(self) -> list[str]:
        """The text of each of `requests()`."""
        return [letters(self.alone(*given)) for given in requests()]

    @functools.cache  # noqa: B019  # as long as the module's tests
    def backend(self, **axes: int) -> ModelBackend:
        """On a mesh. What scores, and what masks tokens, is left out: each takes its time."""
        import jax

        count = axes["data"] * axes.get("model", 1)
        mesh = spmd.make_mesh(**axes, devices=jax.devices()[:count])
        pages = self.shape.slots_of_group * self.shape.pages_of_slot
        names = ("begin", "step_r8_t48")
        return model_backend(
            load_bundle(self.folder, mesh, symbols={"pages": pages}, functions=names)
        )


def gpt2(folder: Path) -> Served:
    """Against transformers' `generate`."""
    pytest.importorskip("flax")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from examples import serve_gpt2

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=256, n_positions=48, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zeros would not show that one is left out
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "gpt2")
    serve_gpt2.export(folder / "gpt2", folder / "bundle", SHAPE, platforms=("cpu",))

    def alone(prompt: Sequence[int], count: int) -> list[int]:
        given = torch.tensor([prompt])
        found = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False
        )
        return found[0, len(prompt) :].tolist()

    return Served(folder / "bundle", SHAPE, alone)


def torch(folder: Path) -> Served:
    """Against the torch module."""
    pytest.importorskip("spmd.torch", reason="needs torch and torchax", exc_type=ImportError)
    from torch import manual_seed

    from examples import serve_torch

    manual_seed(0)
    model = serve_torch.Model().eval()
    serve_torch.export(model, folder / "bundle", SHAPE, platforms=("cpu",))
    return Served(folder / "bundle", SHAPE, functools.partial(serve_torch.continue_text, model))


@pytest.fixture(scope="module", params=[gpt2, torch], ids=lambda make: make.__name__)
def served(request: Any, tmp_path_factory: Any) -> Served:
    found: Served = request.param(tmp_path_factory.mktemp(request.param.__name__))
    return found


def requests() -> list[tuple[tuple[int, ...], int]]:
    """More than there are slots; many prompts are longer than a step, and some begin alike."""
    rng = random.Random(0)
    made = []
    for number in range(12):
        prompt = (*LIKE[: 10 * (number % 3)], *rng.choices(range(256), k=rng.randint(1, 12)))
        most = 48 - len(prompt) if number % 5 == 0 else 10
        made.append((prompt, rng.randint(1, most)))
    return made


def letters(tokens: Sequence[int]) -> str:
    """A letter for each token, so that texts are equal if tokens are."""
    return bytes(tokens).decode("latin-1")


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_texts_are_the_librarys(axes: dict[str, int], served: Served) -> None:
    engine = Engine(Core(served.backend(**axes)), letters, b"a")
    engine.start()

    async def one(prompt: tuple[int, ...], count: int) -> str:
        job = Job(prompt, count, Sampling(temperature=0.0))
        return "".join([delta.text async for delta in engine.submit([job])])

    async def go() -> Any:
        return await asyncio.gather(*(one(*given) for given in requests()))

    with contextlib.ExitStack() as stack:
        stack.callback(engine.stop)
        found = asyncio.run(go())
        counts = engine.state().counts
    assert found == served.expected
    assert len({text[-1] for text in found}) > 3  # no model that says the same whatever it reads
    # A state without positions is one page: none of it can be shared.
    assert bool(counts.reused) == (served.shape.pages_of_slot > 1)


def test_over_http(served: Served) -> None:
    """The same model once more: what is left in its pages by then shows nowhere."""
    prompts = ["def f(x):", "def f(x, y):", "a prompt that is longer than one step"]

    async def ask(url: str) -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            asked = {"model": "fake-llama", "max_tokens": 10, "temperature": 0}
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json={**asked, "prompt": p}) for p in prompts)
            )
        return [answer.raise_for_status().json()["choices"][0]["text"] for answer in answers]

    backend: Any = served.backend(**MESHES[-1])
    with serving(backend) as live:
        found = asyncio.run(ask(live.url))
    assert found == [TEXT(served.alone(list(p.encode()), 10)) for p in prompts]
