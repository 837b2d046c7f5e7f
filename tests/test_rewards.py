import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo_trl.rewards import (
    exact_match,
    exact_match_reward,
    f1_reward,
    f1_score,
    format_reward,
    normalize_answer,
    objective_scores,
    outcome_reward,
)


ASCII = st.text(st.characters(max_codepoint=127)) | st.lists(
    st.sampled_from(["a", "an", "the", "The", "A.", "U.S.", "'s", "x_y", "  ", "\n", "\x1c", "cat", "-", "1,000"])
).map(" ".join)


def squad_normalize_answer(text):
    """The official SQuAD v1.1 scorer's steps, in its order."""
    text = text.lower()
    text = "".join(char for char in text if char not in set(string.punctuation))
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(text.split())


class TestNormalizeAnswer:
    @given(ASCII)
    def test_equals_squad_on_ascii(self, text):
        assert normalize_answer(text) == squad_normalize_answer(text)

    @given(st.text())
    def test_is_idempotent(self, text):
        once = normalize_answer(text)
        assert normalize_answer(once) == once

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("The  Hurt Locker!", "hurt locker"),
            ("U.S.", "us"),
            ("Marvel (comics)", "marvel comics"),
            ("t.he cat", "cat"),  # punctuation goes before the articles
            ("co-operation", "cooperation"),
            ("$1,000.50", "100050"),
            ("`a|b`", "ab"),
            ("ＡＢＣ　１２３！", "abc 123"),
            ("《红楼梦》", "红楼梦"),
            ("「ノルウェイの森」", "ノルウェイの森"),
            ("ﾄﾖﾀ", "トヨタ"),  # half-width kana
            ("“Don’t” – she said…", "dont she said"),
            ("O´Brien", "obrien"),
            ("Straße", "strasse"),
            ("ΣΊΣΥΦΟΣ", "σίσυφοσ"),
            ("Beyonce\u0301", "beyoncé"),  # decomposed
            ("New\u00a0York\u200b", "new york"),
            ("co\u00adoperation", "cooperation"),  # soft hyphen
            ("−5 °C", "5 °c"),
            ("½", "12"),
            ("¿Qué?", "qué"),
            ("The A an", ""),
            ("!!!", ""),
            ("", ""),
        ],
    )
    def test_examples(self, text, expected):
        assert normalize_answer(text) == expected


class TestExactMatch:
    @pytest.mark.parametrize(
        ("prediction", "answers"),
        [
            ("kathryn bigelow", ["Kathryn Bigelow"]),
            ("US", ["U.S."]),
            ("U.S", ["United States", "U.S."]),
            ("Marvel comics", ["Marvel (comics)"]),
            ("1000", ["1,000"]),
            ("-5", ["−5"]),
            ("1/2", ["½"]),
            ("Beyoncé", ["Beyonce\u0301"]),
            ("ＩＢＭ", ["IBM"]),
            ("红楼梦", ["《红楼梦》"]),
            ("トヨタ", ["ﾄﾖﾀ"]),
            ("Paris; France", ["Paris; France"]),  # one objective is never split
            ("Paris; France", [["Paris; France", "Paris"]]),
            ("a cat ; the dog", [["cat"], ["Dog"]]),
            ("猫；犬", [["猫"], ["犬"]]),
            ("x;y;z", [["x"], ["q", "y"], ["z"]]),
            ("The", ["The"]),
            (" the ", ["The"]),
            ("!!!", ["!!!"]),
            ("！！！", ["!!!"]),
        ],
    )
    def test_right(self, prediction, answers):
        assert exact_match(prediction, answers) == 1.0
        assert f1_score(prediction, answers) == 1.0

    @pytest.mark.parametrize(
        ("prediction", "answers"),
        [
            ("Bigelow", ["Kathryn Bigelow"]),
            ("", ["Paris"]),
            (None, ["Paris"]),
            ("", [""]),
            ("", ["The"]),
            ("   ", ["!!!"]),
            ("a", ["The"]),
            ("???", ["!!!"]),
            ("the the", ["The"]),
            ("!!!", [""]),
            ("x;y", [["x"], ["z"]]),
            ("y;x", [["x"], ["y"]]),  # the order counts
            ("x", [["x"], ["y"]]),
            ("x;y;z", [["x"], ["y"]]),
            ("x;y;", [["x"], ["y"]]),
            ("x;", [["x"], [""]]),
            (None, [["x"], ["y"]]),
        ],
    )
    def test_wrong(self, prediction, answers):
        assert exact_match(prediction, answers) == 0.0

    def test_takes_any_sequence(self):
        assert exact_match("x;y", (("x",), ("y",))) == 1.0

    @given(st.text().filter(str.strip))
    def test_an_answer_matches_itself(self, text):
        assert exact_match(text, [text]) == 1.0
        assert f1_score(text, [text]) == 1.0


