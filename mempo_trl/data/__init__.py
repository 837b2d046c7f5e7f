"""Questions to train and to test on."""

from mempo_trl.data.composing import Composition, compose, to_table, write_questions
from mempo_trl.data.readers import QuestionSet, read_answers, read_questions
from mempo_trl.data.relay import Fact, RelayQuestion, RelayWorld, expert_trace


__all__ = [
    "Composition",
    "Fact",
    "QuestionSet",
    "RelayQuestion",
    "RelayWorld",
    "compose",
    "expert_trace",
    "read_answers",
    "read_questions",
    "to_table",
    "write_questions",
]
