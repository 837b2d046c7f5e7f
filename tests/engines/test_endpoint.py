import logging
import os
import signal
import threading

import pytest
from openai_stand_in import ModelReply, OpenAIStandIn, chat_answer, error
from relay_policy import small_policy
from support import call, search

from mempo_trl import MemoryAgent
from mempo_trl.engines import EndpointError, Sampling, open_engine
from mempo_trl.protocol import build_prompt
from mempo_trl.search import Document, make_search_tool
from mempo_trl.tools import ToolUnavailableError


TURNS = [
    f"<think>first</think>{call('Dune')}",
    f"<mem>Frank Herbert</mem><think>then</think>{call('Emma')}{call('x', name='nothing')}",
    "<mem>both</mem><think>done</think><answer>Frank Herbert ; Jane Austen</answer>",
]
USER_OBSERVATIONS = [
    {"role": "user", "content": search("Dune")},
    {
        "role": "user",
        "content": f"{search('Emma')}\n\nError: there is no tool named 'nothing'. Available tools: search.",
    },
]


def script(path, body):
    """The turn that follows the last one in the conversation."""
    assert path == "/v1/chat/completions"
    seen = [message["content"] for message in body["messages"] if message["role"] == "assistant"]
    return chat_answer(TURNS[TURNS.index(seen[-1]) + 1 if seen else 0], prompt_tokens=10 * len(body["messages"]))


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr("mempo_trl.engines.endpoint._RETRIES", 0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.parametrize("context_turns", [None, 1])
def test_a_conversation(context_turns):
    with OpenAIStandIn(script) as server:
        agent = MemoryAgent(server.url, [search], context_turns=context_turns, max_turn_length=99)
        answer = agent.run("Who wrote both?")
    assert answer.text == "Frank Herbert ; Jane Austen"
    assert [turn.text for turn in answer.turns] == TURNS
    assert [message["content"] for message in answer.turns[1].observation] == [
        search("Emma"),
        "Error: there is no tool named 'nothing'. Available tools: search.",
    ]
    conversations = [body["messages"] for _, body in server.requests]
    opening = conversations[0]
    assert [message["role"] for message in opening] == ["system", "user"]
    assert '"name": "search"' in opening[0]["content"] and "<tool_call>" in opening[0]["content"]
    assert opening[1]["content"] == "Who wrote both?"
    first = [{"role": "assistant", "content": TURNS[0]}, USER_OBSERVATIONS[0]]
    second = [{"role": "assistant", "content": TURNS[1]}, USER_OBSERVATIONS[1]]
    assert conversations[1] == opening + first
    assert conversations[2] == opening + (second if context_turns else first + second)
    assert answer.tokens == 10 * sum(map(len, conversations)) + 3 * 3
    for _, body in server.requests:
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("model", 0.0, 99)
        assert "tools" not in body


def test_messages_of_the_role_tool():
    with OpenAIStandIn(script) as server:
        MemoryAgent(server.url, [search], tool_role="tool").run("Who wrote both?")
    body = server.requests[-1][1]
    assert [message["role"] for message in body["messages"]] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "tool",
    ]  # fmt: skip
    assert (body["tools"][0]["function"]["name"], body["tool_choice"]) == ("search", "none")
    assert "<tools>" not in body["messages"][0]["content"]


def test_long_observations_are_cut():
    def long(query: str) -> str:
        """Search.

        Args:
            query: What for.
        """
        return {"a": "s", "b": "l" * 500}[query]

    turns = iter([f"<think>t</think>{call('a', 'long')}{call('b', 'long')}", "<mem>m</mem><answer>a</answer>"])
    with OpenAIStandIn(lambda path, body: chat_answer(next(turns))) as server:
        answer = MemoryAgent(server.url, [long], max_observation_length=20).run("Who?")
    shown = server.requests[1][1]["messages"][-1]["content"]
    assert shown == "s\n\n" + "l" * (80 - 1 - len(" … [truncated]")) + " … [truncated]"
    assert answer.turns[0].observation[1]["content"] == "l" * 500  # what is kept is whole


