"""What the answers must be: Hugging Face in fp32, teacher-forced on the engine's own tokens.

Two oracles:
    one pass   true positions and a block mask: a chunk's tokens see their own chunk, literals see everything before.
    spliced    a cache put together by hand: each chunk's K and V as computed in the chunk's own context (behind the
               preamble or the sink, if there is one), K rotated to its true position, the literals run on top.
Without a preamble or a sink they are the same function. Behind one, and for a segment that begins inside its chunk,
only the spliced one is what a reused chunk can mean: a chunk saw the preamble next door, wherever it is used later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from lazyrag.backend.layout import Span
from lazyrag.kernels import reference

Tokens = list[int]


@dataclass(frozen=True)
class Use:
    """A chunk where a prompt uses it: `chunk[offset:offset + length]` is reused.

    The prompt must have `chunk[:offset]` right before, as literal text or reused itself; and if `whole`, the rest of
    the chunk right behind.
    """

    chunk: Tokens
    offset: int = 0
    length: int | None = None
    whole: bool = False

    @property
    def tokens(self) -> Tokens:
        return self.chunk[self.offset :][: self.length]

    @property
    def computed(self) -> Tokens:
        """The tokens that were computed to get these: the chunk up to here."""
        return self.chunk[: self.offset + len(self.tokens)]


@dataclass(frozen=True)
class Prompt:
    """Parts in logical order: literal tokens, or a `Use` of a chunk. Ends with literal tokens."""

    parts: Sequence[Tokens | Use]
    prefix: Tokens = field(default_factory=list)
    salt: str = ""
    sink: Tokens = field(default_factory=list)

    @property
    def runs(self) -> list[tuple[int, Tokens, Use | None]]:
        """Each part with its start, behind the prefix."""
        runs, start = [], len(self.prefix)
        for part in self.parts:
            use = part if isinstance(part, Use) else None
            tokens = part.tokens if isinstance(part, Use) else part
            runs.append((start, tokens, use))
            start += len(tokens)
        return runs

    @property
    def token_ids(self) -> Tokens:
        return self.prefix + [t for _, tokens, _ in self.runs for t in tokens]

    @property
    def spans(self) -> list[Span]:
        return [
            Span(start, len(tokens), use.offset, len(use.chunk) if use.whole else 0)
            for start, tokens, use in self.runs
            if use is not None
        ]

    @property
    def behind(self) -> Tokens:
        """What its chunks are computed behind."""
        return self.prefix or self.sink


class Oracle:
    """Log-probabilities of a model at the positions of forced tokens."""

    def __init__(self, model: Path, device: str = "cpu") -> None:
        self._device = torch.device(device)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self.model = loaded.eval().to(self._device)
        self._config = self.model.config
        rotary = self.model.model.rotary_emb
        self._inv_freq = rotary.inv_freq.double()

    def logprobs(self, prompt: Prompt, forced: Tokens) -> torch.Tensor:
        """[len(forced), vocabulary]: at each step, given the prompt and the forced tokens before."""
        movable = prompt.behind or any(use is not None and use.offset for _, _, use in prompt.runs)
        with self._device:
            return (self.spliced if movable else self.one_pass)(prompt, forced).cpu()

    @torch.no_grad()
    def one_pass(self, prompt: Prompt, forced: Tokens) -> torch.Tensor:
        ids = prompt.token_ids + forced[:-1]
        owner = torch.full((len(ids),), -1)
        for n, span in enumerate(prompt.spans):
            owner[span.start : span.start + span.num_tokens] = n
        i = torch.arange(len(ids))
        literal = (owner == -1)[:, None]
        own_or_before = literal | (owner[None] == owner[:, None]) | (i < len(prompt.prefix))[None]
        seen = (i[None] <= i[:, None]) & own_or_before
        mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)[None, None]
        logits = self.model(input_ids=torch.tensor([ids]), attention_mask=mask, position_ids=i[None]).logits
        return logits[0, -len(forced) :].log_softmax(-1)

    @torch.no_grad()
    def spliced(self, prompt: Prompt, forced: Tokens) -> torch.Tensor:
        cache = DynamicCache(config=self._config)
        if prompt.prefix:
            self._run(prompt.prefix, cache, 0)
        runs = prompt.runs
        last_start, last, _ = runs[-1]
        logits = torch.empty(0)
        for start, tokens, use in [*runs[:-1], (last_start, last + forced[:-1], None)]:
            if use is None:
                logits = self._run(tokens, cache, start) if tokens else logits
                continue
            own = DynamicCache(config=self._config)
            self._run(prompt.behind + use.computed, own, 0)
            base = len(prompt.behind) + use.offset
            for number, layer in enumerate(own.layers):
                # [1, H, n, D]
                k, v = (x[:, :, base : base + len(tokens)] for x in (layer.keys, layer.values))
                k = reference.rotate(k[0].transpose(0, 1), start - base, self._inv_freq).transpose(0, 1)[None]
                cache.update(k, v, number)
        return logits[-len(forced) :].log_softmax(-1)

    def _run(self, ids: Tokens, cache: DynamicCache, start: int) -> torch.Tensor:
        at = torch.arange(start, start + len(ids))
        return self.model(input_ids=torch.tensor([ids]), past_key_values=cache, position_ids=at[None]).logits[0]
