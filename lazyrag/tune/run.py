"""From files to a model folder: `lazyrag tune`.

OUT/checkpoint.pt    while it runs; the same command with --resume goes on from it
OUT/adapter/         the update by itself, as `peft` keeps it, if it is one of low rank
OUT/                 the tuned model as any other: weights, tokenizer, settings; and tune.json, README.md
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lazyrag._version import __version__
from lazyrag.backend.fingerprint import model_fingerprint
from lazyrag.errors import ConfigError
from lazyrag.optional import need
from lazyrag.quality import cloze
from lazyrag.quality.data import Passage, Question, load
from lazyrag.tune import record
from lazyrag.tune.evaluate import Score, ask_all, scores
from lazyrag.tune.samples import Sampler, ids_of, passages_of, split, with_distractors
from lazyrag.tune.train import Recipe, Step, Trainer, load_model

CHECKPOINT, ADAPTER, CARD = "checkpoint.pt", "adapter", "README.md"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.gguf")

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run is about.

    Attributes:
        model: folder of the model to tune.
        out: folder to write.
        asked: the questions, with their passages.
        synthetic: passages that questions are made about, beside those of `asked`.
        cloze: how many questions are made.
        held_out: share of the questions that is not trained on.
        evaluated: held-out questions that are asked before and after, at most.
        resume: go on from the checkpoint in `out`.
        save_every: steps between checkpoints.
        pass_tokens: of a forward pass.
        device: of torch; None: a GPU if there is one.
        epochs: how often each question is seen, which decides the recipe's steps; None: the recipe says these.
    """

    model: Path
    out: Path
    recipe: Recipe
    asked: Sequence[Question]
    synthetic: Sequence[Passage] = ()
    cloze: int = 0
    held_out: float = 0.1
    evaluated: int = 100
    resume: bool = False
    save_every: int = 50
    pass_tokens: int = 8192
    device: str | None = None
    epochs: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a run has brought: figures on held-out questions before and after; none if there are no such questions."""

    out: Path
    before: list[Score] = field(default_factory=list)
    after: list[Score] = field(default_factory=list)

    def values(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "out": str(self.out)}


def tune(options: Options, tell: Tell = lambda line: None) -> Iterator[Step | Result]:
    """Tune a model; yields each step, and the result last.

    Raises:
        ConfigError: settings that cannot be, a folder that is in use, a checkpoint of another run.
        InputError: a prompt is too long for the model.
    """
    if options.recipe.lora is not None:
        need("peft", extra="tune")
    path = options.out / CHECKPOINT
    # A checkpoint that was being written when the run was killed is nothing to keep.
    found = {file.name for file in options.out.glob("*")} - {path.with_suffix(".new").name}
    if found and not (options.resume and path.exists()):
        fix = "Name another one, or go on with --resume." if path.exists() else "Name another one."
        raise ConfigError(f"The folder {options.out} is not empty.", fix=fix)
    training, held = sides(options)
    options = _settled(options, len(training))
    sampler = Sampler(options.model, passages_of([*training, *held]))
    model = load_model(options.model, options.device)
    trainer = Trainer(model, options.recipe, training, sampler, pass_tokens=options.pass_tokens)
    about = {"model": model_fingerprint(options.model, dtype="float32"), "data": _digest(training)}
    if path.exists():
        trainer.resume(path, about)
    options.out.mkdir(parents=True, exist_ok=True)
    tell(f"{len(training)} questions to train on, {len(held)} to measure with")
    for step in trainer.run():
        if step.done % options.save_every == 0 or step.done == step.total:
            trainer.save(path, about)
        yield step
    tuned = finished(trainer, options)
    before, after = (
        scores(ask_all(of, sampler, held, options.recipe.modes, pass_tokens=options.pass_tokens, tell=tell))
        if held
        else []
        for of in (load_model(options.model, options.device), tuned)
    )
    write_model(tuned, options.model, options.out)
    result = Result(options.out, before, after)
    _describe(options, result, training, held)
    path.unlink()
    yield result


def _settled(options: Options, num_training: int) -> Options:
    """The options with what they leave open."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    recipe = options.recipe
    if options.epochs is not None:
        recipe = replace(recipe, steps=max(1, round(options.epochs * num_training / recipe.batch)))
    return replace(options, device=device, recipe=recipe, epochs=None)


def passages(source: Path, namespace: str = "") -> list[Passage]:
    """The passages of a store, or of a file of questions.

    Raises:
        InputError: neither can be read.
    """
    if not source.is_dir():
        return passages_of(load(source).questions)
    from lazyrag.retrievers.store import Store

    with Store.open(source) as store:
        return [
            Passage(chunk.source, chunk.text)
            for document in store.documents(namespace)
            for chunk in store.chunks_of(document.id, namespace)
        ]


