"""lm-evaluation-harness over a server's HTTP and over transformers: the same scores and answers.

A tiny Llama with random weights is saved as Hugging Face has it, exported, and served. Then
lm-evaluation-harness runs two tasks of its own making: one of multiple choice, by the
log-probabilities of continuations (local-completions, prompts sent as ids and as text), and one of
short answers to chats (local-chat-completions). It runs the same with its own backend for
transformers, and every sample is compared.

It needs PyTorch, transformers and lm-eval, as in `pip install "lm-eval[api]"`.

Examples:
    tools/run compare_lm_eval --samples 20
"""

import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, positive
from spmd.models.decode import ServingShape
from spmd.models.llama.weights.sources import hf_source
from spmd.serving.llama_bundle import write_llama_bundle
from tools.soak import Server

TOLERANCE = 1e-3
WORDS = ["red", "green", "blue", "one", "two", "three", "cat", "dog", "bird", "sun", "moon", "star"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_model(folder: Path) -> None:
    """A tiny Llama, and a tokenizer of bytes with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=0, eos_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def tasks(folder: Path, samples: int) -> list[dict[str, Any]]:
    """Configurations of the two tasks over questions that are made here."""
    rng = random.Random(0)
    questions = [
        {"question": " ".join(rng.choices(WORDS, k=6)), "choices": rng.sample(WORDS, 4),
         "answer": rng.randrange(4)}
        for _ in range(samples)
    ]  # fmt: skip
    data = folder / "questions.json"
    data.write_text("\n".join(map(json.dumps, questions)))
    common = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test", "doc_to_text": "{{question}} means",
    }  # fmt: skip
    return [
        {**common, "task": "choices", "output_type": "multiple_choice",
         "doc_to_choice": "choices", "doc_to_target": "answer",
         "metric_list": [{"metric": "acc"}]},
        {**common, "task": "answers", "output_type": "generate_until",
         "doc_to_target": "{{choices[answer]}}",
         "generation_kwargs": {"until": ["zzz"], "max_gen_toks": 12, "do_sample": False,
                               "temperature": 0},
         "metric_list": [{"metric": "exact_match"}]},
    ]  # fmt: skip


def evaluate(model: str, arguments: dict[str, Any], task: dict[str, Any]) -> list[Any]:
    """What a model answers to each sample: log-probabilities of choices, or a text."""
    import lm_eval
    from lm_eval.tasks import get_task_dict

    results = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(get_task_dict([dict(task)]).values()),
        apply_chat_template=task["output_type"] == "generate_until",
        bootstrap_iters=0,
    )
    samples = sorted(results["samples"][task["task"]], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


def differences(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[int, float]:
    """(how many samples differ, the largest difference of log-probabilities)."""
    differing, largest = 0, 0.0
    for mine, wanted in zip(ours, theirs, strict=True):
        if isinstance(wanted[0], str):
            differing += mine != wanted
            continue
        gaps = [abs(float(a[0]) - float(b[0])) for a, b in zip(mine, wanted, strict=True)]
        largest = max(largest, *gaps)
        same_greedy = [a[1] for a in mine] == [b[1] for b in wanted]
        differing += max(gaps) > TOLERANCE or not same_greedy
    return differing, largest


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares, prints a table, and ends with status 1 if a sample differs."""
    parser = Parser("tools/run compare_lm_eval", __doc__)
    parser.add_argument("--samples", type=positive, default=20, help="questions of each task")
    given = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OPENAI_API_KEY", "none")
    print_head(("task", "endpoint", "samples", "differ", "largest difference"))
    failed = False
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_model(folder / "hf")
        shape = ServingShape(8, 256, (8, 64), (256,), 16, 1, 5, "float32")
        with hf_source(folder / "hf") as source:
            write_llama_bundle(
                source, folder / "tiny", shape, dtype="float32", name="tiny", platforms=("cpu",)
            )
        os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")
        with Server(folder / "tiny", folder) as server:
            server.said(" (ready): ")
            choices, answers = tasks(folder, given.samples)
            for task, model, path, more in (
                (choices, "local-completions", "completions", {}),
                (choices, "local-completions", "completions", {"tokenized_requests": False}),
                (answers, "local-chat-completions", "chat/completions", {}),
            ):
                local = {
                    "model": "tiny", "base_url": f"{server.url}/v1/{path}", "num_concurrent": 4,
                    "tokenizer": str(folder / "hf"),
                    "max_length": 256, **more,
                }  # fmt: skip
                theirs = {"pretrained": str(folder / "hf"), "dtype": "float32", "device": "cpu",
                          "max_length": 256}  # fmt: skip
                ours = evaluate(model, local, task)
                differing, largest = differences(ours, evaluate("hf", theirs, task))
                failed |= differing > 0
                shown = f"{path}, as text" if more else path
                cells = (task["task"], shown, str(len(ours)), str(differing), f"{largest:.1e}")
                print_line(cells)
    sys.exit(failed)
