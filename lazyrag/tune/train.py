"""The loop: each step's questions, the two losses, and checkpoints from which a run goes on as if nothing had been.

    loss = - log p(answer | documents that do not see each other, question)
           + KL( full attention before tuning  ||  this model )          over what follows the last document

The second term (`distill`) holds the tuned model to what the untuned one would say if its documents saw each other. A
share of the samples is seen with full attention, so that this is not unlearned.

Whatever is drawn is a function of seed and step, and so is the state of torch's generator in each step. So a checkpoint
is the weights that change, the optimizer's state and the number of steps done.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn import functional

from lazyrag.errors import ConfigError
from lazyrag.modes import ReuseMode
from lazyrag.optional import need
from lazyrag.quality.data import Question
from lazyrag.tune.forward import batches, logits
from lazyrag.tune.layout import tunable
from lazyrag.tune.samples import Draws, Sample, Sampler, check_length

WARM_UP = 0.06
"""Share of the steps in which the learning rate rises; it falls along a cosine afterwards."""

MAX_TAIL = 256
"""Tokens at a prompt's end that are compared with the untuned model's."""

EXACT = ReuseMode("exact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a run depends on, beside model and data.

    Attributes:
        modes: how the documents are seen; each sample draws one.
        exact_share: of the samples that are seen with full attention instead.
        docs: in a prompt.
        steps: updates of the weights.
        batch: questions of a step.
        lr: learning rate at its highest.
        lora: rank of the update of each linear layer; None: all weights are trained.
        distill: weight of the second loss; 0: it is not computed.
        seed: of all that is drawn.
    """

    modes: tuple[str, ...] = ("lazy", "sink")
    exact_share: float = 0.2
    docs: int = 10
    steps: int = 400
    batch: int = 32
    lr: float = 1e-3
    lora: int | None = 32
    distill: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [
            name
            for name, fits in {
                "modes": bool(self.modes),
                "exact_share": 0 <= self.exact_share <= 1,
                "docs": self.docs >= 1,
                "steps": self.steps >= 1,
                "batch": self.batch >= 1,
                "lr": 0 < self.lr < 1,
                "lora": self.lora is None or self.lora >= 1,
                "distill": 0 <= self.distill < math.inf,
            }.items()
            if not fits
        ]
        if wrong:
            values = ", ".join(f"{name}={getattr(self, name)!r}" for name in wrong)
            raise ConfigError(f"A tuning recipe cannot have {values}.")
        for mode in self.modes:
            tunable(mode)

    def lr_at(self, step: int) -> float:
        """The learning rate of a step."""
        warm_up = max(1, round(WARM_UP * self.steps))
        if step < warm_up:
            return self.lr * (step + 1) / warm_up
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, self.steps - warm_up)))


@dataclass(frozen=True, slots=True)
class Step:
    """An update that was done.

    Attributes:
        done, total: steps.
        answer_loss: nats a token of the answers.
        distance: KL divergence from the untuned model, nats a token; 0 if it is not computed.
    """

    done: int
    total: int
    answer_loss: float
    distance: float

    stage = "tune"


