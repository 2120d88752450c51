"""Every mode asked the same questions: full attention by one engine, the modes that reuse chunks by another.

Two arms are always there: `exact`, full attention by vLLM without LazyRAG, and `none`, the questions without their
passages. Between them lies what the passages are good for, and a mode is measured by how much of that it loses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic import TypeAdapter

from lazyrag.backend.engine import Engine
from lazyrag.bench.report import machine
from lazyrag.calibration import deciding, model_key
from lazyrag.client import SYSTEM, LazyRAG, start_engine
from lazyrag.config import Config
from lazyrag.errors import InputError
from lazyrag.modes import EXACT, ReuseMode, check_blocks, default_block_size
from lazyrag.quality.ask import Reply, ask
from lazyrag.quality.data import Question
from lazyrag.quality.scores import Estimate, estimate, lost_share, mean

FULL, NONE = EXACT, "none"
MAX_TOKENS = 32
EVERY = 10

Start = Callable[[Config, Path], Engine]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Score:
    """How a mode did, over all questions.

    Attributes:
        logprob: of the right answers, mean over questions of the mean over tokens.
        benefit_lost: share of the passages' benefit in `logprob` that the mode loses; None if they have none for sure.
        f1, exact_match: of the greedy answers, 0 to 1.
        f1_lost: full attention's F1 less this one's.
        same: share of questions whose greedy answer is full attention's.
        recomputed: share of the passages' tokens that are computed for every prompt.
        computed_tokens: of them and of the rest of the prompt, mean.
        ttft_ms: median.
    """

    mode: str
    logprob: Estimate
    benefit_lost: Estimate | None
    f1: Estimate
    f1_lost: Estimate
    exact_match: Estimate
    same: float
    recomputed: float
    computed_tokens: float
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Arm:
    """A mode as it was measured: by which command, on what, with which replies (one a question)."""

    command: str
    machine: dict[str, Any]
    replies: tuple[Reply, ...]


@dataclass(slots=True)
class Result:
    """All that is found so far. It holds no text of questions, passages or answers.

    Attributes:
        model: its folder's name, and its key (`lazyrag.calibration.model_key`).
        data: what is asked, and the settings that answers depend on; `ids` names the questions.
        arms: by mode.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    arms: dict[str, Arm] = field(default_factory=dict)

    @property
    def benefit(self) -> Estimate:
        """How much likelier the passages make the right answers under full attention, in nats a token."""
        return estimate(mean, [full.logprob - none.logprob for full, none in self._with_and_without()])

    @property
    def f1_benefit(self) -> Estimate:
        """How much the passages add to the F1 of full attention's answers."""
        return estimate(mean, [full.f1 - none.f1 for full, none in self._with_and_without()])

    def _with_and_without(self) -> Iterator[tuple[Reply, Reply]]:
        return zip(self.arms[FULL].replies, self.arms[NONE].replies, strict=True)

    @property
    def scores(self) -> list[Score]:
        """How every mode did."""
        return [self.score(mode) for mode in self.arms]

    def score(self, mode: str) -> Score:
        """How a mode did, compared question by question."""
        mine, full, none = (self.arms[name].replies for name in (mode, FULL, NONE))
        logprobs = [[reply.logprob for reply in of] for of in (mine, full, none)]
        passage_tokens = sum(reply.passage_tokens for reply in mine)
        recomputed_tokens = sum(reply.recomputed_tokens for reply in mine)
        computed_tokens = sum(reply.prompt_tokens for reply in mine) - passage_tokens + recomputed_tokens
        return Score(
            mode=mode,
            logprob=estimate(mean, logprobs[0]),
            benefit_lost=estimate(lost_share, *logprobs) if self.benefit.low > 0 else None,
            f1=estimate(mean, [reply.f1 for reply in mine]),
            f1_lost=estimate(mean, [f.f1 - m.f1 for f, m in zip(full, mine, strict=True)]),
            exact_match=estimate(mean, [reply.exact_match for reply in mine]),
            same=fmean(f.answer == m.answer for f, m in zip(full, mine, strict=True)),
            recomputed=recomputed_tokens / passage_tokens if passage_tokens else 0.0,
            computed_tokens=computed_tokens / len(mine),
            ttft_ms=1000 * median(reply.ttft_s for reply in mine),
        )

    def values(self) -> dict[str, Any]:
        """What is written as JSON."""
        return {**asdict(self), "benefit": asdict(self.benefit), "scores": [asdict(score) for score in self.scores]}

    def save(self, path: Path) -> None:
        """Write the JSON, at once."""
        new = path.with_name(path.name + ".new")
        new.write_text(json.dumps(self.values(), indent=1) + "\n", encoding="utf-8")
        new.replace(path)

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what `save` has written.

        Raises:
            InputError: it is something else.
        """
        try:
            # What is derived of the arms is written too, for other readers.
            values = {name: json.loads(path.read_text(encoding="utf-8"))[name] for name in ("model", "data", "arms")}
            read = _FILE.validate_json(json.dumps(values, allow_nan=False), strict=True)
            each = {mode: len(arm.replies) for mode, arm in read.arms.items()}
            if each and not ({FULL, NONE} <= each.keys() and {*each.values()} == {len(read.data["ids"])}):
                raise ValueError
            if not isinstance(read.data.get("settings", {}), dict):
                raise ValueError
            return read
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            raise InputError(f"{path} is not the JSON of an evaluation.", fix="Name another file.") from None


_FILE = TypeAdapter(Result)


def evaluate(
    config: Config,
    folder: Path,
    questions: Sequence[Question],
    modes: Sequence[str],
    *,
    chat: bool = True,
    data: Mapping[str, Any] | None = None,
    out: Path | None = None,
    enough: Callable[[Result, Score], bool] = lambda result, score: False,
    command: str = "",
    tell: Tell = lambda line: None,
    start: Start = start_engine,
) -> Result:
    """Ask in every mode.

    Args:
        config: of the engines. A preamble that is not set is the system message of `LazyRAG.query`; no store is used.
        folder: of the model.
        questions: what to ask.
        modes: beside `FULL` and `NONE`, which are always asked.
        chat: see `ask`.
        data: where the questions are from, noted in the result.
        out: file for the JSON, written after every mode. If it exists, its modes are not measured again.
        enough: is asked after every mode but `FULL`, whether the ones that are left can be spared.
        command: noted in the result.
        tell: is given lines about what happens.
        start: makes an engine.

    Raises:
        ConfigError: a mode that cannot be.
        InputError: `out` is of another model, of other questions or of other settings.
        LazyRAGError: an engine does not start, or a question cannot be answered.
    """
    parsed = [ReuseMode.parse(mode) for mode in modes if mode != NONE]
    for wanted in parsed:  # now, and not when the first engine has answered everything
        check_blocks(wanted, _block_size(config, parsed))
    data = {
        **(data or {}),
        "chat": chat,
        "settings": _settings(config, folder),
        "asked": _digest(repr(list(questions))),
        "ids": [question.id for question in questions],
    }
    model = {"name": folder.name, "key": model_key(config, folder)}
    result = Result.load(out) if out is not None and out.exists() else Result(model, data)
    if others := _differences(result, Result(model, data)):
        raise InputError(
            f"{out} holds results that cannot be compared with these:",
            why=f"another {', another '.join(others)}.",
            fix="Name another file.",
        )
    lazy = [mode for mode in dict.fromkeys(map(str, parsed)) if mode != FULL]
    with ExitStack() as stack:
        rag: LazyRAG | None = None
        for mode in [FULL, *lazy]:
            if mode not in result.arms:
                if mode == FULL:
                    with running(config, folder, [FULL], start) as stock:
                        without = [replace(question, passages=()) for question in questions]
                        result.arms[NONE] = Arm(command, machine(), asked(stock, FULL, without, chat, NONE, tell))
                        result.arms[FULL] = Arm(command, machine(), asked(stock, FULL, questions, chat, FULL, tell))
                else:
                    rag = rag or stack.enter_context(running(config, folder, lazy, start))
                    result.arms[mode] = Arm(command, machine(), asked(rag, mode, questions, chat, mode, tell))
                if out is not None:
                    result.save(out)
            if mode != FULL and enough(result, result.score(mode)):
                break
    return result


def _settings(config: Config, folder: Path) -> dict[str, Any]:
    """What answers depend on beside the questions and what `model_key` covers. The operator's own, so as it is."""
    return {"preamble": config.preamble or SYSTEM, "sink": config.sink, **deciding(config, folder)}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _differences(one: Result, other: Result) -> list[str]:
    """Names of what is not the same in what two results were measured on."""
    parts = [{"model": r.model, **r.data, **r.data.get("settings", {})} for r in (one, other)]
    names = [name for name in {**parts[0], **parts[1]} if name != "settings"]
    return [name for name in names if parts[0].get(name) != parts[1].get(name)]


