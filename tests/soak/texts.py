"""Texts of one chunk each."""

import random

WORDS = str.split(
    "the of and a to in river bridge keeper letter stone market winter harbour under early light north seven copper "
    "window paper garden field between after before slowly always never carried opened measured wrote counted found "
    "water iron wheel lantern corner season village road answer question number green silver quiet narrow tall"
)


def text_of(seed: object) -> str:
    """A document of one chunk, another one for each seed."""
    draw = random.Random(str(seed))
    return f"{seed}: {' '.join(draw.choices(WORDS, k=draw.randint(25, 70)))}."
