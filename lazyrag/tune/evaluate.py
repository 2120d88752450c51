"""What the documents are worth to a model in each mode: a model of Hugging Face is asked, without an engine.

Two arms are always there: `exact`, full attention, and `none`, the questions without documents. What is between them is
the documents' benefit, and a mode keeps a share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from lazyrag.modes import ReuseMode
from lazyrag.quality.data import Question
from lazyrag.quality.scores import Estimate, estimate, exact_match, f1, mean
from lazyrag.tune.forward import batches, logits, tensors
from lazyrag.tune.layout import tunable
from lazyrag.tune.samples import Sample, Sampler

NONE, EXACT = "none", "exact"
MAX_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a question.

    Attributes:
        logprob: of the first right answer, mean over its tokens, natural logarithm.
        text: the greedy answer, up to the end of its line.
        f1, exact_match: of that, 0 to 1.
    """

    logprob: float
    text: str
    f1: float
    exact_match: float


@dataclass(frozen=True, slots=True)
class Score:
    """How a mode did, over all questions.

    Attributes:
        logprob: mean over questions.
        kept: the share of the documents' benefit in `logprob` that the mode keeps, of the same model.
        f1, exact_match: mean over questions.
        same: the share of questions whose greedy answer is full attention's.
    """

    mode: str
    logprob: Estimate
    kept: Estimate
    f1: Estimate
    exact_match: Estimate
    same: float


def ask_all(
    model: Any,
    sampler: Sampler,
    asked: Sequence[Question],
    modes: Sequence[str],
    *,
    pass_tokens: int,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Reply]]:
    """The replies in every mode, `none` and `exact` first; each list has one reply a question, in order.

    Args:
        model: of `load_model`.
        sampler: of the model.
        asked: with the passages that their prompts are to have.
        modes: see `tunable`.
        pass_tokens: see `Trainer`.
        tell: is given a line a mode.
    """
    was_training = model.training
    model.eval()
    replies = {}
    for name in dict.fromkeys((NONE, EXACT, *modes)):
        arm = [replace(question, passages=()) for question in asked] if name == NONE else asked
        samples = [sampler.sample(question) for question in arm]
        mode = tunable(EXACT if name == NONE else name)
        likely = logprobs(model, samples, mode, pass_tokens)
        texts = answers(model, sampler, samples, mode, pass_tokens)
        replies[name] = [
            Reply(p, text, f1(text, q.answers), exact_match(text, q.answers))
            for p, text, q in zip(likely, texts, asked, strict=True)
        ]
        tell(f"{name}: {fmean(likely):.3f} nats a token of the right answers")
    model.train(was_training)
    return replies


@torch.no_grad()
def logprobs(model: Any, samples: Sequence[Sample], mode: ReuseMode, pass_tokens: int) -> list[float]:
    """The log-probability of each sample's answer without its end, mean over tokens."""
    rows = [replace(sample, end=()).row(mode) for sample in samples]
    found = [0.0] * len(samples)
    for indices in batches(list(map(len, rows)), pass_tokens):
        last = max(len(samples[i].answer) for i in indices) + 1
        out = logits(model, [rows[i] for i in indices], last).log_softmax(-1)
        for place, i in enumerate(indices):
            answer = torch.tensor(samples[i].answer, device=out.device)
            found[i] = out[place, -1 - len(answer) : -1].gather(-1, answer[:, None]).mean().item()
    return found


@torch.no_grad()
def answers(model: Any, sampler: Sampler, samples: Sequence[Sample], mode: ReuseMode, pass_tokens: int) -> list[str]:
    """The greedy answers, up to the end of a line."""
    rows = [sample.prompt(mode) for sample in samples]
    texts = [""] * len(samples)
    for indices in batches([len(row) + MAX_TOKENS for row in rows], pass_tokens):
        ids = greedy(model, [rows[i] for i in indices], ends={token for i in indices for token in samples[i].end})
        for i, tokens in zip(indices, ids, strict=True):
            texts[i] = sampler.tokenizer.decode(tokens).partition("\n")[0].strip()
    return texts


def greedy(model: Any, rows: Sequence[Any], ends: set[int]) -> list[list[int]]:
    """Up to `MAX_TOKENS` likeliest tokens behind each row, without the one that ends them."""
    from transformers import DynamicCache

    device = next(model.parameters()).device
    inputs = tensors(rows, device)
    cache = DynamicCache(config=model.config)
    seen = inputs["attention_mask"][:, :, -1:]  # what the last token, a literal, sees
    position = inputs["position_ids"][:, -1:]
    out: list[list[int]] = [[] for _ in rows]
    is_open = [True] * len(rows)
    for _ in range(MAX_TOKENS):
        step = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = step.logits[:, -1].argmax(-1)
        for place, id in enumerate(token.tolist()):
            is_open[place] &= id not in ends
            if is_open[place]:
                out[place].append(id)
        if not any(is_open):
            break
        position = position + 1
        seen = torch.cat([seen, torch.ones_like(seen[..., :1])], -1)
        inputs = {"input_ids": token[:, None], "position_ids": position, "attention_mask": seen}
    return out


# ---------------------------------------------------------------- figures


def scores(replies: dict[str, list[Reply]]) -> list[Score]:
    """The figures of each mode."""
    none, exact = (_logprobs(replies[name]) for name in (NONE, EXACT))
    return [
        Score(
            mode=name,
            logprob=estimate(mean, _logprobs(mine)),
            kept=kept(_logprobs(mine), exact, none),
            f1=estimate(mean, [reply.f1 for reply in mine]),
            exact_match=estimate(mean, [reply.exact_match for reply in mine]),
            same=fmean(a.text == b.text for a, b in zip(mine, replies[EXACT], strict=True)),
        )
        for name, mine in replies.items()
    ]


def kept(mine: Sequence[float], exact: Sequence[float], none: Sequence[float]) -> Estimate:
    """The share of the documents' benefit, `exact` less `none`, that is in `mine`; log-probabilities, [questions]."""
    return estimate(lambda m, e, n: (m - n).mean(-1) / (e - n).mean(-1), mine, exact, none)


def _logprobs(replies: Sequence[Reply]) -> list[float]:
    return [reply.logprob for reply in replies]