def sides(options: Options) -> tuple[list[Question], list[Question]]:
    """The questions to train on, and those to measure with: with their prompts' passages, all of them held out."""
    made = cloze.questions(
        [*passages_of(options.asked), *options.synthetic], limit=options.cloze, seed=options.recipe.seed
    )
    parts = split([*options.asked, *made], options.held_out)
    given = set(options.asked)
    natural = [question for question in parts.held_out if question in given] or parts.held_out
    pool = passages_of(parts.held_out)
    held = [
        with_distractors(question, pool, options.recipe.docs, Random(f"{options.recipe.seed} held out {number}"))
        for number, question in enumerate(natural[: options.evaluated])
    ]
    return parts.training, held


def finished(trainer: Trainer, options: Options) -> Any:
    """The trained model, with the weights that its folder will have: rounded to the dtype of the original's."""
    dtype = _dtype(options.model)
    model = trainer.model
    if options.recipe.lora is not None:
        # Rounded first, so that who merges the adapter later gets the same weights.
        _round(trainer.trained.values(), dtype)
        model.save_pretrained(options.out / ADAPTER)
        model = model.merge_and_unload()
    _round(model.parameters(), dtype)
    return model


@torch.no_grad()
def _round(parameters: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    for parameter in parameters:
        parameter.copy_(parameter.to(dtype))


def _dtype(folder: Path) -> torch.dtype:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"), None)
    return found if isinstance(found, torch.dtype) else torch.float32


def write_model(model: Any, original: Path, out: Path) -> None:
    """Put a model's weights into a folder, and what else the original's folder holds. Its settings come last.

    The settings are the original's, not what this version of transformers would write: an older vLLM has to read them.
    """
    dtype = _dtype(original)
    with TemporaryDirectory(dir=out) as folder:
        model.to(dtype).save_pretrained(folder)
        for path in sorted(Path(folder).iterdir()):
            if any(fnmatch(path.name, pattern) for pattern in WEIGHTS):
                path.replace(out / path.name)
    left = (*WEIGHTS, record.FILE_NAME, CARD)
    others = [path for path in original.iterdir() if path.is_file() and not any(fnmatch(path.name, p) for p in left)]
    for path in sorted(others, key=lambda path: path.name == "config.json"):
        shutil.copyfile(path, out / path.name)


def _digest(asked: Iterable[Question]) -> str:
    """Changes with what is trained on."""
    digest = sha256()
    for question in asked:
        digest.update(repr(question).encode())
    return digest.hexdigest()


# ---------------------------------------------------------------- what the folder says


def _describe(options: Options, result: Result, training: Sequence[Question], held: Sequence[Question]) -> None:
    values = {
        "lazyrag": __version__,
        "model": options.model.name,
        "recipe": asdict(options.recipe),
        "questions": {"training": len(training), "measured": len(held)},
        "before": [asdict(score) for score in result.before],
        "after": [asdict(score) for score in result.after],
    }
    record.write(options.out, values, trained_on=ids_of(training), held_out=ids_of(held))
    (options.out / CARD).write_text("\n".join(_card(options, result, training, held)) + "\n", encoding="utf-8")


def _card(options: Options, result: Result, training: Sequence[Question], held: Sequence[Question]) -> Iterator[str]:
    recipe = options.recipe
    what = f"an update of rank {recipe.lora} of every linear layer" if recipe.lora is not None else "all weights"
    yield from ("---", f"base_model: {options.model.name}", "tags: [lazyrag, block-attention]", "---")
    yield f"# {options.model.name}, tuned for documents that do not see each other"
    yield ""
    yield f"Made by `lazyrag tune` {__version__} from {options.model.name}, whose licence holds for it, too."
    yield ""
    yield f"- Trained: {what}, for {recipe.steps} steps of {recipe.batch} questions, learning rate {recipe.lr:g}"
    yield "  (risen linearly, fallen along a cosine), AdamW, gradients clipped to norm 1, seed " + f"{recipe.seed}."
    yield f"- Seen: {recipe.docs} documents a question at their true positions, in mode {', '.join(recipe.modes)};"
    yield f"  {recipe.exact_share:.0%} of the samples with full attention."
    yield f"- Loss: of the answer alone; plus {recipe.distill:g} times the KL divergence from the untuned model with"
    yield "  full attention, over what follows the last document."
    yield f"- Data: {len(training)} questions about {len(passages_of(training))} documents, which `tune.json` names by"
    yield f"  digest. No document of the {len(held)} questions below was trained on."
    if result.after:
        yield ""
        yield from table(result)


def table(result: Result) -> Iterator[str]:
    """The figures as a Markdown table."""
    yield "| model | mode | log-likelihood a token | documents' benefit kept | F1 | exact match |"
    yield "|---|---|---|---|---|---|"
    for name, figures in (("before", result.before), ("after", result.after)):
        for score in figures:
            kept = f"{score.kept.value:.1%} ({score.kept.low:.1%} to {score.kept.high:.1%})"
            answers = f"{score.f1.value:.3f} | {score.exact_match.value:.3f}"
            yield f"| {name} | {score.mode} | {score.logprob.value:.3f} | {kept} | {answers} |"
