"""The answers come first: a small model with random weights is asked through both engines and by Hugging Face in fp32.

Each case is a prompt whose log-probabilities must be those of the reference, given the engine's own tokens (teacher
forcing). How near is measured, not chosen: plain vLLM's deviation on ordinary prompts is the rounding of this device
and dtype, and LazyRAG may deviate twice as much. Two cases are wrong on purpose (a reference that sees everything, for
a prompt whose chunks must not see each other; and one whose chunks stand elsewhere): a gate that lets those through
proves nothing, and fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from lazyrag.bench.engines import EngineProcess
from lazyrag.bench.workload import Prompt

MAX_TOKENS, LOGPROBS = 8, 20
FACTOR, FLOOR, CEILING = 2.0, 1e-4, 0.15
"""A deviation may be FACTOR times plain vLLM's: FLOOR (of a log-probability) where vLLM is exact, CEILING at most."""


@dataclass(frozen=True, slots=True)
class Check:
    """One case of the gate.

    Attributes:
        name: in reports.
        deviation: root mean square over the returned log-probabilities, from the reference's.
        bound: what it may be at most, or must exceed.
        must_agree: whether the case is right, or wrong on purpose.
    """

    name: str
    deviation: float
    bound: float
    must_agree: bool = True

    @property
    def passed(self) -> bool:
        """NaN passes nothing."""
        return self.deviation <= self.bound if self.must_agree else self.deviation > self.bound


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt for an engine and what the reference is told of it.

    Attributes:
        name: of the case.
        prompt: sent to the engine.
        spans: what the reference takes for chunks; None: the prompt's.
        order: positions of the reference's tokens; None: in order.
        must_agree: see `Check`.
    """

    name: str
    prompt: Prompt
    spans: tuple[tuple[int, int], ...] | None = None
    moved: int = 0
    must_agree: bool = field(default=True)


def examine(engines: Mapping[str, EngineProcess], model: Path, vocabulary: tuple[int, int]) -> list[Check]:
    """Run the gate.

    Args:
        engines: "stock", without LazyRAG, and "lazy"; "materialize" if there is one.
        model: folder of the model that both run.
        vocabulary: [low, high) of token ids.

    Returns:
        one check a case; figures may be shown if all have passed.
    """
    reference = Reference(model)
    draw = _words(vocabulary)
    ordinary = [Prompt(draw(n)) for n in (40, 300, 700)]
    noise = [reference.deviation(prompt, (), answer) for prompt, answer in _ask(engines["stock"], ordinary)]
    bound = min(max(FACTOR * max(noise), FLOOR), CEILING)
    checks = [Check(f"plain vLLM, {len(p.token_ids)} tokens", d, bound) for p, d in zip(ordinary, noise, strict=True)]
    asked = [("lazy", question) for question in questions(draw)]
    if "materialize" in engines:
        asked += [("materialize", question) for question in copied(draw)]
    for name, question in asked:
        ((_, answer),) = _ask(engines[name], [question.prompt])
        spans = question.prompt.spans if question.spans is None else question.spans
        deviation = reference.deviation(question.prompt, spans, answer, question.moved)
        checks.append(Check(question.name, deviation, bound, question.must_agree))
    return checks


def questions(draw: Any) -> list[Question]:
    """What the lazy engine is asked, in this order: what is hot depends on what came before."""
    a, b, c, first, between, end = draw(200), draw(77), draw(300), draw(20), draw(12), draw(16)
    alone = joined([a, end], {0})
    interleaved = joined([first, a, between, b, c, end], {1, 3, 4})
    reordered = joined([c, between, b, draw(5), a, draw(16)], {0, 2, 4})
    again = joined([first, c, draw(30), a, draw(16)], {1, 3})
    return [
        Question("one chunk at the start is an ordinary prompt", alone, spans=()),
        Question("chunks between literals", interleaved),
        Question("the same chunks in another order", reordered),
        Question("an ordinary prompt", Prompt(draw(150))),
        Question("wrong on purpose: chunks that see each other", again, spans=(), must_agree=False),
        Question("wrong on purpose: chunks out of place", again, moved=5, must_agree=False),
    ]


def copied(draw: Any) -> list[Question]:
    """What an engine that copies chunks is asked: documents of whole blocks in front."""
    a, b, c = draw(192), draw(64), draw(320)
    return [
        Question("materialize: chunks are copied", joined([a, b, c, draw(16)], {0, 1, 2})),
        Question("materialize: to other places", joined([c, a, b, draw(16)], {0, 1, 2})),
        Question("materialize, wrong on purpose", joined([b, a, draw(16)], {0, 1}), moved=5, must_agree=False),
    ]


def joined(parts: Sequence[list[int]], chunks: set[int]) -> Prompt:
    """A prompt of parts, those with the given numbers reusable."""
    token_ids: list[int] = []
    spans = []
    for number, part in enumerate(parts):
        if number in chunks:
            spans.append((len(token_ids), len(part)))
        token_ids += part
    names = (f"part {number} {parts[number][:4]}" for number in sorted(chunks))
    return Prompt(token_ids, tuple(spans), tuple(names))


def _words(vocabulary: tuple[int, int]) -> Any:
    random, words = Random(0), range(*vocabulary)
    return lambda count: random.choices(words, k=count)


def _ask(engine: EngineProcess, prompts: Sequence[Prompt]) -> list[tuple[Prompt, Any]]:
    answers = engine.call("answers", prompts=prompts, max_tokens=MAX_TOKENS, logprobs=LOGPROBS)
    return list(zip(prompts, answers, strict=True))


class Reference:
    """Hugging Face in fp32 on the CPU; a chunk's tokens see their own chunk, all others what is before them."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self._model = loaded.eval()

    def deviation(self, prompt: Prompt, spans: Sequence[tuple[int, int]], answer: Any, moved: int = 0) -> float:
        """Root mean square difference of the log-probabilities that the engine returned.

        Args:
            prompt: what was asked.
            spans: its chunks.
            answer: (token ids, {token: log-probability} for each).
            moved: chunks stand so many positions further on than they do.
        """
        token_ids, returned = answer
        expected = self._logprobs(prompt.token_ids + token_ids[:-1], spans, len(token_ids), moved)
        squares = [
            (logprob - expected[step][token].item()) ** 2
            for step, logprobs in enumerate(returned)
            for token, logprob in logprobs.items()
        ]
        return float((sum(squares) / len(squares)) ** 0.5)

    def _logprobs(self, ids: list[int], spans: Sequence[tuple[int, int]], last: int, moved: int) -> Any:
        import torch

        i = torch.arange(len(ids))
        owner, position = torch.full_like(i, -1), i.clone()
        for number, (start, length) in enumerate(spans):
            owner[start : start + length] = number
            position[start : start + length] += moved
        seen = (i[None] <= i[:, None]) & ((owner == -1)[:, None] | (owner[None] == owner[:, None]))
        mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)[None, None]
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([ids]), attention_mask=mask, position_ids=position[None]).logits
        return logits[0, -last:].log_softmax(-1)
