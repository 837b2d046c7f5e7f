"""The agent loop: when it stops, what it appends, and that it stays in step."""

import dataclasses
import threading

import pytest
from support import Script, byte_tokenizer, call, search

from mempo_trl.chat_templates import ObservationRenderer
from mempo_trl.protocol import ToolCall
from mempo_trl.rollout import AgentLoop
from mempo_trl.tools import ToolRunner, ToolUnavailableError


TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
PROMPT = TOKENIZER("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
ASK = "<think>t</think>" + call("x")
REMEMBER = "<mem>m</mem><think>t</think>" + call("y")
ANSWER = "<mem>m</mem><think>t</think><answer>a</answer>"


def broken(query: str) -> str:
    """Fails."""
    raise RuntimeError("disk on fire")


def decode(ids):
    return TOKENIZER.decode([i for i in ids if i != EOS])


def make_loop(script, **kwargs):
    options = {
        "renderer": ObservationRenderer(TOKENIZER, [EOS], 200),
        "runner": ToolRunner(),
        "generate": lambda contexts, max_new_tokens, first: script(contexts, None, {}, 1),
        "decode": decode,
        "eos_token_ids": [EOS],
        "max_turns": 4,
        "max_turn_length": 400,
        "max_completion_length": 5000,
    }
    return AgentLoop(**{**options, **kwargs})


def run(rows, tools=None, **kwargs):
    script = Script(TOKENIZER, rows)
    loop = make_loop(script, **kwargs)
    trajectories = loop.run([list(PROMPT) for _ in rows], [tools or {"search": search, "broken": broken}] * len(rows))
    return trajectories, script


def test_rollouts_of_different_lengths():
    rows = [[ASK, REMEMBER, ANSWER], ["<think>t</think><answer>a</answer>"], [ASK, ANSWER]]
    trajectories, script = run(rows)
    assert script.calls == [3, 2, 1]
    assert [len(t.turns) for t in trajectories] == [3, 1, 2]
    assert all(t.stop_reason == "answer" for t in trajectories)
    for row, trajectory in enumerate(trajectories):
        for number, turn in enumerate(trajectory.turns):
            assert turn.ids == script.rows[row][number]
            assert trajectory.context_ids(number) == script.contexts[row][number]
            start = trajectory.turn_start(number)
            assert trajectory.completion_ids[start : start + len(turn.ids)] == turn.ids
        sampled = [i for i, m in zip(trajectory.completion_ids, trajectory.tool_mask, strict=True) if m]
        assert sampled == [i for turn in script.rows[row] for i in turn]
    assert [m["role"] for m in trajectories[0].messages] == ["assistant", "user", "assistant", "user", "assistant"]


def test_counted_tokens():
    (trajectory,), script = run([[ASK, REMEMBER, ANSWER]], context_turns=1)
    steps = [len(context) + len(turn) for context, turn in zip(script.contexts[0], script.rows[0], strict=True)]
    # The script writes the same whatever it sees.
    _, seeing_all = run([[ASK, REMEMBER, ANSWER]], context_turns=None)
    full = [len(context) + len(turn) for context, turn in zip(seeing_all.contexts[0], script.rows[0], strict=True)]
    assert sum(full) > sum(steps)
    assert trajectory.token_counts() == (sum(steps), max(steps), sum(full))
    assert trajectory.context_ids(2) == [*PROMPT, *trajectory.turns[1].ids, *trajectory.turns[1].observation_ids]


def test_ids_that_their_own_text_does_not_encode_to_are_kept():
    """ "<mem>" spelled letter by letter: decoding and encoding again gives other ids."""
    spelled = [i for c in "<mem>m</mem>" for i in TOKENIZER(c, add_special_tokens=False)["input_ids"]]
    assert TOKENIZER(decode(spelled), add_special_tokens=False)["input_ids"] != spelled
    turn = [*spelled, *TOKENIZER("<think>t</think>" + call("x"), add_special_tokens=False)["input_ids"], EOS]
    trajectories, script = run([[turn, ANSWER]])
    assert script.contexts[0][1][len(PROMPT) : len(PROMPT) + len(turn)] == turn
    assert trajectories[0].turns[0].parsed.memory == "m"


@pytest.mark.parametrize(
    ("rows", "reason", "options"),
    [
        ([ASK, ANSWER], "answer", {}),
        (["<think>t</think>"], "no_action", {}),
        (["plain text"], "no_action", {}),
        ([""], "no_action", {}),
        ([ASK, REMEMBER, REMEMBER, REMEMBER], "max_turns", {}),
        (["<think>I keep thinking✂"], "max_turn_length", {"max_turn_length": 10}),
        (["<think>I keep thinking✂"], "max_completion_length", {"max_completion_length": 10}),
        (["<think>I keep thinking✂"], "max_context_length", {"max_context_length": len(PROMPT) + 10}),
        ([ASK], "max_completion_length", {"max_completion_length": 80}),
        ([ASK], "max_context_length", {"max_context_length": len(PROMPT) + 80}),
        (["<tool_call>{</tool_call>"] * 2, "malformed_calls", {"max_malformed_turns": 2}),
        (
            ["<tool_call>{</tool_call>", REMEMBER, "<tool_call>{</tool_call>", ANSWER],
            "answer",
            {"max_malformed_turns": 2},
        ),
    ],
)
def test_why_a_rollout_stops(rows, reason, options):
    (trajectory,), _ = run([rows], **options)
    assert trajectory.stop_reason == reason
    assert len(trajectory.turns) == len(rows)
    # Nothing follows the last turn: an observation after which nothing is sampled is no part of the rollout.
    assert trajectory.turns[-1].observation_ids == []
    assert trajectory.turns[-1].observation == []
    assert len(trajectory.completion_ids) <= options.get("max_completion_length", 5000)


def test_a_prompt_that_fills_the_context():
    script = Script(TOKENIZER, [[], [ANSWER]])
    loop = make_loop(script, max_context_length=len(PROMPT) + 100)
    full, other = loop.run([PROMPT * 10, PROMPT], [{}, {}])
    assert (full.stop_reason, full.turns) == ("max_context_length", [])
    assert other.stop_reason == "answer"


def test_a_turn_is_cut_to_its_limit_and_closed():
    ids = TOKENIZER(ASK, add_special_tokens=False)["input_ids"]
    (trajectory,), script = run([[ASK + "and on and on", ANSWER]], max_turn_length=len(ids))
    turn = trajectory.turns[0]
    assert turn.ids == ids
    assert not turn.ended
    assert turn.observation_ids[0] == EOS  # closes the turn, and is not trained on
    assert trajectory.tool_mask[len(ids)] == 0
    assert script.contexts[0][1] == [*PROMPT, *ids, *turn.observation_ids]


def test_limits_given_to_the_sampler():
    seen = []
    script = Script(TOKENIZER, [[ASK, ANSWER], [ASK, ANSWER]])

    def generate(contexts, max_new_tokens, first):
        seen.append((max_new_tokens, first))
        return script(contexts, None, {}, 1)

    loop = make_loop(script, generate=generate, max_turn_length=400, max_completion_length=300)
    loop.run([PROMPT, PROMPT], [{"search": search}] * 2)
    used = len(loop.renderer.suffix_ids(loop.renderer.messages([("search", search("x"))]), [EOS]))
    assert seen == [(300, True), (300 - len(script.rows[0][0]) - used, False)]


def test_errors_become_observations():
    rows = [
        ["<think>t</think>" + call("x", name="broken"), ANSWER],
        ["<think>t</think>" + call("x", name="nowhere"), ANSWER],
        ['<think>t</think><tool_call>{"name": "search", "argu', ANSWER],
        ["<think>t</think><tool_call>{'name'}</tool_call>", ANSWER],
        ['<think>t</think><tool_call>{"name": "search", "arguments": {"q": 1}}</tool_call>', ANSWER],
    ]
    trajectories, _ = run(rows)
    texts = [t.turns[0].observation[0]["content"] for t in trajectories]
    assert all(text.startswith("Error: ") for text in texts)
    assert "disk on fire" in texts[0]
    assert "nowhere" in texts[1]
    assert [t.stop_reason for t in trajectories] == ["answer"] * 5
    assert [(t.tool_calls, t.tool_failures, t.malformed_calls) for t in trajectories] == [
        (1, 1, 0),
        (1, 1, 0),
        (1, 1, 1),
        (1, 1, 1),
        (1, 1, 0),
    ]


def test_several_calls_in_a_turn_are_answered_in_order():
    turn = "<think>t</think>" + call("first") + "<tool_call>{</tool_call>" + call("third")
    (trajectory,), _ = run([[turn, ANSWER]])
    text = trajectory.turns[0].observation[0]["content"]
    assert text.index("All about first") < text.index("Error") < text.index("All about third")
    assert trajectory.tool_calls == 3


def test_native_calls_are_read_where_the_protocol_finds_none():
    rows = [["CALL x", ANSWER], ["nothing"]]

    def parse(ids, context, row):
        assert context == PROMPT
        return [ToolCall(name="search", arguments={"query": "x"})] if row == 0 else []

    trajectories, _ = run(rows, parse_native_calls=parse)
    assert [t.stop_reason for t in trajectories] == ["answer", "no_action"]
    assert "All about x" in trajectories[0].turns[0].observation[0]["content"]


def test_native_calls_stand_in_for_malformed_ones_but_not_inside_a_section():
    native = "<think>t</think><tool_call><function=search></function></tool_call>"
    quoted = "<mem>I wrote " + call("x") + "</mem><think>t</think>"
    rows = [[native, ANSWER], [quoted]]
    tried = []

    def parse(ids, context, row):
        tried.append(row)
        return [ToolCall(name="search", arguments={"query": "native"})]

    trajectories, _ = run(rows, parse_native_calls=parse)
    assert tried == [0]
    assert "All about native" in trajectories[0].turns[0].observation[0]["content"]
    assert trajectories[0].malformed_calls == 0
    assert trajectories[0].turns[0].parsed.errors  # it is still not the protocol's format
    assert trajectories[1].stop_reason == "no_action"


def test_plain_text_prompts_have_one_turn():
    (trajectory,), _ = run([[ASK]], renderer=None)
    assert trajectory.stop_reason == "no_action"


def test_sampler_logprobs_travel_with_their_tokens():
    script = Script(TOKENIZER, [[ASK, ANSWER]])

    def generate(contexts, max_new_tokens, first):
        ids, _ = script(contexts, None, {}, 1)
        return ids, [[-0.5] * (len(turn) - 1) + [None] for turn in ids]

    (trajectory,) = make_loop(script, generate=generate).run([PROMPT], [{"search": search}])
    assert len(trajectory.logprobs) == len(trajectory.completion_ids)
    assert [p for p, m in zip(trajectory.logprobs, trajectory.tool_mask, strict=True) if not m] == [0.0] * len(
        trajectory.turns[0].observation_ids
    )
    assert trajectory.logprobs[len(trajectory.turns[0].ids) - 1] is None


class Processes:
    """Runs one loop a thread and takes maxima over them, as `accelerator.gather` would; deadlocks time out."""

    def __init__(self, count):
        self.values = [0] * count
        self.barrier = threading.Barrier(count, timeout=20)

    def max(self, process):
        def over_processes(value):
            self.values[process] = value
            self.barrier.wait()
            most = max(self.values)
            self.barrier.wait()
            return most

        return over_processes


@pytest.mark.parametrize("equal_sizes", [False, True])
def test_processes_stay_in_step(equal_sizes):
    """One process answers at once, another runs to the end, the third has no room for any turn."""
    rows = [
        [["<think>t</think><answer>a</answer>"]] * 3,
        [[ASK, REMEMBER, REMEMBER, REMEMBER], [ASK, ANSWER], [ASK, ANSWER]],
        [[], [], []],
    ]
    processes = Processes(3)
    sizes = [[], [], []]
    results = [None] * 3

    def work(process):
        script = Script(TOKENIZER, rows[process])

        def generate(contexts, max_new_tokens, first):
            sizes[process].append((len(contexts), first, max_new_tokens))
            active = sum(len(turns) > len(script.calls) for turns in script.rows)
            # Whatever left no room must not be sent all the same.
            assert all(len(context) == 1 for context in contexts[active:])
            turns, _ = script(contexts[:active], None, {}, 1)
            return turns + [[EOS]] * (len(contexts) - active), None

        loop = make_loop(
            script,
            generate=generate,
            max_over_processes=processes.max(process),
            equal_sizes=equal_sizes,
            max_context_length=2000,
        )
        prompt = PROMPT if process < 2 else PROMPT * 200
        results[process] = loop.run([list(prompt)] * 3, [{"search": search}] * 3)

    threads = [threading.Thread(target=work, args=(process,)) for process in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [[t.stop_reason for t in result] for result in results] == [
        ["answer"] * 3,
        ["max_turns", "answer", "answer"],
        ["max_context_length"] * 3,
    ]
    assert [len(calls) for calls in sizes] == [4, 4, 4]
    # Not every rollout of every process takes part in the first call, so it is no call for whole groups anywhere.
    assert not any(first for calls in sizes for _, first, _ in calls)
    assert len({tuple(limit for _, _, limit in calls) for calls in sizes}) == 1
    if equal_sizes:
        assert [[size for size, *_ in calls] for calls in sizes] == [[3, 3, 1, 1]] * 3
    else:
        assert [[size for size, *_ in calls] for calls in sizes] == [[3, 1, 1, 1], [3, 3, 1, 1], [1, 1, 1, 1]]


def test_a_tool_that_stays_away_ends_the_loop():
    def search(query: str) -> str:
        if query == "down":
            raise ToolUnavailableError("The server does not answer.")
        return "found"

    down = [ASK.replace('"x"', '"down"')] * 3 + [ANSWER]
    found = [ASK, ANSWER]
    loop = make_loop(Script(TOKENIZER, [down, found]), max_unavailable_turns=3)
    first, second = loop.run([PROMPT] * 2, [{"search": search}] * 2)
    assert (first.stop_reason, second.stop_reason) == ("answer", "answer")
    assert (first.tool_calls, first.tool_failures, first.unavailable_calls) == (3, 3, 3)
    assert second.unavailable_calls == 0
    assert loop.runner.unavailable["search"][0] == 2  # in the first turn somebody was answered
    again = Script(TOKENIZER, [down])
    loop = dataclasses.replace(loop, generate=lambda contexts, max_new_tokens, first: again(contexts, None, {}, 1))
    with pytest.raises(
        RuntimeError, match=r"The tool search was not available in 3 turns .* The server does not answer"
    ):
        loop.run([PROMPT], [{"search": search}])  # in the next generation
    # Another process lost its tool: all of them stop.
    loop = make_loop(
        Script(TOKENIZER, [found]), max_unavailable_turns=3, max_over_processes=lambda value: max(value, 3)
    )
    with pytest.raises(RuntimeError, match="A tool of another process was not available"):
        loop.run([PROMPT], [{"search": search}])
    loop = make_loop(Script(TOKENIZER, [down]), max_unavailable_turns=None)
    assert loop.run([PROMPT], [{"search": search}])[0].stop_reason == "answer"
