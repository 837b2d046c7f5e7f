"""Answer targets, filters and P, with values worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import byte_tokenizer, qwen_tokenizer

from mempo_trl import memory_reward
from mempo_trl.memory_reward import (
    ANSWER_CLOSING,
    DEFAULT_ANSWER_PREAMBLE,
    answer_probability,
    build_answer_target,
    gold_answer,
    memory_branches,
    memory_rewards,
    score_memories,
)
from mempo_trl.protocol import parse_turn
from mempo_trl.rollout import Trajectory, Turn


TOKENIZERS = {"qwen": qwen_tokenizer(), "bytes": byte_tokenizer()}
# "Kathryn Bigelow" as [Kath, ryn, Big, elow], inside a target of six tokens.
LOGPS = torch.tensor([-9.0, -0.2, -3.5, -0.1, -2.8, -9.0])
GOLD = torch.tensor([False, True, True, True, True, False])


def p(mode, memory, baseline=LOGPS, threshold=0.5):
    p_memory, p_baseline = score_memories(
        memory.unsqueeze(0), None if baseline is None else baseline.unsqueeze(0), GOLD, mode, threshold
    )
    return p_memory.item(), None if p_baseline is None else p_baseline.item()


def test_worked_example():
    assert answer_probability(LOGPS, GOLD).item() == pytest.approx(math.exp(-6.6 / 4))
    # Over the threshold of one half: −0.2 and −0.1.
    assert answer_probability(LOGPS, GOLD, threshold=0.5).item() == pytest.approx(math.exp(-0.15))


def test_the_reference_rewards_a_memory_that_knows_nothing():
    """Flaw of "independent": no token over the threshold gives P = 1, above any honest memory."""
    ignorant = torch.full((6,), -7.0)
    knowing = torch.tensor([-9.0, -0.1, -0.2, -0.1, -0.2, -9.0])
    assert p("independent", ignorant)[0] == pytest.approx(1.0)
    assert p("independent", ignorant)[0] > p("independent", knowing)[0] == pytest.approx(math.exp(-0.15))
    for mode in ("none", "either"):
        assert p(mode, ignorant)[0] < p(mode, knowing)[0]


def test_joint_does_not_punish_a_memory_that_lost_the_answer():
    """Flaw of "joint": tokens that only the memory lost are not compared."""
    lost = torch.tensor([-9.0, -0.2, -7.0, -7.0, -7.0, -9.0])
    p_memory, p_baseline = p("joint", lost)
    assert p_memory == p_baseline == pytest.approx(math.exp(-0.2))
    p_memory, p_baseline = p("either", lost)  # −0.2 and −0.1 of the baseline
    assert p_memory == pytest.approx(math.exp(-3.6))
    assert p_baseline == pytest.approx(math.exp(-0.15))


def test_without_a_baseline_the_memory_alone_decides():
    assert p("joint", LOGPS, None) == (pytest.approx(math.exp(-0.15)), None)
    assert p("either", LOGPS, None) == (pytest.approx(math.exp(-0.15)), None)
    assert p("none", LOGPS, None) == (pytest.approx(math.exp(-1.65)), None)
    assert memory_rewards(torch.tensor([0.4])).item() == pytest.approx(0.4)
    assert memory_rewards(torch.tensor([0.4]), torch.tensor([0.1])).item() == pytest.approx(0.3)


@pytest.mark.parametrize("mode", ["joint", "either"])
def test_no_token_left_is_no_reward(mode):
    ignorant = torch.full((6,), -7.0)
    p_memory, p_baseline = p(mode, ignorant, ignorant)
    assert math.isnan(p_memory)
    assert math.isnan(p_baseline)


@pytest.mark.parametrize(
    ("answers", "gold"),
    [(["a", "b"], "a"), ([["a", "b"]], "a"), ([["a"], ["b", "c"], ["d"]], "a ; b ; d")],
)
def test_gold(answers, gold):
    assert gold_answer(answers) == gold


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ("Kathryn Bigelow", ["K", "ath", "ryn", "ĠBig", "elow"]),
        ("2010", ["2", "0", "1", "0"]),
        # The last token straddles the end of the gold.
        ("U.S.", ["U", ".S", ".Ċ"]),
        ("Marvel (comics)", ["Marvel", "Ġ(", "com", "ics", ")Ċ"]),
    ],
)
def test_gold_tokens_of_qwen(answer, tokens):
    tokenizer = TOKENIZERS["qwen"]
    target = build_answer_target(tokenizer, [answer])
    gold = [i for i, is_gold in zip(target.ids, target.gold_mask, strict=True) if is_gold]
    assert tokenizer.convert_ids_to_tokens(gold) == tokens
    assert tokenizer.decode(target.ids) == DEFAULT_ANSWER_PREAMBLE + answer + ANSWER_CLOSING


def test_the_four_tokens_of_the_reference_hold_for_letters_only():
    """The reference takes all but the last four tokens; with Qwen that is off by one after punctuation."""
    tokenizer = TOKENIZERS["qwen"]

    def tokens_after_gold(answer):
        return build_answer_target(tokenizer, [answer]).gold_mask[::-1].index(True)

    assert tokens_after_gold("Kathryn Bigelow") == 4
    assert tokens_after_gold("里德学院") == 4
    assert tokens_after_gold("U.S.") == 3


@pytest.mark.parametrize("name", TOKENIZERS)
@given(answer=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(str.strip))
@settings(max_examples=150, deadline=None)
def test_gold_tokens_hold_the_gold(name, answer):
    tokenizer = TOKENIZERS[name]
    target = build_answer_target(tokenizer, [[answer], ["x."]])
    positions = [n for n, is_gold in enumerate(target.gold_mask) if is_gold]
    assert positions == list(range(positions[0], positions[-1] + 1))
    before = tokenizer.decode(target.ids[: positions[0]])
    held = tokenizer.decode(target.ids[positions[0] : positions[-1] + 1])
    if tokenizer.decode(target.ids) == DEFAULT_ANSWER_PREAMBLE + answer + " ; x." + ANSWER_CLOSING:
        assert f"{answer} ; x." in held
        assert DEFAULT_ANSWER_PREAMBLE.startswith(before)
        assert held.rstrip("\n").endswith("x.")


@pytest.mark.parametrize("errors", ["ignore", "replace"])
@pytest.mark.parametrize("answer", ["Paris", "é", "Café", "里德学院", "👨‍👩‍👧", "a.", "x\u0301"])
def test_gold_tokens_of_slow_tokenizers(errors, answer):
    """A byte is a token: what is decoded grows only with the last byte of a character."""

    class Bytes:
        is_fast = False
        eos_token = None

        def __call__(self, text, add_special_tokens=True, return_offsets_mapping=False):
            return {"input_ids": list(text.encode())}

        def decode(self, ids, **kwargs):
            return bytes(ids).decode(errors=errors)

    target = build_answer_target(Bytes(), [answer])
    gold = [i for i, is_gold in zip(target.ids, target.gold_mask, strict=True) if is_gold]
    assert bytes(gold).decode() == answer


def trajectory(tokenizer, *texts, ended=True):
    turns = []
    for n, text in enumerate(texts):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        last = n == len(texts) - 1
        turns.append(Turn(ids, text, parse_turn(text), ended or not last, observation_ids=[] if last else [1, 2, 3]))
    return Trajectory(prompt_ids=[7, 8, 9], turns=turns)


def test_a_token_without_characters_inside_of_the_gold_is_the_golds(monkeypatch):
    """Some tokenizers give a position without width to all but one of the tokens of a character."""
    text = "\n" + "里" + memory_reward.ANSWER_CLOSING
    offsets = [(0, 1), (1, 2), (1, 1), (1, 2), (2, len(text))]
    monkeypatch.setattr(memory_reward, "encode_piece", lambda tokenizer, piece: ([1, 2, 3, 4, 5], offsets))
    target = build_answer_target(None, ["里"], "\n")
    assert target.gold_mask == [False, True, True, True, False]
    assert list(target.after([9, 9]).scored) == [3, 4, 5]


def test_branches():
    tokenizer = TOKENIZERS["qwen"]
    rollout = trajectory(tokenizer, "<mem>a</mem> x", "<mem>b</mem> y", "no memory", "z<mem>c</mem>")
    ids = [turn.ids for turn in rollout.turns]
    second, fourth = memory_branches(tokenizer, rollout, "context")
    assert (second.turn, fourth.turn) == (1, 3)
    end = len(ids[1]) - 1
    assert second.memory == [7, 8, 9, *ids[1][:end]]
    assert second.baseline == [7, 8, 9, *ids[0], 1, 2, 3]
    assert second.span == (len(ids[0]) + 3, len(ids[0]) + 3 + end)
    assert fourth.memory == [7, 8, 9, *ids[3]]  # the turn up to </mem>, what precedes <mem> included
    assert fourth.baseline == [7, 8, 9, *ids[0], 1, 2, 3, *ids[1], 1, 2, 3, *ids[2], 1, 2, 3]
    assert [b.baseline for b in memory_branches(tokenizer, rollout, "history")] == [second.baseline, fourth.baseline]
    assert [b.baseline for b in memory_branches(tokenizer, rollout, "none")] == [None, None]
    first = ids[0][: len(ids[0]) - 1]  # all but " x"
    assert [b.baseline for b in memory_branches(tokenizer, rollout, "previous_memory")] == [
        [7, 8, 9, *first],
        second.memory,
    ]


def test_before_the_first_memory_there_is_the_prompt():
    tokenizer = TOKENIZERS["qwen"]
    (branch,) = memory_branches(tokenizer, trajectory(tokenizer, "x", "<mem>b</mem>"), "previous_memory")
    assert branch.baseline == [7, 8, 9]


def test_contexts_leave_room_for_the_target():
    tokenizer = TOKENIZERS["qwen"]
    rollout = trajectory(tokenizer, "one two three four five six", "<mem>b</mem>")
    (whole,) = memory_branches(tokenizer, rollout)
    (fitted,) = memory_branches(tokenizer, rollout, room=8)
    assert whole.baseline == [7, 8, 9, *rollout.turns[0].ids, 1, 2, 3]
    assert fitted.baseline == [7, 8, 9, *whole.baseline[-5:]]
    assert fitted.memory == whole.memory[:3] + whole.memory[-5:]
    (tiny,) = memory_branches(tokenizer, rollout, room=2)
    assert tiny.baseline == [8, 9]


def test_cut_memories_are_dropped():
    tokenizer = TOKENIZERS["qwen"]
    assert memory_branches(tokenizer, trajectory(tokenizer, "x", "<mem>b", ended=False)) == []
    assert memory_branches(tokenizer, trajectory(tokenizer, "x", "<mem>b</mem><mem>c", ended=False)) == []
    assert len(memory_branches(tokenizer, trajectory(tokenizer, "x", "<mem>b</mem>c", ended=False))) == 1