@pytest.mark.parametrize(
    ("reply", "reason", "turns"),
    [
        (chat_answer("<think>on and on", "length"), "max_turn_length", 1),
        (chat_answer("I do not know."), "no_action", 1),
        (chat_answer(TURNS[0]), "max_turns", 2),
        (error(400, "This model's maximum context length is 10 tokens."), "max_context_length", 0),
        (error(400, "The content management policy was triggered."), "refused", 0),
        (error(413, "Too large."), "max_context_length", 0),
        (error(422, "Wrong."), "refused", 0),
        (error(405, "Not so."), "refused", 0),
    ],
)
def test_why_an_episode_ends(reply, reason, turns):
    with OpenAIStandIn(lambda path, body: reply) as server:
        answer = MemoryAgent(server.url, [search], max_turns=2).run("Who?")
    assert (answer.text, answer.stop_reason, len(answer.turns)) == (None, reason, turns)


def test_calls_that_the_server_took_out_of_the_text():
    reply = chat_answer(None)
    function = {"name": "search", "arguments": '{"query": "Dune"}'}
    reply["choices"][0]["message"]["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
    with OpenAIStandIn(lambda path, body: reply) as server:
        answer = MemoryAgent(server.url, [search], max_turns=2).run("Who?")
    assert answer.turns[0].tool_calls == [{"name": "search", "arguments": {"query": "Dune"}}]
    assert answer.turns[0].observation[0]["content"] == search("Dune")


def changed(**message):
    reply = chat_answer("")
    reply["choices"][0]["message"].update(message)
    return reply


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": [{"type": "text", "text": "<answer>a"}, {"text": "</answer>"}]}, "<answer>a</answer>"),
        ({"content": [{"type": "text", "text": None}, "a"]}, ""),
        ({"content": "half a character: \ud83d"}, "half a character: ?"),
        (
            {"tool_calls": [{"type": "function", "function": {"name": "search", "arguments": {"query": "Dune"}}}]},
            '<tool_call>{"name": "search", "arguments": {"query": "Dune"}}</tool_call>',
        ),
        (
            {"tool_calls": [{"type": "custom", "custom": {"name": "search", "input": '{"query": "Dune"}'}}]},
            '<tool_call>{"name": "search", "arguments": {"query": "Dune"}}</tool_call>',
        ),
        ({"tool_calls": [{"type": "function"}]}, '<tool_call>{"name": null, "arguments": {}}</tool_call>'),
    ],
)  # fmt: skip
def test_messages_of_other_shapes(message, text):
    with OpenAIStandIn(lambda path, body: changed(**message)) as server:
        assert MemoryAgent(server.url, [search], max_turns=1).run("Who?").turns[0].text == text


@pytest.mark.parametrize(
    "usage",
    [None, {}, {"prompt_tokens": None, "completion_tokens": "3"}, {"prompt_tokens": 5.0, "completion_tokens": -1}],
)
def test_tokens_that_are_not_counted_well(usage, caplog):
    with OpenAIStandIn(lambda path, body: {**chat_answer("<answer>a</answer>"), "usage": usage}) as server:
        agent = MemoryAgent(server.url, [search])
        for _ in range(2):
            assert agent.run("Who?").tokens == (5 if usage and usage.get("prompt_tokens") else 0)
    assert caplog.text.count("does not say how many tokens it used") == 1


@pytest.mark.parametrize(
    "reply",
    [
        "a string",
        [1],
        {**chat_answer(""), "choices": []},
        {**chat_answer(""), "choices": None},
        changed() | {"choices": [{"index": 0, "message": None, "finish_reason": "stop"}]},
        {"error": {"message": "upstream is away", "code": 502}},
        {"error": "upstream is away"},
        b'{"id": "1", "choices": [{"mess',
        b"[" * 100_000,
    ],
)
def test_answers_that_are_none(reply, monkeypatch, caplog):
    monkeypatch.setattr("mempo_trl.engines.endpoint._RETRIES", 2)
    monkeypatch.setattr("mempo_trl.engines.endpoint.time.sleep", lambda seconds: None)
    replies = iter([reply, reply, chat_answer("<answer>a</answer>"), reply, reply, reply])
    with OpenAIStandIn(lambda path, body: next(replies)) as server:
        agent = MemoryAgent(server.url, [search])
        assert agent.run("Who?").text == "a"
        assert caplog.text.count("Asking again in") == 2
        with pytest.raises(EndpointError, match=r"does not answer") as raised:
            agent.run("Who?")
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(("code", "reason"), [(400, "refused"), (403, None), (413, "max_context_length")])
def test_errors_in_an_answer_that_says_it_is_none(code, reason):
    with OpenAIStandIn(lambda path, body: {"error": {"message": "no", "code": code}}) as server:
        agent = MemoryAgent(server.url, [search])
        if reason is None:
            with pytest.raises(ValueError, match="OPENAI_API_KEY"):
                agent.run("Who?")
        else:
            assert agent.run("Who?").stop_reason == reason


