"""Questions to train and to test on."""

from mempo_trl.data.answers import read_answers
from mempo_trl.data.composing import Composition, compose
from mempo_trl.data.readers import QuestionsDropped, QuestionSet, ReadingReport, read_questions
from mempo_trl.data.relay import Fact, RelayQuestion, RelayWorld, expert_trace
from mempo_trl.data.sources import FilesIgnored
from mempo_trl.data.statistics import Statistics, question_statistics
from mempo_trl.data.writing import write_questions


__all__ = [
    "Composition",
    "Fact",
    "FilesIgnored",
    "QuestionSet",
    "QuestionsDropped",
    "ReadingReport",
    "RelayQuestion",
    "RelayWorld",
    "Statistics",
    "compose",
    "expert_trace",
    "question_statistics",
    "read_answers",
    "read_questions",
    "write_questions",
]
