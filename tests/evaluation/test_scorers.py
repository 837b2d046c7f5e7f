"""The scorers against independent ones, which follow the published definitions step by step.

The references share no code with the package: they walk over characters and tokens, and compute in fractions.
"""

import random
from fractions import Fraction

import pytest

from mempo_trl.evaluation.scorers import SCORERS, get_scorer, mem1_scores, squad_scores
from mempo_trl.rewards import objective_scores


METRICS = ["exact_match", "f1"]
ASCII_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def is_word_character(character):
    return character == "_" or character.isalnum()


def words_without_articles(text):
    """Split into runs of word characters and of others, blank the runs that are articles, split at white space."""
    runs: list[str] = []
    for character in text:
        if runs and is_word_character(runs[-1][-1]) == is_word_character(character):
            runs[-1] += character
        else:
            runs.append(character)
    return "".join(" " if run in ("a", "an", "the") else run for run in runs).split()


def squad_tokens(text):
    return words_without_articles("".join(char for char in text.lower() if char not in ASCII_PUNCTUATION))


def mem1_tokens(text):
    return "".join(" " if char in ASCII_PUNCTUATION else char for char in text.lower()).split()


def harmonic_mean(common, predicted, expected):
    if common == 0:
        return Fraction(0)
    precision, recall = Fraction(common, predicted), Fraction(common, expected)
    return 2 * precision * recall / (precision + recall)


def squad_f1(predicted, expected):
    left, common = list(expected), 0
    for token in predicted:
        if token in left:
            left.remove(token)
            common += 1
    return harmonic_mean(common, len(predicted), len(expected))


def mem1_f1(predicted, expected):
    return harmonic_mean(len(set(predicted) & set(expected)), len(set(predicted)), len(set(expected)))


def reference(pieces, answers, metric, tokens, f1):
    """Scores by piece, joined tokens compared for exact match."""
    if len(pieces) != len(answers):
        return [0.0] * len(answers)
    scores = []
    for piece, accepted in zip(pieces, answers, strict=True):
        predicted = tokens(piece)
        if metric == "f1":
            scores.append(float(max(f1(predicted, tokens(answer)) for answer in accepted)))
        else:
            scores.append(float(any(predicted == tokens(answer) for answer in accepted)))
    return scores


def squad_reference(prediction, answers, metric):
    pieces = [prediction] if len(answers) == 1 else prediction.replace("；", ";").split(";")
    return reference(pieces, answers, metric, squad_tokens, squad_f1)


def mem1_reference(prediction, answers, metric):
    return reference(prediction.split(";"), answers, metric, mem1_tokens, mem1_f1)