class TestF1Score:
    @pytest.mark.parametrize(
        ("prediction", "answers", "expected"),
        [
            ("Bigelow", ["Kathryn Bigelow"], 2 / 3),
            ("Kathryn Ann Bigelow", ["Kathryn Bigelow"], 4 / 5),
            ("the the cat", ["cat cat"], 2 / 3),  # tokens count as often as they occur
            ("London", ["Paris"], 0.0),
            ("London", ["Paris", "London town"], 2 / 3),
            ("", ["Paris"], 0.0),
            (None, ["Paris"], 0.0),
            ("红楼", ["红楼梦"], 4 / 5),
            ("村上 春樹", ["村上春樹"], 1.0),  # by character, so spaces do not matter
            ("東京 Tower", ["東京タワー Tower"], 2 * 3 / (3 + 6)),
            ("iPhone手机", ["iPhone 手机"], 1.0),
            ("กรุงเทพ", ["กรุงเทพมหานคร"], 2 * 7 / (7 + 13)),
            ("서울 시", ["서울 특별 시"], 4 / 5),  # Korean is written in words
            ("yes", ["yes"], 1.0),
            ("yes it is", ["yes"], 0.0),
            ("no", ["no idea"], 0.0),
            ("noanswer here", ["noanswer"], 0.0),
            ("Bigelow; x", [["Kathryn Bigelow"], ["x", "y"]], (2 / 3 + 1) / 2),
            ("Bigelow", [["Kathryn Bigelow"], ["x"]], 0.0),
            ("the", ["The"], 1.0),
        ],
    )
    def test_examples(self, prediction, answers, expected):
        assert f1_score(prediction, answers) == pytest.approx(expected)

    @given(st.text(), st.lists(st.text(), min_size=1))
    def test_lies_between_exact_match_and_one(self, prediction, answers):
        assert exact_match(prediction, answers) <= f1_score(prediction, answers) <= 1.0


class TestObjectiveScores:
    def test_one_score_per_objective(self):
        answers = [["Kathryn Bigelow"], ["x"], ["y"]]
        assert objective_scores("Bigelow; x; z", answers) == [0.0, 1.0, 0.0]
        assert objective_scores("Bigelow; x; z", answers, "f1") == [pytest.approx(2 / 3), 1.0, 0.0]

    @pytest.mark.parametrize("prediction", ["x; y", "x; y; z; w", "", None])
    def test_wrong_count(self, prediction):
        assert objective_scores(prediction, [["x"], ["y"], ["z"]]) == [0.0, 0.0, 0.0]

    def test_one_objective(self):
        assert objective_scores("x", ["y", "x"]) == [1.0]

    @pytest.mark.parametrize("answers", ["Paris", 7, None, ["x", ["y"]], [["x"], None], [1969], [["x"], [2]]])
    def test_wrong_shape(self, answers):
        with pytest.raises(TypeError, match="answers must be a list of strings"):
            objective_scores("x", answers)

    @pytest.mark.parametrize("answers", [[], [[]], [["x"], []]])
    def test_nothing_accepted(self, answers):
        with pytest.raises(ValueError, match="at least one accepted answer"):
            objective_scores("x", answers)

    def test_unknown_metric(self):
        with pytest.raises(ValueError, match="metric must be one of"):
            objective_scores("x", ["x"], "bleu")  # type: ignore[arg-type]