def test_a_list_of_models_that_is_none():
    with OpenAIStandIn(script, models=[None]) as server:
        with pytest.raises(ValueError, match="has the models none: name one"):
            MemoryAgent(server.url, [search])


def test_a_refusal_says_why(caplog):
    with OpenAIStandIn(lambda path, body: error(400, "unknown field top_k")) as server:
        answer = MemoryAgent(server.url, [search]).run("Who?")
    assert (answer.text, answer.stop_reason) == (None, "refused")
    assert "unknown field top_k" in answer.error and "unknown field top_k" in caplog.text


def test_a_question_that_cannot_be_encoded():
    with OpenAIStandIn(lambda path, body: chat_answer("<answer>a</answer>")) as server:
        assert MemoryAgent(server.url, [search]).run("Who\ud800?").text == "a"
    assert server.requests[0][1]["messages"][-1]["content"] == "Who??"


def test_what_a_request_holds_can_be_changed():
    with OpenAIStandIn(script) as server:
        request = {"max_tokens": None, "max_completion_tokens": 5, "reasoning_effort": "low"}
        MemoryAgent(server.url, [search], request=request, sampling=Sampling(temperature=0.5, top_k=9)).run("Who?")
    body = server.requests[0][1]
    assert "max_tokens" not in body
    assert (body["max_completion_tokens"], body["reasoning_effort"], body["top_k"]) == (5, "low", 9)


def test_many_questions_at_once():
    together, most = threading.Barrier(3, timeout=20), []

    def reply(path, body):
        number = int(body["messages"][1]["content"])
        if number < 3:
            together.wait()  # passes only if three are asked at the same time
        most.append(number)
        return chat_answer(f"<think>t</think><answer>{number}</answer>")

    with OpenAIStandIn(reply) as server:
        engine = open_engine(server.url, [search], concurrency=3)
        prompts = [build_prompt(str(number)) for number in range(10)]
        found = dict(engine.rollout(prompts, range(10)))
    assert [found[number].answer for number in range(10)] == [str(number) for number in range(10)]
    assert sorted(most) == list(range(10))
    seeds = [body["seed"] for _, body in server.requests]
    assert len(set(seeds)) == 10


def test_a_caller_that_has_enough_ends_it():
    with OpenAIStandIn(lambda path, body: chat_answer("<answer>a</answer>")) as server:
        engine = open_engine(server.url, [search], concurrency=2)
        rollout = engine.rollout([build_prompt("q")] * 50, range(50))
        next(rollout)
        rollout.close()
        assert len(server.requests) <= 5