# (prediction, accepted answers of every objective)
HAND_MADE = [
    # words, case, order
    ("Paris", [["Paris"]]),
    ("paris", [["Paris"]]),
    ("PARIS", [["paris", "Lutetia"]]),
    ("Lutetia", [["paris", "Lutetia"]]),
    ("London", [["Paris"]]),
    ("Bigelow", [["Kathryn Bigelow"]]),
    ("Bigelow Kathryn", [["Kathryn Bigelow"]]),
    ("Kathryn Ann Bigelow", [["Kathryn Bigelow"]]),
    ("Kathryn", [["Kathryn Bigelow", "K. Bigelow", "Kathryn B."]]),
    ("very very good", [["very good"]]),
    ("cat cat cat", [["cat"]]),
    ("cat dog cat", [["cat cat bird"]]),
    ("  New \t York\nCity ", [["new york city"]]),
    ("New\x1cYork", [["New York"]]),
    # articles
    ("The Hurt Locker", [["Hurt Locker"]]),
    ("Hurt Locker", [["The Hurt Locker"]]),
    ("an apple a day", [["apple day"]]),
    ("the the", [["The"]]),
    ("The", [["The"]]),
    ("The", [["A"]]),
    ("a", [["an"]]),
    ("A", [["B"]]),
    ("an", [[""]]),
    ("theory", [["the ory"]]),
    ("a-team", [["team"]]),
    ("t.he cat", [["cat"]]),
    ("a_b", [["b"]]),
    ("Vitamin A", [["Vitamin"]]),
    # punctuation
    ("U.S.", [["US"]]),
    ("U.S.", [["U S"]]),
    ("U.S", [["United States", "U.S."]]),
    ("co-operation", [["cooperation"]]),
    ("co operation", [["co-operation"]]),
    ("Marvel comics", [["Marvel (comics)"]]),
    ("don't", [["dont"]]),
    ("don't", [["don t"]]),
    ("AC/DC", [["ACDC"]]),
    ("AC DC", [["AC/DC"]]),
    ("!!!", [["!!!"]]),
    ("!!!", [["???"]]),
    ("!!!", [["chk chk chk"]]),
    ("...", [[""]]),
    ("$", [["€"]]),
    ("^_^", [["^ ^"]]),
    ("`a|b`", [["ab"]]),
    ("C++", [["C"]]),
    ("C#", [["C++"]]),
    # numbers
    ("1000", [["1,000"]]),
    ("1 000", [["1,000"]]),
    ("3.14", [["314"]]),
    ("3.14", [["3 14"]]),
    ("-5", [["5"]]),
    ("−5", [["-5"]]),
    ("$1,000.50", [["1000.50"]]),
    ("1969", [["1969", "nineteen sixty-nine"]]),
    ("1969-07-20", [["20 07 1969"]]),
    ("50%", [["50 percent", "50"]]),
    ("½", [["1/2"]]),
    ("²", [["2"]]),
    ("１９６９", [["1969"]]),
    ("٣", [["3"]]),
    # yes, no, noanswer
    ("yes", [["yes"]]),
    ("Yes.", [["yes"]]),
    ("no", [["yes"]]),
    ("yes it is", [["yes"]]),
    ("no", [["no idea"]]),
    ("noanswer", [["noanswer"]]),
    ("noanswer here", [["noanswer"]]),
    # empty
    ("", [["Paris"]]),
    ("", [[""]]),
    ("", [["The"]]),
    ("   ", [["Paris"]]),
    ("   ", [["!!!"]]),
    ("x", [[""]]),
    # beyond ASCII
    ("Beyoncé", [["Beyonce"]]),
    ("Beyonce\u0301", [["Beyoncé"]]),
    ("the e\u0301toile", [["étoile"]]),
    ("Straße", [["STRASSE"]]),
    ("ΣΊΣΥΦΟΣ", [["σίσυφος"]]),
    ("İzmir", [["izmir"]]),
    ("“Don’t” – she said…", [["Dont she said"]]),
    ("¿Qué?", [["Qué"]]),
    ("New\u00a0York", [["New York"]]),
    ("New\u200bYork", [["NewYork"]]),
    ("co\u00adoperation", [["cooperation"]]),
    ("Москва", [["МОСКВА"]]),
    ("à la carte", [["la carte"]]),
    # Chinese, Japanese, Thai, Korean
    ("红楼梦", [["《红楼梦》"]]),
    ("红楼", [["红楼梦"]]),
    ("村上 春樹", [["村上春樹"]]),
    ("ﾄﾖﾀ", [["トヨタ"]]),
    ("กรุงเทพ", [["กรุงเทพมหานคร"]]),
    ("서울 시", [["서울 특별 시"]]),
    # several objectives
    ("Paris ; Rome", [["Paris"], ["Roma", "Rome"]]),
    ("Rome ; Paris", [["Paris"], ["Rome"]]),
    ("Paris", [["Paris"], ["Rome"]]),
    ("Paris ; Rome ; Oslo", [["Paris"], ["Rome"]]),
    ("Paris ; the ; Oslo town", [["Paris"], ["The"], ["Oslo"]]),
    ("Paris；Rome", [["Paris"], ["Rome"]]),
    ("Paris; France", [["Paris; France"]]),
    ("Paris;", [["Paris"], [""]]),
    (";", [["x"], ["y"]]),
]