CALL = '<tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>'
FIRST = f"<think>I must search.</think>{CALL}"
SECOND = f"<mem>Nothing yet.</mem><think>Again.</think>{CALL}"


def rollout(*turns):
    """A conversation in which every turn but the last is followed by an observation."""
    messages = []
    for turn in turns:
        messages += [{"role": "assistant", "content": turn}, {"role": "tool", "content": "<answer>Paris</answer>"}]
    return messages[:-1]


def last(answer):
    return f"<mem>It is known.</mem><think>Done.</think><answer>{answer}</answer>"


class TestRewardFunctions:
    def test_scores(self):
        completions = [
            rollout(FIRST, SECOND, last("Paris")),
            rollout(FIRST, last("the city of Paris")),
            rollout(FIRST, "<answer>Paris</answer>"),  # right, but badly formed
            rollout(FIRST, SECOND),
        ]
        answers = [["Paris"]] * 4
        assert exact_match_reward(completions, answers) == [1.0, 0.0, 1.0, 0.0]
        assert f1_reward(completions, answers) == [1.0, 0.5, 1.0, 0.0]
        assert format_reward(completions, answers) == [1.0, 1.0, 0.0, 0.0]
        assert outcome_reward(completions, answers) == [1.0, 0.0, 0.0, 0.0]

    def test_several_objectives(self):
        completions = [rollout(FIRST, last("Paris ; Rome")), rollout(FIRST, last("Paris"))]
        answers = [[["Paris"], ["Roma", "Rome"]]] * 2
        assert outcome_reward(completions, answers) == [1.0, 0.0]

    @pytest.mark.parametrize("reward", [exact_match_reward, f1_reward, outcome_reward])
    def test_only_the_last_turn_of_the_policy_counts(self, reward):
        early = rollout(last("Paris"), SECOND)
        observation_last = [*rollout(FIRST, SECOND), {"role": "tool", "content": "<answer>Paris</answer>"}]
        user_only = [{"role": "user", "content": last("Paris")}]
        assert reward([early, observation_last, user_only, []], [["Paris"]] * 4) == [0.0] * 4

    @pytest.mark.parametrize("reward", [exact_match_reward, f1_reward, format_reward, outcome_reward])
    def test_rows_without_answers_and_further_columns(self, reward):
        one_turn = "<think>Easy.</think><answer>Paris</answer>"
        rows = reward(completions=[one_turn, one_turn], answers=[None, ["Paris"]], prompts=["", ""], trainer_state=None)
        assert rows == [None, 1.0]

    def test_format(self):
        rollouts = [
            [],
            rollout(f"{CALL}", last("x")),  # no thought
            rollout(FIRST, "<think>Done.</think><answer>x</answer>"),  # no memory
            rollout(FIRST, "<mem>m</mem><think>Hm.</think>", last("x")),  # neither call nor answer
            rollout("<think>t</think><answer>x</answer>", last("x")),  # answers too early
            rollout(FIRST, f"<mem>m</mem><think>t</think><answer>x</answer>{CALL}"),
            rollout(FIRST, last("x") + "<mem>"),  # not closed
        ]
        assert format_reward(rollouts, [["x"]] * len(rollouts)) == [0.0] * len(rollouts)

    def test_content_may_be_missing_or_in_parts(self):
        parts = [{"type": "text", "text": "<think>t</think>"}, {"type": "image"}]
        parts.append({"type": "text", "text": "<answer>Paris</answer>"})
        completions = [[{"role": "assistant", "content": parts}], [{"role": "assistant", "content": None}]]
        assert outcome_reward(completions, [["Paris"]] * 2) == [1.0, 0.0]
