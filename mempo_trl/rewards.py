"""Answer normalisation, exact match, F1, and the outcome rewards in TRL's signature.

Normalisation follows the official SQuAD v1.1 scorer and F1 follows HotpotQA's; both are extended beyond ASCII such
that nothing changes for ASCII text. This module needs no torch.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from mempo_trl.protocol import check_trajectory, parse_turn


# One objective: its accepted answers. Several objectives: one list of accepted answers each.
Answers = Sequence[str] | Sequence[Sequence[str]]
Metric = Literal["exact_match", "f1"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
OBJECTIVE_SEPARATOR = re.compile("[;；]")
# ASCII counts as punctuation what Unicode calls symbols ("$", "+", "`", "|"). The minus sign and the fraction slash
# are the only others: "−5" and "½" (which NFKC spells with that slash) must compare equal to "-5" and "1/2".
_PUNCTUATION = frozenset(string.punctuation + "\N{MINUS SIGN}\N{FRACTION SLASH}")
# Scripts written without spaces: Thai, Lao, Tibetan, Burmese, Khmer, kana, bopomofo, Chinese characters.
_SPACELESS = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u303b\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
_TOKEN = re.compile(rf"[{_SPACELESS}]|[^\s{_SPACELESS}]+")
# Answers that a partial overlap would misjudge ("no" in "no idea"): HotpotQA's scorer wants them whole.
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


def normalize_answer(text: str) -> str:
    """Bring an answer to the form in which answers are compared.

    In this order: Unicode NFKC, lower case (case folding), punctuation deleted, the English articles dropped as whole
    words, white space collapsed. On ASCII text this is exactly `normalize_answer` of the SQuAD v1.1 scorer (Rajpurkar
    et al., 2016). Beyond ASCII, punctuation is every character of the Unicode categories P* (so also full-width and
    CJK punctuation), and invisible format characters (soft hyphens, zero-width joiners) are deleted, too.

    Args:
        text: The answer as written.

    Returns:
        The normal form. It is empty for a text of articles and punctuation only, such as "The" or "!!!".
    """
    kept = "".join(char for char in _fold(text) if not _is_dropped(char))
    # Deleting a character can put a letter beside a combining mark: compose them as everywhere else.
    without_articles = _ARTICLES.sub(" ", unicodedata.normalize("NFKC", kept))
    return " ".join(without_articles.split())


def exact_match(prediction: str | None, answers: Answers) -> float:
    """1.0 if every objective is answered with one of its accepted answers, else 0.0.

    Args:
        prediction: The predicted answer; see `objective_scores` for several objectives. `None` or "" is wrong.
        answers: Accepted answers of one objective (`list[str]`), or such a list per objective (`list[list[str]]`).

    Raises:
        TypeError, ValueError: As `objective_scores`.
    """
    return float(all(objective_scores(prediction, answers, "exact_match")))


def f1_score(prediction: str | None, answers: Answers) -> float:
    """F1 between the tokens of prediction and answer: the best over accepted answers, then the mean over objectives.

    Tokens are words; in scripts that are written without spaces (Chinese, Japanese, Thai, ...) every character is one.
    As in HotpotQA's scorer (Yang et al., 2018), "yes", "no" and "noanswer" only match as a whole.

    Args:
        prediction: The predicted answer; see `objective_scores` for several objectives. `None` or "" is wrong.
        answers: Accepted answers of one objective (`list[str]`), or such a list per objective (`list[list[str]]`).

    Raises:
        TypeError, ValueError: As `objective_scores`.
    """
    scores = objective_scores(prediction, answers, "f1")
    return sum(scores) / len(scores)


def objective_scores(prediction: str | None, answers: Answers, metric: Metric = "exact_match") -> list[float]:
    """Score every objective of a question on its own.

    With several objectives the prediction is split at ";" (or its full-width form), one piece per objective, in order.
    A wrong number of pieces scores 0 everywhere: which piece answers which objective cannot be known. With one
    objective nothing is split, since the answer itself may contain a semicolon.

    Args:
        prediction: The predicted answer, or `None` if there is none.
        answers: Accepted answers of one objective (`list[str]`), or such a list per objective (`list[list[str]]`).
        metric: "exact_match" or "f1".

    Returns:
        One score in [0, 1] per objective: the maximum over its accepted answers.

    Raises:
        TypeError: If `answers` is neither of the two shapes.
        ValueError: If there is no objective, an objective has no accepted answer, or the metric is unknown.
    """
    if metric not in _METRICS:
        raise ValueError(f"metric must be one of {sorted(_METRICS)}, got {metric!r}.")
    return compare_objectives(prediction, answers, _comparable, _METRICS[metric])


def compare_objectives(
    prediction: str | None,
    answers: Answers,
    normalize: Callable[[str], str],
    compare: Callable[[str, str], float],
    *,
    separator: re.Pattern[str] = OBJECTIVE_SEPARATOR,
    split_one_objective: bool = False,
) -> list[float]:
    """Pair every objective with its piece of the prediction: what all scorers of answers share.

    Args:
        prediction: The predicted answer, or `None` if there is none.
        answers: Accepted answers of one objective (`list[str]`), or such a list per objective (`list[list[str]]`).
        normalize: Brings a piece or an accepted answer to the form in which they are compared.
        compare: The score of a normalised piece against a normalised accepted answer.
        separator: What stands between the pieces of a prediction.
        split_one_objective: Whether a prediction is split even if there is only one objective.

    Returns:
        One score per objective, the maximum over its accepted answers; 0.0 everywhere if the number of pieces is not
        the number of objectives.

    Raises:
        TypeError: If `answers` is neither of the two shapes.
        ValueError: If there is no objective, or an objective has no accepted answer.
    """
    objectives = _objectives(answers)
    if prediction is None:
        return [0.0] * len(objectives)
    whole = len(objectives) == 1 and not split_one_objective
    pieces = [prediction] if whole else separator.split(prediction)
    if len(pieces) != len(objectives):
        return [0.0] * len(objectives)
    return [
        max(compare(normalize(piece), normalize(answer)) for answer in accepted)
        for piece, accepted in zip(pieces, objectives, strict=True)
    ]


def token_f1(predicted: Iterable[str], expected: Iterable[str]) -> float:
    """The harmonic mean of precision and recall of tokens.

    Args:
        predicted: The tokens of the prediction. One that occurs twice counts twice; give sets to count it once.
        expected: The tokens of the accepted answer.

    Returns:
        A number in [0, 1]; 0.0 if no token is common.
    """
    predicted_counts, expected_counts = Counter(predicted), Counter(expected)
    common = (predicted_counts & expected_counts).total()
    return 2 * common / (predicted_counts.total() + expected_counts.total()) if common else 0.0


def exact_match_reward(
    completions: Sequence[Any], answers: Sequence[Answers | None], **kwargs: Any
) -> list[float | None]:
    """TRL reward function: `exact_match` of the answer in the last assistant message.

    Args:
        completions: One per row, a conversation (list of `{"role", "content"}` messages) or the plain text of one
            turn. Only the last assistant message can hold the answer; an answer in an earlier one does not count.
        answers: The dataset column, one entry per row, as for `exact_match`. A row with `None` is not scored.
        **kwargs: The other columns and what TRL adds; ignored.

    Returns:
        One reward per row, or `None` where the row has no answers.
    """
    return _score_rows(completions, answers, lambda turns, accepted: exact_match(_final_answer(turns), accepted))


def f1_reward(completions: Sequence[Any], answers: Sequence[Answers | None], **kwargs: Any) -> list[float | None]:
    """TRL reward function: `f1_score` of the answer in the last assistant message.

    Arguments and result are those of `exact_match_reward`.
    """
    return _score_rows(completions, answers, lambda turns, accepted: f1_score(_final_answer(turns), accepted))


def format_reward(completions: Sequence[Any], answers: Sequence[Answers | None], **kwargs: Any) -> list[float | None]:
    """TRL reward function: 1.0 if the whole rollout keeps to the format of `protocol.check_trajectory`, else 0.0.

    Arguments and result are those of `exact_match_reward`. The answers' content plays no part, but a row without
    answers is left out here, too, so that all rewards of this module score the same rows.
    """
    return _score_rows(completions, answers, lambda turns, _: float(_is_well_formed(turns)))


def outcome_reward(completions: Sequence[Any], answers: Sequence[Answers | None], **kwargs: Any) -> list[float | None]:
    """TRL reward function: 1.0 if the answer is an exact match and the format is right, else 0.0.

    This is the outcome reward of MemPO (arXiv 2603.00680). Arguments and result are those of `exact_match_reward`.
    """

    def score(turns: list[str], accepted: Answers) -> float:
        return exact_match(_final_answer(turns), accepted) * _is_well_formed(turns)

    return _score_rows(completions, answers, score)


def _fold(text: str) -> str:
    # NFKC turns a free-standing acute accent into a space; where it is written it stands for an apostrophe
    # ("O´Brien"). The second pass is needed because case folding can undo the first.
    folded = unicodedata.normalize("NFKC", text.replace("\N{ACUTE ACCENT}", "'")).casefold()
    return unicodedata.normalize("NFKC", folded)


def _is_dropped(char: str) -> bool:
    category = unicodedata.category(char)
    return category[0] == "P" or category == "Cf" or char in _PUNCTUATION


def _comparable(text: str) -> str:
    # "The" and "!!!" are names of bands, yet normalise to nothing: they would equal each other and an empty answer.
    return normalize_answer(text) or " ".join(_fold(text).split())


def _exact_match(prediction: str, answer: str) -> float:
    return float(bool(prediction) and prediction == answer)


def _f1(prediction: str, answer: str) -> float:
    if prediction != answer and not _CLOSED_ANSWERS.isdisjoint((prediction, answer)):
        return 0.0
    return token_f1(_TOKEN.findall(prediction), _TOKEN.findall(answer))


_METRICS: dict[str, Callable[[str, str], float]] = {"exact_match": _exact_match, "f1": _f1}


def _objectives(answers: Answers) -> list[list[str]]:
    """Bring both shapes of `answers` to a list of accepted answers per objective."""
    shape = "answers must be a list of strings (one objective) or a list of lists of strings (several objectives)"
    if isinstance(answers, str) or not isinstance(answers, Iterable):
        raise TypeError(f"{shape}, got {answers!r}.")
    entries: list[Any] = list(answers)
    if all(isinstance(entry, str) for entry in entries):
        entries = [entries]
    objectives = []
    for entry in entries:
        if isinstance(entry, str) or not isinstance(entry, Iterable):
            raise TypeError(f"{shape}, got an entry {entry!r}.")
        accepted = list(entry)
        if not accepted:
            raise ValueError(f"answers must hold at least one accepted answer for every objective, got {answers!r}.")
        for answer in accepted:
            if not isinstance(answer, str):
                raise TypeError(f"{shape}, got an accepted answer {answer!r}.")
        objectives.append(accepted)
    return objectives


def _score_rows(
    completions: Sequence[Any], answers: Sequence[Answers | None], score: Callable[[list[str], Answers], float]
) -> list[float | None]:
    return [
        None if accepted is None else score(_assistant_turns(completion), accepted)
        for completion, accepted in zip(completions, answers, strict=True)
    ]


def _assistant_turns(completion: Any) -> list[str]:
    """The texts that the policy wrote: observations also contain tags, and must never be read as its own."""
    if isinstance(completion, str):
        return [completion]
    return [_content_text(message.get("content")) for message in completion if message.get("role") == "assistant"]


def _content_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")


def _final_answer(turns: list[str]) -> str | None:
    return parse_turn(turns[-1]).answer if turns else None


def _is_well_formed(turns: list[str]) -> bool:
    return bool(turns) and not check_trajectory(turns)
