"""Tuning three times over: `scripts/train_llama`'s step on a mesh, and TRL on one CPU.

Chats (`SFTTrainer`, the assistant's words alone), preferences (`DPOTrainer`) and distillation (the
divergence of `GKDTrainer`, mixed with the cross-entropy) start from the same weights of a Llama and
see the same rows in the same order, in float32 with AdamW. Both read the same file and write chats
by the same template. Printed are losses, and how far apart numbers are at most.

It needs `pip install trl`, which brings PyTorch and transformers. Examples:
    tools/run compare_trl --steps 50 --mesh data=4,model=2
"""

import dataclasses
import functools
import importlib.metadata
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any

import jax

import spmd
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, positive
from spmd.cli.specs import mesh_axes
from spmd.models.llama import fresh
from spmd.models.llama.named import CONFIGS, named_config
from spmd.models.llama.parameters import TEACHER
from spmd.models.llama.program import LlamaProgram
from spmd.models.llama.weights.config import read_config
from spmd.models.llama.weights.load import load
from spmd.models.llama.weights.save import save
from spmd.models.training.data.source import DataConfig, load_datasets
from spmd.models.training.options import TrainerOptions
from spmd.models.training.run.description import RunConfig
from spmd.models.training.run.optimizer import OptimizerConfig

KINDS = ("chats", "preferences", "distillation")
ROWS, BATCH, SEQ_LEN = 200, 8, 400
BETA, TEMPERATURE, SHARE = 0.1, 1.0, 0.5
OPTIMIZER = OptimizerConfig(
    name="adamw", learning_rate=1e-3, warmup_steps=0, schedule="constant", clip_norm=None
)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Numbers = dict[str, float]


def rows_of(kind: str) -> list[dict[str, Any]]:
    """Rows as TRL has them; of each, one alone fits into a sample of `SEQ_LEN` tokens."""
    text, draw = "".join(topics.topics.values()), random.Random(0)

    def said(role: str) -> dict[str, str]:
        start, length = draw.randrange(len(text) - 100), draw.randint(70, 90)
        return {"role": role, "content": text[start : start + length].strip()}

    def row() -> dict[str, Any]:
        a, b, c, d = map(said, ("user", "assistant", "user", "assistant"))
        if kind == "preferences":
            return {"prompt": [a], "chosen": [b], "rejected": [d]}
        return {"messages": [a, b, c, d]}

    return [row() for _ in range(ROWS)]


def our_numbers(
    folder: Path, file: Path, kind: str, steps: int, mesh: spmd.Mesh, teacher: Path
) -> tuple[list[Numbers], list[int]]:
    """Of each step of the program that `scripts/train_llama` runs, and the rows in their order."""
    model = read_config(folder)
    run = RunConfig(
        model=model,
        optimizer=OPTIMIZER,
        options=TrainerOptions(steps=steps),
        mesh=mesh.shape,
        seq_len=SEQ_LEN,
        global_batch=BATCH,
        dpo_beta=BETA,
        distill_temperature=TEMPERATURE,
        distill_share=SHARE,
    )
    config = DataConfig([str(file)], str(folder), valid=[str(file)])
    data, _ = load_datasets(config, seq_len=SEQ_LEN, batch_size=BATCH)
    other = read_config(teacher) if kind == "distillation" else None
    program = LlamaProgram(run, mesh, data.struct(), other)
    params = load(folder, model, program.base_shardings())
    if other:
        params[TEACHER] = load(teacher, other, program.step.in_shardings[0][TEACHER])
    if kind == "preferences":
        data = dataclasses.replace(data, references=program.reference(params, {kind: data})[kind])
    state = program.fresh_state(params)
    params, rule = state.params, state.opt_state
    windows = data.windows[0]
    assert len(windows) == ROWS, "a sample holds more than a row"
    numbers = {windows[number]["inputs"].tobytes(): number for number in range(ROWS)}
    found, order = [], []
    for step in range(steps):
        batch = data(step)
        order += [numbers[row.tobytes()] for row in batch["inputs"]]
        params, rule, metrics = program.step(params, rule, program.place(batch))
        found.append({name: float(x) for name, x in metrics.items()})
    return found, order