def load_model(folder: Path, device: str | None) -> Any:
    """A causal model with fp32 weights, whose attention takes masks."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.to(torch.device(device or "cpu"))


class Trainer:
    """Trains a model by a recipe.

    Args:
        model: of `load_model`; it is changed.
        recipe: what to do.
        asked: the training questions.
        sampler: makes samples of them.
        pass_tokens: tokens of a forward pass, padding counted; decides memory, not results (but for rounding).
    """

    def __init__(
        self, model: Any, recipe: Recipe, asked: Sequence[Question], sampler: Sampler, *, pass_tokens: int
    ) -> None:
        self.recipe, self.done = recipe, 0
        self._sampler, self._pass_tokens = sampler, pass_tokens
        self._draws = Draws(asked, docs=recipe.docs, batch=recipe.batch, seed=recipe.seed)
        self._modes = [tunable(mode) for mode in recipe.modes]
        self._max_tokens = int(model.config.max_position_embeddings)
        torch.manual_seed(recipe.seed)
        self._teacher: Any = None
        if recipe.lora is not None:
            peft = need("peft", extra="tune")
            config = peft.LoraConfig(
                r=recipe.lora, lora_alpha=2 * recipe.lora, target_modules="all-linear", task_type="CAUSAL_LM"
            )
            self.model = peft.get_peft_model(model, config)
        else:
            self.model = model
            if recipe.distill:
                self._teacher = copy.deepcopy(model).requires_grad_(False).eval()
        self.model.train()
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(self.trained.values(), lr=recipe.lr, weight_decay=0.0)

    def run(self) -> Iterator[Step]:
        """Do the steps that are left."""
        while self.done < self.recipe.steps:
            yield self._step()

    def _step(self) -> Step:
        number, recipe = self.done, self.recipe
        torch.manual_seed(Random(f"{recipe.seed} step {number}").getrandbits(63))
        drawn = [(self._sampler.sample(question), self._mode(random)) for question, random in self._draws.step(number)]
        check_length((sample.row(mode) for sample, mode in drawn), self._max_tokens)
        answer_tokens = sum(len(sample.answer) + len(sample.end) for sample, _ in drawn)
        tail_tokens = sum(_tail(sample) - 1 for sample, _ in drawn)
        answer_loss = distance = 0.0
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.lr_at(number)
        for indices in batches([len(sample.row(mode)) for sample, mode in drawn], self._pass_tokens):
            answers, distances = self._losses([drawn[i] for i in indices])
            answers, distances = answers / answer_tokens, distances / tail_tokens
            torch.autograd.backward(answers + recipe.distill * distances)
            answer_loss, distance = answer_loss + answers.item(), distance + distances.item()
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return Step(self.done, recipe.steps, answer_loss, distance)

    def _mode(self, random: Random) -> ReuseMode:
        return EXACT if random.random() < self.recipe.exact_share else random.choice(self._modes)

    def _losses(self, drawn: Sequence[tuple[Sample, ReuseMode]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of both losses over the tokens of a forward pass."""
        rows = [sample.row(mode) for sample, mode in drawn]
        last = max(_tail(sample) for sample, _ in drawn)
        student = logits(self.model, rows, last, fast=True)[:, :-1].log_softmax(-1)
        targets, answers, tails = _targets([sample for sample, _ in drawn], last, student.device)
        of_answers = -student.gather(-1, targets[..., None])[..., 0][answers].sum()
        if not self.recipe.distill:
            return of_answers, torch.zeros((), device=student.device)
        with torch.no_grad(), self._untuned() as teacher:
            exact = [sample.row(EXACT) for sample, _ in drawn]
            wanted = logits(teacher, exact, last, fast=True)[:, :-1].log_softmax(-1)
        distances = functional.kl_div(student[tails], wanted[tails], reduction="sum", log_target=True)
        return of_answers, distances

    @contextmanager
    def _untuned(self) -> Iterator[Any]:
        """The model as it was before."""
        if self._teacher is not None:
            yield self._teacher
        else:
            with self.model.disable_adapter():
                yield self.model

    # ------------------------------------------------------------ checkpoints

    def save(self, path: Path, about: dict[str, Any]) -> None:
        """Write a checkpoint; a crash leaves the one before.

        Args:
            path: its file.
            about: what must be the same for a run that goes on from it.
        """
        state = {
            "about": {**about, "recipe": asdict(self.recipe)},
            "done": self.done,
            "weights": {name: p.detach().cpu() for name, p in self.trained.items()},
            "optimizer": self._optimizer.state_dict(),
        }
        new = path.with_suffix(".new")
        with new.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)

    def resume(self, path: Path, about: dict[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            ConfigError: it is of another run, or damaged.
        """
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            was, now = state["about"], {**about, "recipe": asdict(self.recipe)}
        except (OSError, RuntimeError, LookupError, ValueError, TypeError, EOFError, pickle.UnpicklingError) as error:
            raise ConfigError(
                f"The checkpoint {path} cannot be read:", why=f"{type(error).__name__}.", fix="Start anew without it."
            ) from error
        flat_was, flat_now = {**was, **was["recipe"]}, {**now, **now["recipe"]}
        changed = sorted(name for name in flat_now if name != "recipe" and flat_was.get(name) != flat_now[name])
        if changed:
            raise ConfigError(
                f"The checkpoint {path} is of another run:",
                why=f"different are {', '.join(changed)}.",
                fix="Use the same model, data and settings, or another folder.",
            )
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(state["weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]


def _tail(sample: Sample) -> int:
    """Tokens at a sample's end whose successors are compared: behind the last chunk, and the answer at least."""
    return max(min(sample.num_tail, MAX_TAIL), len(sample.answer) + len(sample.end) + 1)


def _targets(samples: Sequence[Sample], last: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """For the last tokens but one of each row: what follows, whether it is the answer's, whether it is the tail's.

    Each is [B, last - 1].
    """
    targets, answers, tails = [], [], []
    for sample in samples:
        answer = [*sample.answer, *sample.end]
        tail = [*sample.parts[-1][0], *answer][-_tail(sample) :][1:]
        fill = last - 1 - len(tail)
        targets.append([0] * fill + tail)
        tails.append([False] * fill + [True] * len(tail))
        answers.append([False] * (last - 1 - len(answer)) + [True] * len(answer))
    return tuple(torch.tensor(lists, device=device) for lists in (targets, answers, tails))
