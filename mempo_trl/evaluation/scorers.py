"""How an answer is scored: this package's own measure, and those that published results are given in.

A scorer is a function with the signature of `mempo_trl.rewards.objective_scores`, and `SCORERS` knows it by name:

- "default": `mempo_trl.rewards.objective_scores`, which the outcome rewards use. On ASCII text it is "squad", except
  that "yes", "no" and "noanswer" only match as a whole, that an answer of nothing but articles and punctuation ("The",
  "!!!") is compared as it stands, and that an empty prediction is wrong.
- "squad": the scorer of SQuAD v1.1. See `squad_scores`.
- "mem1": the scorer of MEM1's evaluation. See `mem1_scores`.

They differ in how one objective is judged. In all of them a prediction for several objectives is split at ";", and a
wrong number of pieces scores 0. Nothing here needs torch.
"""

import re
import string
from typing import Protocol

from mempo_trl.rewards import Answers, Metric, compare_objectives, objective_scores, token_f1


class Scorer(Protocol):
    """What a scorer is called with, and what it returns.

    Arguments and result are those of `mempo_trl.rewards.objective_scores`: one score in [0, 1] per objective.
    """

    def __call__(self, prediction: str | None, answers: Answers, metric: Metric = "exact_match") -> list[float]: ...


def squad_scores(prediction: str | None, answers: Answers, metric: Metric = "exact_match") -> list[float]:
    """Score every objective as `evaluate-v1.1.py` does, the official scorer of SQuAD v1.1 (Rajpurkar et al., 2016).

    Its normal form, in its order: lower case, the 32 ASCII punctuation characters deleted, the words "a", "an" and
    "the" replaced by a space, split at white space. Exact match is equality of normal forms, so "The" matches "!!!" and
    the empty prediction; F1 counts tokens as often as they occur, and is 0 where one side has none. Only what the
    official scorer has no notion of is this package's: several objectives are split as in `objective_scores`.

    Args:
        prediction: The predicted answer; `None`, an unanswered question, scores 0.
        answers: Accepted answers of one objective (`list[str]`), or such a list per objective (`list[list[str]]`).
        metric: "exact_match" or "f1".

    Returns:
        One score in [0, 1] per objective: the maximum over its accepted answers.

    Raises:
        TypeError, ValueError: As `mempo_trl.rewards.objective_scores`.
    """
    _check_metric(metric)
    compare = _equal if metric == "exact_match" else _words_f1
    return compare_objectives(prediction, answers, _squad_normalize, compare)


def mem1_scores(prediction: str | None, answers: Answers, metric: Metric = "exact_match") -> list[float]:
    """Score every objective as the evaluation of MEM1 does (Zhou et al., 2025, arXiv 2506.15841).

    The source is `compute_score` of `Mem1/inference/eval.py` in https://github.com/MIT-MI/MEM1, the script that its
    README evaluates with, at commit 6f22106 (October 2025). The prediction is split at ";" (only the ASCII one, and
    also when there is a single objective). Normal form: lower case, every ASCII punctuation character replaced by a
    *space*, white space collapsed; articles stay. Exact match is equality with an accepted answer, also of two empty
    forms. F1 compares the *sets* of words, so a repeated word counts once; it is 0 where one side has none. A wrong
    number of pieces scores 0.

    Two things of that script are not the score of a prediction, and are not done here. It returns the *sum* over
    objectives (its averages lie between 0 and the number of objectives), where this returns one score each. And it
    takes the last `<answer>` anywhere in the lower-cased trajectory, observations included, and scores 0 where opening
    and closing answer tags are not equally many, where this is given the prediction.

    The repository also holds other measures that are not this scorer: the first version of the script (commit 31a8285)
    reads the first `<answer>` and wants the tags `tool_call` and `think` paired, too; the training reward
    (`reward_score/qa_multiple.py`) is SQuAD's exact match summed over objectives without a check of their number, and
    wants two `<answer>` sections in the text; the reward for web search (`reward_score/websearch.py`) is this F1 of one
    objective without splitting and without lower-casing the accepted answer; `Exact_match` in the trajectories of
    `generate_rollout.py` is whether one text contains the other; and `Model_estimated_match` asks a model.

    Args:
        prediction: The predicted answer; `None`, no answer, scores 0.
        answers: Accepted answers of one objective (`list[str]`), or such a list per objective (`list[list[str]]`).
        metric: "exact_match" or "f1".

    Returns:
        One score in [0, 1] per objective: the maximum over its accepted answers.

    Raises:
        TypeError, ValueError: As `mempo_trl.rewards.objective_scores`.
    """
    _check_metric(metric)
    compare = _equal if metric == "exact_match" else _word_sets_f1
    return compare_objectives(
        prediction, answers, _mem1_normalize, compare, separator=_SEMICOLON, split_one_objective=True
    )


SCORERS: dict[str, Scorer] = {"default": objective_scores, "squad": squad_scores, "mem1": mem1_scores}
"""Every scorer by its name. Add one of your own to use it by name."""


def get_scorer(name: str) -> Scorer:
    """Return the scorer of this name.

    Raises:
        ValueError: If there is none.
    """
    if name not in SCORERS:
        raise ValueError(f"scorer must be one of {sorted(SCORERS)}, got {name!r}.")
    return SCORERS[name]


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_SEMICOLON = re.compile(";")
_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
_BLANK_PUNCTUATION = str.maketrans(string.punctuation, " " * len(string.punctuation))


def _squad_normalize(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DELETE_PUNCTUATION)).split())


def _mem1_normalize(text: str) -> str:
    return " ".join(text.lower().translate(_BLANK_PUNCTUATION).split())


def _equal(prediction: str, answer: str) -> float:
    return float(prediction == answer)


def _words_f1(prediction: str, answer: str) -> float:
    return token_f1(prediction.split(), answer.split())


def _word_sets_f1(prediction: str, answer: str) -> float:
    return token_f1(set(prediction.split()), set(answer.split()))


def _check_metric(metric: str) -> None:
    if metric not in ("exact_match", "f1"):
        raise ValueError(f'metric must be "exact_match" or "f1", got {metric!r}.')