PLAIN = ["paris", "Rome", "kathryn", "Bigelow", "cat", "CAT", "dog", "x_y", "U.S.", "1,000", "3.14", "1969", "no-one"]
PLAIN += ["a", "an", "the", "The", "A.", "-", "!!!", "'s", "(b)", "$5", "\n", "\x1f", "theory"]
CLOSED = ["yes", "no", "Yes", "noanswer"]
UNICODE = [
    "Straße",
    "é",
    "e\u0301",
    "红楼梦",
    "《红》",
    "トヨタ",
    "“q”",
    "−5",
    "½",
    "\u200b",
    "İ",
    "Σ",
    "２",
    "the\u0301",
]


def random_text(rng, words):
    joined = "".join(rng.choice(words) + rng.choice([" ", " ", "  ", "", "."]) for _ in range(rng.randrange(6)))
    return joined if rng.random() < 0.8 else joined.upper()


def random_pairs(count, words, seed):
    """Random questions of one to three objectives; the prediction often repeats words of an accepted answer."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        answers = [[random_text(rng, words) for _ in range(rng.randint(1, 3))] for _ in range(rng.choice([1, 1, 2, 3]))]
        pieces = []
        for accepted in answers:
            known = rng.choice(accepted).split(" ")
            rng.shuffle(known)
            pieces.append(rng.choice([" ".join(known), " ".join(known[1:]), random_text(rng, words)]))
        if rng.random() < 0.1:
            pieces.append("more")
        pairs.append((rng.choice([";", " ; ", "; ", "；"]).join(pieces), answers))
    return pairs


RANDOM = random_pairs(1000, PLAIN + CLOSED + UNICODE, seed=0)


def test_there_are_enough_pairs_of_every_kind():
    assert len(HAND_MADE) >= 100
    assert len(RANDOM) == 1000
    scores = [squad_scores(prediction, answers, "f1") for prediction, answers in RANDOM]
    assert sum(0 < score < 1 for row in scores for score in row) > 100
    assert sum(score == 1 for row in scores for score in row) > 100


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("pairs", [HAND_MADE, RANDOM], ids=["hand-made", "random"])
@pytest.mark.parametrize(("scorer", "expected"), [(squad_scores, squad_reference), (mem1_scores, mem1_reference)])
def test_equals_the_reference(scorer, expected, pairs, metric):
    for prediction, answers in pairs:
        assert scorer(prediction, answers, metric) == expected(prediction, answers, metric), (prediction, answers)


def is_plain(prediction, answers):
    """ASCII, and neither a closed answer nor a text without any word but articles."""
    texts = [answer for accepted in answers for answer in accepted]
    texts += [prediction] if len(answers) == 1 else prediction.split(";")
    return all(
        text.isascii() and squad_tokens(text) and " ".join(squad_tokens(text)) not in ("yes", "no", "noanswer")
        for text in texts
    )


@pytest.mark.parametrize("metric", METRICS)
def test_default_is_squad_on_plain_text(metric):
    pairs = [pair for pair in HAND_MADE + random_pairs(5000, PLAIN, seed=1) if is_plain(*pair)]
    assert len(pairs) > 1000
    for prediction, answers in pairs:
        assert SCORERS["default"](prediction, answers, metric) == squad_reference(prediction, answers, metric)


# Kind of difference: (prediction, answer), (exact match, F1) of SQuAD's scorer, and those of "default".
DIFFERENCES = {
    "a closed answer is not part of another": [
        (("yes it is", "yes"), (0, 1 / 2), (0, 0)),
        (("no", "no idea"), (0, 2 / 3), (0, 0)),
        (("noanswer here", "noanswer"), (0, 2 / 3), (0, 0)),
    ],
    "articles alone are compared as they stand": [
        (("The", "The"), (1, 0), (1, 1)),
        (("The", "A"), (1, 0), (0, 0)),
        (("the the", "The"), (1, 0), (0, 2 / 3)),
    ],
    "punctuation alone is compared as it stands": [
        (("!!!", "!!!"), (1, 0), (1, 1)),
        (("!!!", "???"), (1, 0), (0, 0)),
    ],
    "an empty prediction is wrong": [
        (("", ""), (1, 0), (0, 0)),
        (("", "The"), (1, 0), (0, 0)),
        (("  ", "!!!"), (1, 0), (0, 0)),
    ],
    "punctuation beyond ASCII is dropped": [
        (("“Paris”", "Paris"), (0, 0), (1, 1)),
        (("《红楼梦》", "红楼梦"), (0, 0), (1, 1)),
        (("−5", "-5"), (0, 0), (1, 1)),
    ],
    "compatible and composed forms are equal": [
        (("ＩＢＭ", "IBM"), (0, 0), (1, 1)),
        (("Beyonce\u0301", "Beyoncé"), (0, 0), (1, 1)),
        (("½", "1/2"), (0, 0), (1, 1)),
        (("ﾄﾖﾀ", "トヨタ"), (0, 0), (1, 1)),
    ],
    "case is folded": [(("Straße", "STRASSE"), (0, 0), (1, 1)), (("ΣΊΣΥΦΟΣ", "Σίσυφοσ"), (0, 0), (1, 1))],
    "format characters are dropped": [(("co\u00adoperation", "cooperation"), (0, 0), (1, 1))],
    "scripts without spaces are compared by character": [
        (("红楼", "红楼梦"), (0, 0), (0, 4 / 5)),
        (("村上 春樹", "村上春樹"), (0, 0), (0, 1)),
    ],
    "an article beside a combining mark is a letter": [(("a\u0301 x", "\u0301 x"), (1, 1), (0, 1 / 2))],
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_intended_differences_of_default_and_squad(kind):
    for (prediction, answer), squad, default in DIFFERENCES[kind]:
        assert [squad_scores(prediction, [answer], metric)[0] for metric in METRICS] == pytest.approx(squad)
        assert [objective_scores(prediction, [answer], metric)[0] for metric in METRICS] == pytest.approx(default)


# (prediction, answer), then exact match and F1 of SQuAD's scorer and of MEM1's.
@pytest.mark.parametrize(
    ("prediction", "answers", "squad", "mem1"),
    [
        ("the cat", ["cat"], (1, 1), (0, 2 / 3)),  # articles stay
        ("U.S.", ["U S"], (0, 0), (1, 1)),  # punctuation parts words
        ("U.S.", ["US"], (1, 1), (0, 0)),
        ("very very good", ["very good"], (0, 4 / 5), (0, 1)),  # sets
        ("Paris; France", ["Paris; France"], (1, 1), (0, 0)),  # always split
        ("!!!", ["???"], (1, 0), (1, 0)),
    ],
)
def test_differences_of_squad_and_mem1(prediction, answers, squad, mem1):
    assert [squad_scores(prediction, answers, metric)[0] for metric in METRICS] == pytest.approx(squad)
    assert [mem1_scores(prediction, answers, metric)[0] for metric in METRICS] == pytest.approx(mem1)


def test_mem1_splits_at_the_ascii_semicolon_only():
    answers = [["Paris"], ["Rome"]]
    assert squad_scores("Paris；Rome", answers) == [1.0, 1.0]
    assert mem1_scores("Paris；Rome", answers) == [0.0, 0.0]


@pytest.mark.parametrize("name", SCORERS)
class TestEveryScorer:
    @pytest.mark.parametrize("metric", METRICS)
    def test_no_prediction(self, name, metric):
        assert get_scorer(name)(None, [[""], ["The"]], metric) == [0.0, 0.0]

    @pytest.mark.parametrize("metric", METRICS)
    def test_both_shapes_of_answers(self, name, metric):
        assert get_scorer(name)("Rome", ["Roma", "Rome"], metric) == [1.0]
        assert get_scorer(name)("Rome", [["Roma", "Rome"]], metric) == [1.0]

    def test_bad_arguments(self, name):
        with pytest.raises(ValueError, match="metric must be"):
            get_scorer(name)("x", ["x"], "bleu")
        with pytest.raises(ValueError, match="at least one accepted answer"):
            get_scorer(name)("x", [["x"], []])
        with pytest.raises(TypeError, match="answers must be a list of strings"):
            get_scorer(name)("x", "x")


def test_unknown_scorer():
    with pytest.raises(ValueError, match=r"scorer must be one of \['default', 'mem1', 'squad'\], got 'bleu'"):
        get_scorer("bleu")
