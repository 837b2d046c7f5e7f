"""Parsing, checking, and the tokens of a span."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import byte_tokenizer, call, qwen_tokenizer

from mempo_trl.protocol import DEFAULT_SYSTEM_PROMPT, build_prompt, check_trajectory, find_span, parse_turn


TOKENIZERS = {"qwen": qwen_tokenizer(), "bytes": byte_tokenizer()}
TAGS = ["<mem>", "</mem>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>"]


def test_a_well_formed_turn():
    turn = parse_turn(f"<mem> m </mem>\n<think>t</think>\n{call('x')}{call('y', name='look')}")
    assert turn.memory == " m "
    assert turn.thought == "t"
    assert turn.tool_calls == [
        {"name": "search", "arguments": {"query": "x"}},
        {"name": "look", "arguments": {"query": "y"}},
    ]
    assert turn.answer is None
    assert turn.errors == []


def test_an_answering_turn():
    turn = parse_turn("<mem>m</mem><think>t</think><answer>\na ; b\n</answer>")
    assert (turn.answer, turn.errors, turn.tool_calls) == ("a ; b", [], [])
    assert parse_turn("<think>t</think><answer></answer>").answer == ""
    quoting = parse_turn("<mem>a</mem><think>t <answer>no</answer></think><answer>x</answer>")
    assert (quoting.answer, quoting.errors) == ("x", [])


@pytest.mark.parametrize(
    ("text", "memory", "answer"),
    [
        ("<mem>a<mem>b</mem>c</mem><answer>x</answer>", "a<mem>b", "x"),
        ("<mem>a</mem><mem>b</mem><answer>x</answer>", "a", "x"),
        ("<think><mem>a</mem></think><answer>x</answer>", "a", "x"),
        ("</mem><mem>a</mem><answer>x</answer>", "a", "x"),
        ("<mem>a<think>t</think><answer>x</answer>", None, "x"),
        ("<mem><answer>no</answer></mem><think>t</think>", "<answer>no</answer>", None),
        ("<think>t</think><answer>x</answer> tail", None, "x"),
        ("<think>t</think><answer>x</answer><answer>y</answer>", None, "y"),
        ("<think>t</think><answer>x", None, None),
        (f"<think>t</think>{call('q')}<answer>x</answer>", None, "x"),
        ("plain text", None, None),
        ("", None, None),
    ],
)
def test_breaches_of_the_format_are_errors(text, memory, answer):
    turn = parse_turn(text)
    assert (turn.memory, turn.answer) == (memory, answer)
    assert turn.errors


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "null",
        '"search"',
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "search", "arguments": [1]}',
        '{"name": "search", "arguments": "not json"}',
        '{"name": "search", "arguments": {"query": "x"}',
        "{'name': 'search'}",
        '{"name": "search", "arguments": {"n": ' + "9" * 5000 + "}}",
        "[" * 100_000,
    ],
)
def test_malformed_calls_become_sentences(body):
    turn = parse_turn(f"<think>t</think><tool_call>{body}</tool_call>{call('ok')}")
    assert isinstance(turn.requests[0], str)
    assert turn.requests[1] == {"name": "search", "arguments": {"query": "ok"}}
    assert turn.tool_calls == turn.requests[1:]
    assert turn.errors


def test_lenient_spellings_of_calls():
    assert parse_turn('<tool_call>{"name": "go"}</tool_call>').tool_calls == [{"name": "go", "arguments": {}}]
    nested = '<tool_call>{"type": "function", "function": {"name": "go", "arguments": "{\\"a\\": 1}"}}</tool_call>'
    assert parse_turn(nested).tool_calls == [{"name": "go", "arguments": {"a": 1}}]


def test_a_call_cut_off_is_a_malformed_request():
    turn = parse_turn('<think>t</think><tool_call>{"name": "sea')
    assert len(turn.requests) == 1
    assert "not closed" in turn.requests[0]


def test_whole_rollouts():
    first, middle = "<think>t</think>" + call("x"), "<mem>m</mem><think>t</think>" + call("x")
    last = "<mem>m</mem><think>t</think><answer>x</answer>"
    assert check_trajectory([first, middle, last]) == []
    assert check_trajectory(["<think>t</think><answer>x</answer>"]) == []
    assert check_trajectory(["<mem>m</mem>" + first, last]) == []
    for wrong in (
        [],
        [first],
        [first, middle],
        [last, last],
        [first, first, last],
        [first, "<mem>m</mem><answer>x</answer>"],
        [first, middle, last + "!"],
        [first + "<answer>x</answer>", last],
    ):
        assert check_trajectory(wrong), wrong


def test_prompts():
    assert build_prompt("q") == [
        {"role": "system", "content": DEFAULT_SYSTEM_PROMPT},
        {"role": "user", "content": "q"},
    ]
    assert build_prompt("q", "s")[0]["content"] == "s"
    assert build_prompt("q", "") == [{"role": "user", "content": "q"}]


@given(st.lists(st.one_of(st.sampled_from(TAGS), st.text(max_size=5)), max_size=12).map("".join))
@settings(max_examples=300, deadline=None)
def test_parsing_never_raises(text):
    turn = parse_turn(text)
    assert turn.answer is None or "<answer>" in text
    check_trajectory([text, text])


# Text between the tags: code points of one to four bytes, and pieces that tokenizers like to merge with tags.
pieces = st.one_of(st.text(max_size=6), st.sampled_from(["\n", ".", " <", ">", "é中文🙂", ".</", "<mem", "em>", "<th"]))
texts = st.lists(pieces, max_size=5).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(before=texts, inside=texts, after=texts, extra=st.sampled_from(["", "</mem>", "<mem>", "<mem>x</mem>"]))
@settings(max_examples=150, deadline=None)
def test_spans_hold_the_first_pair_and_no_token_more(name, before, inside, after, extra):
    tokenizer = TOKENIZERS[name]
    before, inside = before.replace("<mem>", ""), inside.replace("</mem>", "")
    text = f"{before}<mem>{inside}</mem>{after}{extra}"
    if text.index("<mem>") != len(before):
        return  # the pieces formed a tag of their own
    # Surrogates and the like are no text that a tokenizer can give back.
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(ids) != text:
        return
    start, end = find_span(tokenizer, ids, "<mem>", "</mem>")
    first = text.index("<mem>")
    last = text.index("</mem>", first + 5) + 6
    # By the tokenizer's own character offsets.
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    inside_tokens = [n for n, (a, b) in enumerate(offsets) if a < last and b > first]
    assert (start, end) == (inside_tokens[0], inside_tokens[-1] + 1)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.lists(st.integers(0, 320), max_size=40), st.integers(0, 40), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_spans_of_ids_that_no_text_encodes_to(name, noise, at, width):
    """Sampled ids need not be what their own text encodes to."""
    tokenizer = TOKENIZERS[name]
    letters = {tag: [tokenizer(c, add_special_tokens=False)["input_ids"] for c in tag] for tag in ("<mem>", "</mem>")}
    opening, closing = ([i for ids in letters[tag] for i in ids] for tag in ("<mem>", "</mem>"))
    at = min(at, len(noise))
    ids = [*noise[:at], *opening, *noise[at : at + width], *closing, *noise[at + width :]]
    if any(tag in tokenizer.decode(noise[a:b]) for tag in ("<mem>", "</mem>") for a, b in ((0, at), (at, 99))):
        return
    middle = len(noise[at : at + width])
    assert find_span(tokenizer, ids, "<mem>", "</mem>") == (at, at + len(opening) + middle + len(closing))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["", "no tags", "<mem>open", "closed</mem>", "</mem><mem>", "<mem"])
def test_no_span(name, text):
    tokenizer = TOKENIZERS[name]
    assert find_span(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"], "<mem>", "</mem>") is None


def test_known_tokens_of_qwen():
    tokenizer = TOKENIZERS["qwen"]
    ids = tokenizer("<mem>He lives in the U.S.</mem>\n<think>", add_special_tokens=False)["input_ids"]
    start, end = find_span(tokenizer, ids, "<mem>", "</mem>")
    assert tokenizer.convert_ids_to_tokens(ids[end - 3 : end + 1]) == [".</", "mem", ">Ċ", "<th"]
    assert start == 0