def their_numbers(
    folder: Path, rows: list[dict[str, Any]], kind: str, steps: int, teacher: Path
) -> list[Numbers]:
    """Of each step of a trainer of TRL."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl.experimental.gkd import GKDTrainer

    def model(where: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)

    base: Any = trl.DPOTrainer if kind == "preferences" else trl.SFTTrainer
    other = model(teacher) if kind == "distillation" else None
    losses: list[float] = []

    class Recording(base):  # type: ignore[misc]
        def compute_loss(self, net: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if other is None:
                loss = super().compute_loss(net, inputs, *args, **kwargs)
            else:
                asked = {name: inputs[name] for name in ("input_ids", "attention_mask")}
                labels, logits = inputs["labels"][:, 1:], net(**asked).logits[:, :-1]
                with torch.no_grad():
                    theirs = other(**asked).logits[:, :-1]
                apart = GKDTrainer.generalized_jsd_loss(logits, theirs, labels, 0.0, TEMPERATURE)
                entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
                loss = (1 - SHARE) * entropy + SHARE * TEMPERATURE**2 * apart
            losses.append(loss.item())
            return loss

    make: Any = functools.partial(trl.SFTConfig, assistant_only_loss=True)
    if kind == "preferences":
        make = functools.partial(trl.DPOConfig, beta=BETA, precompute_ref_log_probs=True)
    config = make(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        train_sampling_strategy="sequential",
        max_length=SEQ_LEN,
        learning_rate=OPTIMIZER.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=OPTIMIZER.beta1,
        adam_beta2=OPTIMIZER.beta2,
        weight_decay=OPTIMIZER.weight_decay,
        max_grad_norm=0.0,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Recording(
        model=model(folder),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logged = [record for record in trainer.state.log_history if "grad_norm" in record]
    return [{**record, "loss": loss} for record, loss in zip(logged, losses, strict=True)]


def write_models(root: Path, name: str) -> tuple[Path, Path]:
    """Folders of a model and of a teacher with other weights, both with a tokenizer of bytes."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    text = tokenizers.Tokenizer(tokenizers.models.BPE({x: n for n, x in enumerate(letters)}, []))
    text.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = tokenizers.decoders.ByteLevel()
    text.add_special_tokens(["</s>", "<|user|>", "<|assistant|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=text, eos_token="</s>", pad_token="</s>")
    fast.chat_template = TEMPLATE
    config = dataclasses.replace(named_config(name), vocab_size=len(fast))
    folders = root / "model", root / "teacher"
    for seed, folder in enumerate(folders):
        params = jax.jit(functools.partial(fresh.init, config=config))(jax.random.key(seed))
        save(params, config, folder)
        fast.save_pretrained(folder)
    return folders


def compared(kind: str, name: str, steps: int, mesh: spmd.Mesh) -> list[tuple[Numbers, Numbers]]:
    """Our numbers and TRL's, of each step."""
    with tempfile.TemporaryDirectory() as made:
        folder, teacher = write_models(Path(made), name)
        rows, file = rows_of(kind), Path(made) / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        ours, order = our_numbers(folder, file, kind, steps, mesh, teacher)
        theirs = their_numbers(folder, [rows[n] for n in order], kind, steps, teacher)
    return list(zip(ours, theirs, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the losses of both, and how far apart their numbers are."""
    parser = Parser("tools/run compare_trl", __doc__)
    add = parser.add_argument
    add("--model", choices=sorted(CONFIGS), default="quickstart", help="which Llama")
    add("--mesh", type=mesh_axes, default="data=4,model=2", help="mesh of our run")
    add("--steps", type=positive, default=50, help="steps of each kind")
    given = parser.parse_args(arguments)
    mesh = spmd.make_mesh(**given.mesh)
    packages = ("jax", "trl", "transformers", "torch")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages), "\n")
    found = {kind: compared(kind, given.model, given.steps, mesh) for kind in KINDS}
    print_head(("step", *(f"{kind}: {who}" for kind in KINDS for who in ("spmd", "TRL"))))
    for number in (*range(0, given.steps - 1, max(1, given.steps // 10)), given.steps - 1):
        cells = (f"{x['loss']:.6f}" for kind in KINDS for x in found[kind][number])
        print_line([str(number + 1), *cells])
    print()
    for kind, pairs in found.items():
        for name in sorted(set(pairs[0][0]) & set(pairs[0][1]) - {"learning_rate", "step"}):
            most = max(abs(one[name] - other[name]) for one, other in pairs)
            print(f"{kind}: {name} at most {most:.1e} apart in {given.steps} steps")
