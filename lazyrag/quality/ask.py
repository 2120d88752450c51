"""One question, one mode: what is answered, how likely the right answer is, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from statistics import fmean

from lazyrag.backend.engine import Sampling
from lazyrag.chat import CONTENT, TextPiece
from lazyrag.client import LazyRAG, Prompt
from lazyrag.quality.data import Question
from lazyrag.quality.scores import exact_match, f1
from lazyrag.types import canonical


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a question.

    Attributes:
        logprob: of the first right answer, mean over its tokens, natural logarithm.
        f1, exact_match: of the greedy answer, 0 to 1.
        answer: names the greedy answer's text: equal for equal ones, and it tells nothing of it.
        prompt_tokens: of the prompt.
        passage_tokens: of these, tokens of passages.
        recomputed_tokens: tokens of passages that are computed for every prompt anew.
        ttft_s: to the first token, every passage's KV being there and nothing else running.
    """

    logprob: float
    f1: float
    exact_match: float
    answer: str
    prompt_tokens: int
    passage_tokens: int
    recomputed_tokens: int
    ttft_s: float


def ask(rag: LazyRAG, question: Question, mode: str, *, chat: bool, max_tokens: int) -> Reply:
    """Ask a question, with every passage's KV computed before.

    Args:
        rag: its engine should have nothing else to do.
        question: may have no passages.
        mode: to ask in.
        chat: as a chat, if the model has a chat template and the passages are no examples.
        max_tokens: of the answer.

    Raises:
        EngineError: it cannot be answered.
    """
    rag.register([passage.text for passage in question.passages])
    plan = rag.plan(prompt(rag, question, chat=chat), mode=mode)
    if plan.segments:
        rag.generate([plan], Sampling(max_tokens=1))
    (answer,) = rag.generate([plan], Sampling(max_tokens=max_tokens, stop=("\n",)))
    right = question.answers[0].strip()
    is_chat = chat and not question.few_shot and rag.tokenizer.chat_template is not None
    logprobs = rag.logprobs(plan, right if is_chat else f" {right}")
    passage_tokens = sum(len(rag.tokenizer.encode_plain(canonical(passage.text))) for passage in question.passages)
    return Reply(
        logprob=fmean(logprobs),
        f1=f1(answer.text, question.answers),
        exact_match=float(exact_match(answer.text, question.answers)),
        answer=blake2b(answer.text.encode(), digest_size=8).hexdigest(),
        prompt_tokens=len(plan.token_ids),
        passage_tokens=passage_tokens,
        recomputed_tokens=passage_tokens - sum(segment.num_tokens for segment in plan.segments),
        ttft_s=answer.ttft_s or 0.0,
    )


def prompt(rag: LazyRAG, question: Question, *, chat: bool) -> Prompt:
    """The prompt of a question: as `LazyRAG.query` asks, or the examples one after the other and the next behind."""
    if not question.few_shot:
        return rag.question_from(question.question, [(p.title, p.text) for p in question.passages], chat=chat)
    examples = "".join(f"{passage.text}\n\n" for passage in question.passages)
    return [TextPiece(f"{examples}{question.question.rstrip()}", CONTENT)]
