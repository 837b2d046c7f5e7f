"""The columns of a data set, and the sentences about them."""

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from mempo_trl.data.columns import check_answers, prepare_dataset


GOOD = {"question": ["q1", "q2"], "answers": [["a"], ["b", "c"]]}


def test_prompts_are_made_from_questions():
    prepared = prepare_dataset(Dataset.from_dict(GOOD), "train_dataset", "s")
    assert prepared["prompt"][1] == [{"role": "system", "content": "s"}, {"role": "user", "content": "q2"}]
    assert set(prepared.column_names) == {"question", "answers", "prompt"}


def test_prompts_of_ones_own_are_kept():
    prompt = [{"role": "user", "content": "mine"}]
    dataset = Dataset.from_dict({**GOOD, "prompt": [prompt, prompt]})
    assert prepare_dataset(dataset, "train_dataset")["prompt"][0] == prompt


def test_streams_and_mappings():
    stream = prepare_dataset(IterableDataset.from_generator(lambda: iter([{"question": "q", "answers": ["a"]}])), "x")
    assert next(iter(stream))["prompt"][-1]["content"] == "q"
    splits = prepare_dataset(DatasetDict({"a": Dataset.from_dict(GOOD)}), "eval_dataset")
    assert isinstance(splits, DatasetDict)
    assert "prompt" in splits["a"].column_names
    assert prepare_dataset(None, "eval_dataset") is None


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"question": ["q"]},
            "`train_dataset` needs a column `answers`.*its columns are: question.*memory_coefficient=0",
        ),
        ({"answers": [["a"]]}, "needs a column `prompt`.*or `question`.*its columns are: answers"),
        ({"question": [], "answers": []}, "`train_dataset` has no rows"),
        ({**GOOD, "answers": [["a"], []]}, "is empty in row 1 of `train_dataset`"),
        ({**GOOD, "answers": [[["a"]], [["a"], []]]}, "is empty in row 1 of `train_dataset`"),
        ({**GOOD, "answers": [["a"], [" "]]}, "something else than text.*row 1"),
        ({**GOOD, "answers": [["a"], None]}, "None, not a list.*row 1"),
        ({**GOOD, "answers": ["a", "b"]}, "'a', not a list.*row 0"),
        ({**GOOD, "answers": [[1], [2]]}, "something else than text.*row 0"),
        ({**GOOD, "question": ["q", None]}, "`question` holds None in row 1 of `train_dataset`"),
        ({**GOOD, "question": ["q", " "]}, "`question` holds ' ' in row 1"),
        ({**GOOD, "question": [1, 2]}, "`question` holds 1 in row 0"),
        ({**GOOD, "prompt": [[{"role": "user", "content": "q"}], []]}, "`prompt` is empty in row 1"),
        ({**GOOD, "image": [b"", b""]}, "Images are not supported.*`image`"),
    ],
    ids=str,
)
def test_bad_columns(columns, message):
    with pytest.raises(ValueError, match=message):
        prepare_dataset(Dataset.from_dict(columns), "train_dataset")


def test_answers_may_be_missing_where_nothing_needs_them():
    prepare_dataset(Dataset.from_dict({"question": ["q"]}), "train_dataset", needs_answers=False)
    prepare_dataset(Dataset.from_dict({"x": [1]}), "train_dataset", needs_answers=False, needs_prompt=False)


@pytest.mark.parametrize("answers", [["a"], ["a", "b"], [["a"], ["b", "c"]]])
def test_good_answers(answers):
    check_answers(answers, "here")


@pytest.mark.parametrize("answers", [None, "a", [], [[]], ["a", ["b"]], [["a"], "b"], [""], 3])
def test_bad_answers(answers):
    with pytest.raises(ValueError, match=r"`answers`.*in row 7"):
        check_answers(answers, "row 7")