@pytest.fixture
def interruptible():
    """Python's own answer to Ctrl-C, which processes that a shell has put into the background do not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_after_an_interruption_no_turn_begins_and_what_ends_is_kept():
    asked, let_go = [], threading.Event()

    def reply(path, body):
        asked.append(body["messages"][1]["content"])
        if len(asked) == 2:  # both questions are under way
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
            threading.Timer(0.6, let_go.set).start()
        let_go.wait(20)
        return chat_answer("<answer>a</answer>" if asked.index(body["messages"][1]["content"]) else TURNS[0])

    with OpenAIStandIn(reply) as server:
        engine, found = open_engine(server.url, [search], concurrency=2), []
        with pytest.raises(KeyboardInterrupt):
            found.extend(engine.rollout([build_prompt(str(number)) for number in range(9)], range(9)))
    # Of the two, one has answered, the other wants another turn.
    assert len(asked) == 2
    assert [episode.answer for _, episode in found] == ["a"]


@pytest.mark.usefixtures("interruptible")
def test_a_second_interruption_waits_for_nothing():
    let_go = threading.Event()

    def reply(path, body):
        for seconds in (0.2, 0.6):
            threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT]).start()
        let_go.wait(60)
        return chat_answer("<answer>a</answer>")

    with OpenAIStandIn(reply) as server:
        with pytest.raises(KeyboardInterrupt):
            list(open_engine(server.url, [search]).rollout([build_prompt("q")], [0]))
        assert not let_go.is_set()
        let_go.set()


def test_an_endpoint_that_fails_is_named(caplog):
    caplog.set_level(logging.ERROR)
    with OpenAIStandIn(lambda path, body: error(503, "busy")) as server:
        agent = MemoryAgent(server.url.replace("http://", "http://user:secret@"), [search])
        with pytest.raises(EndpointError, match=r"http://127\S+/v1 does not answer") as raised:
            agent.run("Who?")
    assert "secret" not in str(raised.value)
    with pytest.raises(EndpointError, match="does not answer"):
        agent.run("Who?")


def test_an_endpoint_that_refuses_everything_ends_the_run():
    with OpenAIStandIn(lambda path, body: error(400, "unknown field")) as server:
        engine = open_engine(server.url, [search], concurrency=1)
        with pytest.raises(EndpointError, match=r"refuses every request.*unknown field"):
            list(engine.rollout([build_prompt("q")] * 30, range(30)))
        assert len(server.requests) == 20


@pytest.mark.parametrize(
    ("status", "message"), [(401, "OPENAI_API_KEY"), (403, "OPENAI_API_KEY"), (404, "does it end in /v1")]
)
def test_what_the_user_can_mend(status, message):
    with OpenAIStandIn(lambda path, body: error(status, "no")) as server:
        with pytest.raises(ValueError, match=message):
            MemoryAgent(server.url, [search]).run("Who?")


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k-1")
    with OpenAIStandIn(script) as server:
        MemoryAgent(server.url, [search]).run("Who?")
    assert server.headers[0]["authorization"] == "Bearer k-1"


def test_several_models_must_be_told_apart():
    with OpenAIStandIn(script, models=["a", "b"]) as server:
        with pytest.raises(ValueError, match="has the models a, b: name one"):
            MemoryAgent(server.url, [search])
        MemoryAgent("b", [search], endpoint=server.url).run("Who?")
    assert {body["model"] for _, body in server.requests} == {"b"}


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://"])
def test_a_wrong_url(url):
    with pytest.raises(ValueError, match="`endpoint="):
        open_engine("m", endpoint=url)


@pytest.mark.parametrize(
    ("option", "value"),
    [("concurrency", 0), ("tool_role", "system"), ("timeout", 0), ("timeout", True), ("max_unavailable_turns", 0)],
)
def test_wrong_arguments(option, value):
    with OpenAIStandIn(script) as server:
        with pytest.raises(ValueError, match=f"`{option}={value!r}` is not allowed"):
            open_engine(server.url, **{option: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1.0}, r"`sampling=Sampling\(temperature=1.0\)`"),
        ({"top_p": 0.5}, r"`sampling=Sampling\(top_p=0.5\)`"),
        ({"seed": 1}, r"`sampling=Sampling\(seed=1\)`"),
        ({"sampling": {"temperature": 1.0}}, "must be a `mempo_trl.engines.Sampling`"),
        ({"request": ["top_k"]}, "`request=.* must be a dictionary"),
        ({"turns": 1}, "There is no argument 'turns'"),
    ],
)
def test_arguments_of_another_kind(options, message):
    with pytest.raises(TypeError, match=message):
        open_engine("model", endpoint="http://localhost:1/v1", **options)


def test_a_tool_without_a_description():
    def bare(query):
        return query

    with pytest.raises(ValueError, match="The tool 'bare' cannot be described to the model"):
        open_engine("model", [bare], endpoint="http://localhost:1/v1")


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no model"):
        open_engine(str(tmp_path))


def test_an_attempt_takes_no_longer_than_it_may():
    let_go = threading.Event()
    with OpenAIStandIn(lambda path, body: let_go.wait(60) and None) as server:
        with pytest.raises(EndpointError, match="timed out"):
            MemoryAgent("model", [search], endpoint=server.url, timeout=0.2).run("Who?")
        let_go.set()


def test_a_tool_that_stays_away_ends_the_run():
    def lost(query: str) -> str:
        """Search.

        Args:
            query: What for.
        """
        raise ToolUnavailableError("nobody there")

    reply = chat_answer(f"<think>t</think>{call('a', 'lost')}")
    with OpenAIStandIn(lambda path, body: reply) as server:
        engine = open_engine(server.url, [lost], concurrency=2, max_unavailable_turns=2, max_turns=3)
        with pytest.raises(RuntimeError, match=r"lost was not available in 4 turns in a row.*nobody there"):
            list(engine.rollout([build_prompt("q")] * 9, range(9)))


def test_a_server_without_token_ids_is_told_of():
    with OpenAIStandIn(lambda path, body: {**chat_answer(""), "choices": [{"index": 0, "text": "a"}]}) as server:
        from support import qwen_tokenizer

        engine = open_engine("model", [search], endpoint=server.url, tokenizer=qwen_tokenizer())
        with pytest.raises(ValueError, match="does not return token ids"):
            list(engine.turns(build_prompt("q")))


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (error(400, "The content management policy was triggered."), "refused"),
        (error(400, "This model's maximum context length is 10 tokens."), "max_context_length"),
    ],
)
def test_a_server_of_token_ids_that_refuses(reply, reason):
    from support import qwen_tokenizer

    tokenizer = qwen_tokenizer()
    turn = [*tokenizer.encode(TURNS[0]), tokenizer.eos_token_id]
    whole = {**chat_answer(""), "choices": [{"index": 0, "text": "", "finish_reason": "stop", "token_ids": turn}]}
    replies = iter([whole, reply, reply])
    with OpenAIStandIn(lambda path, body: next(replies)) as server:
        engine = open_engine("model", [search], endpoint=server.url, tokenizer=tokenizer, concurrency=1)
        found = dict(engine.rollout([build_prompt("q"), build_prompt("r")], [0, 1]))
    assert [found[0].stop_reason, found[1].stop_reason] == [reason, reason]
    assert [len(found[0].steps), len(found[1].steps)] == [1, 0]
    assert found[0].steps[0].observation[0]["content"] == search("Dune")
    assert reply[1]["error"]["message"] in found[0].error


def test_all_engines_give_the_same_episodes():
    """A policy that searches and remembers: in the process, behind a server that takes ids, behind conversations."""
    model, tokenizer, settings = small_policy()
    world = settings.world(seed=41, questions=8)
    documents = {document.title: document for document in (Document(**row) for row in world.documents)}

    class Exact:
        def search(self, queries, k):
            return [[documents[query]] if query in documents else [] for query in queries]

    tools = [make_search_tool(Exact(), k=1)]
    options = {
        "system_prompt": "search and remember",
        "context_turns": 1,
        "max_turns": 4,
        "max_turn_length": 64,
        "max_observation_length": 64,
    }
    prompts = [build_prompt(question.question, "search and remember") for question in world.questions]
    with OpenAIStandIn(ModelReply(model, tokenizer)) as server:
        engines = {
            "transformers": open_engine(model, tools, tokenizer=tokenizer, **options),
            "ids": open_engine("model", tools, endpoint=server.url, tokenizer=tokenizer, **options),
            "conversations": open_engine("model", tools, endpoint=server.url, tool_role="tool", **options),
        }
        found = {name: dict(engine.rollout(prompts, range(8))) for name, engine in engines.items()}
        assert {path for path, _ in server.requests} == {"/v1/completions", "/v1/chat/completions"}
        # vLLM would take these from the checkpoint, where they are meant for chats.
        neutral = {
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_p": 0.0,
            "top_k": 0,
        }
        assert all(neutral.items() <= body.items() for path, body in server.requests if path == "/v1/completions")
    assert found["transformers"] == found["ids"]
    # A server that is sent text encodes it anew: what a policy garbled may then be other ids than it had sampled.
    answered = [number for number, episode in found["ids"].items() if episode.stop_reason == "answer"]
    assert len(answered) >= 6
    assert all(found["ids"][number].tool_calls >= 1 for number in answered)
    assert [found["ids"][number] for number in answered] == [found["conversations"][number] for number in answered]