def _block_size(config: Config, modes: Sequence[ReuseMode]) -> int:
    """Tokens of a KV block of an engine that runs these modes."""
    return config.block_size or min(map(default_block_size, modes), default=0)


@contextmanager
def running(config: Config, folder: Path, modes: Sequence[str], start: Start) -> Iterator[LazyRAG]:
    """A client with an engine that runs these modes, keeps nothing on disk and knows no stored documents."""
    parsed = [ReuseMode.parse(mode) for mode in modes]
    config = replace(
        config,
        model=str(folder),
        mode=modes[0],
        store=None,
        preamble=config.preamble or SYSTEM,
        # vLLM's own attention, which runs `exact`, does not take every size of blocks.
        block_size=_block_size(config if modes[0] != FULL else replace(config, block_size=None), parsed),
    )
    engine = start(config, folder)
    try:
        yield LazyRAG(config, engine=engine)
    finally:
        engine.close()


def asked(
    rag: LazyRAG, mode: str, questions: Sequence[Question], chat: bool, name: str, tell: Tell
) -> tuple[Reply, ...]:
    """The replies to all questions, one after the other."""
    replies: list[Reply] = []
    for question in questions:
        replies.append(ask(rag, question, mode, chat=chat, max_tokens=MAX_TOKENS))
        if len(replies) % EVERY == 0 or len(replies) == len(questions):
            so_far = fmean(reply.logprob for reply in replies)
            tell(f"{name}: {len(replies)} of {len(questions)} questions, {so_far:.3f} nats a token of right answers")
    return tuple(replies)
