"""Train the tiny language model that ships with the package, from scratch, on chats that ``chats.py`` makes.

python scripts/tiny_models/causal_lm.py --out /tmp/tiny --seconds 900    # two CPU cores
python scripts/tiny_models/causal_lm.py --out /tmp/toy --steps 20        # a rehearsal
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chats import Turn, demo_chats, random_chat
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from training import Clock, backward, optimise
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from words import nonsense

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY, LONGEST = 640, 128
IGNORED = -100


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on chats and on words that mean nothing."""
    rng = np.random.default_rng((seed, 5))
    texts = [turn["content"] for _ in range(4000) for turn in random_chat(rng)]
    texts += ["user\n", "assistant\n"] * 2000 + [nonsense(rng) for _ in range(2000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, START, STOP], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=END, eos_token=STOP)
    made.chat_template = TEMPLATE
    return made


def build(vocabulary: int) -> LlamaForCausalLM:
    """A fresh model."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
        )
    )


def encoded(tokenizer: PreTrainedTokenizerFast, chats: list[list[Turn]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, int64 [N, LONGEST]; only the assistant's words are labels, including the end token."""
    tokens, labels = [], []
    start, stop = (int(tokenizer.convert_tokens_to_ids(name)) for name in (START, STOP))
    heads = {role: [start, *tokenizer.encode(f"{role}\n", add_special_tokens=False)] for role in ("user", "assistant")}
    line = tokenizer.encode("\n", add_special_tokens=False)
    for chat in chats:
        ids: list[int] = []
        marked: list[int] = []
        for turn in chat:
            said = [*tokenizer.encode(turn["content"], add_special_tokens=False), stop]
            head = heads[turn["role"]]
            ids += [*head, *said, *line]
            kept = said if turn["role"] == "assistant" else [IGNORED] * len(said)
            marked += [*[IGNORED] * len(head), *kept, *[IGNORED] * len(line)]
        padding = LONGEST - len(ids)
        if padding >= 0:
            tokens.append(ids + [0] * padding)
            labels.append(marked + [IGNORED] * padding)
    return torch.tensor(tokens), torch.tensor(labels)


@torch.no_grad()
def exam(model: Any, tokenizer: PreTrainedTokenizerFast, chats: list[list[Turn]]) -> float:
    """The share of last answers that greedy decoding gives exactly."""
    model.eval()
    right = 0
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_tensors="pt")
        ids = prompt["input_ids"] if not isinstance(prompt, torch.Tensor) else prompt
        made = model.generate(ids, max_new_tokens=48, do_sample=False, pad_token_id=0)
        right += tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True) == chat[-1]["content"]
    return right / len(chats)


def main() -> None:
    """Train, measure, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chats", type=int, default=60_000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=0.0, help="stop then, finished or not")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--init", type=Path, help="go on from this folder instead of from scratch")
    args = parser.parse_args()
    began = time.time()
    torch.manual_seed(args.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.init) if args.init else train_tokenizer(args.seed)
    rng = np.random.default_rng((args.seed, 1))
    chats = sorted((random_chat(rng) for _ in range(args.chats)), key=lambda chat: sum(len(t["content"]) for t in chat))
    tokens, labels = encoded(tokenizer, chats)
    model = LlamaForCausalLM.from_pretrained(args.init).float() if args.init else build(len(tokenizer))
    parameters = list(model.parameters())
    print(
        f"{sum(p.numel() for p in parameters)} parameters, {len(tokens)} chats, {time.time() - began:.0f}s", flush=True
    )

    def passes() -> torch.Tensor:
        place = int(rng.integers(0, len(tokens) - args.batch))  # of about the same length, so little is padding
        rows = slice(place, place + args.batch)
        width = int((tokens[rows] != 0).sum(dim=1).max())
        loss = model(input_ids=tokens[rows, :width], labels=labels[rows, :width], use_cache=False).loss
        backward(loss, parameters)
        return loss.detach()

    report = optimise("chats", passes, {model: 1.0}, Clock(args.steps, args.seconds, args.lr, warmup=100), 0.999)
    model = model.to(torch.bfloat16)
    folder = args.out / "tiny_llama"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    unseen = np.random.default_rng((args.seed, 2))
    report["exam"] = exam(model.float(), tokenizer, [random_chat(unseen) for _ in range(100)])
    report["demo_format"] = exam(model, tokenizer, demo_chats(args.seed, 0, 20)[1])
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
