"""The policy of examples/relay after a short cold start, trained once for all tests of a session."""

import dataclasses
import functools
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "relay"))

from policy import ColdStart, build_tokenizer, train


SETTINGS = ColdStart(steps=120, batch=32, worlds=4, questions=60, max_words=16, memory_loss=0.0, objectives=1)


@functools.cache
def small_policy():
    """Model, tokenizer and settings. The model mostly searches and answers."""
    tokenizer = build_tokenizer(SETTINGS.max_words)
    return train(SETTINGS, tokenizer).eval(), tokenizer, SETTINGS


# It searches twice before it answers, so that there are turns that a later one does not see.
LONGER_SETTINGS = dataclasses.replace(SETTINGS, objectives=2, steps=160)


@functools.cache
def longer_policy():
    """Model, tokenizer and settings."""
    tokenizer = build_tokenizer(LONGER_SETTINGS.max_words)
    return train(LONGER_SETTINGS, tokenizer).eval(), tokenizer, LONGER_SETTINGS
