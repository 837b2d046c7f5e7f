import json
import random
import re
from itertools import pairwise

import pytest

from mempo_trl.data import RelayQuestion, RelayWorld, expert_trace
from mempo_trl.data.relay import NUM_DISJOINT_SEEDS, RELATIONS, UNKNOWN, vocabulary
from mempo_trl.protocol import check_trajectory, parse_turn
from mempo_trl.rewards import exact_match


def facts_of(world: RelayWorld) -> list:
    return [fact for question in world.questions for chain in question.chains for fact in chain]


def make_search(world: RelayWorld):
    """A search that knows documents by their titles."""
    documents = dict(document["contents"].split("\n", 1) for document in world.documents)
    return lambda query: f"Doc 1 (Title: {query})\n{documents[json.dumps(query)]}"


def memory_of(turn: str) -> str:
    memory = parse_turn(turn).memory
    assert memory is not None
    return memory


def answers_of(turn: str) -> list[str]:
    answer = parse_turn(turn).answer
    assert answer is not None
    return answer.split(" ; ")


def assistant_turns(messages: list[dict]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


class TestRelayWorld:
    def test_same_seed_gives_the_same_world(self):
        first, second = (RelayWorld(3, 20, (1, 4), (1, 3), extra_facts=1, distractors=5) for _ in range(2))
        assert first.questions == second.questions
        assert first.documents == second.documents

    def test_facts_are_those_of_the_first_release(self):
        # Figures that others publish about a seed must stay comparable: changing what a seed means breaks this.
        question = RelayWorld(0, 1, 2, (1, 2)).questions[0]
        assert question.id == "relay-0-0"
        assert question.question == (
            "Find the mayor of the home town of Alto Pemster; the mayor of the home town of Helwen Norley."
        )
        assert question.answers == [["Galva Hartton"], ["Elva Kirkton"]]

    @pytest.mark.parametrize("hops", [1, 3])
    def test_different_seeds_share_no_fact(self, hops):
        worlds = [RelayWorld(seed, 300, 3, hops, extra_facts=1) for seed in (0, 1, NUM_DISJOINT_SEEDS - 1)]
        stated = [
            {sentence for d in world.documents for sentence in d["contents"].split("\n")[1].split(". ")}
            for world in worlds
        ]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert not set(facts_of(worlds[one])) & set(facts_of(worlds[other]))
            assert not stated[one] & stated[other]

    def test_ids_are_unique_over_seeds(self):
        worlds = [RelayWorld(seed, 50, distractors=10) for seed in (0, 1)]
        ids = [entry["id"] for world in worlds for entry in world.documents]
        ids += [question.id for world in worlds for question in world.questions]
        assert len(set(ids)) == len(ids)

    def test_chains_objectives_and_answers_fit_together(self):
        world = RelayWorld(1, 200, (1, 10), (1, 3))
        assert {len(question.chains) for question in world.questions} == set(range(1, 11))
        assert {len(chain) for question in world.questions for chain in question.chains} == {1, 2, 3}
        for question in world.questions:
            assert question.answers == [[chain[-1].object] for chain in question.chains]
            assert len(question.documents) == sum(map(len, question.chains))
            for chain, asked in zip(question.chains, question.question[5:-1].split("; "), strict=True):
                phrase = " of ".join([f"the {fact.relation}" for fact in chain[::-1]] + [chain[0].subject])
                assert asked == phrase
                assert all(a.object == b.subject for a, b in pairwise(chain))

    def test_every_entity_that_is_looked_up_has_one_document(self):
        world = RelayWorld(2, 200, (1, 4), (1, 3), extra_facts=2, distractors=100)
        titles = [json.loads(document["contents"].split("\n")[0]) for document in world.documents]
        assert len(set(titles)) == len(titles)
        search = make_search(world)
        for fact in facts_of(world):
            assert fact.object in search(fact.subject)

    def test_answers_cannot_be_guessed(self):
        objects = [fact.object for fact in facts_of(RelayWorld(0, 1000, 3))]
        most_frequent = max(objects.count(name) for name in set(objects))
        assert most_frequent / len(objects) < 0.01

    def test_extra_facts_and_distractors(self):
        plain = RelayWorld(0, 10, 2)
        rich = RelayWorld(0, 10, 2, extra_facts=2, distractors=7)
        assert len(rich.documents) == len(plain.documents) + 7
        assert all(document["contents"].count(".") == 1 for document in plain.documents)
        assert all(document["contents"].count(".") == 3 for document in rich.documents)

    def test_relations_can_be_chosen(self):
        assert {fact.relation for fact in facts_of(RelayWorld(0, 100, 3))} == set(RELATIONS[:4])
        assert {fact.relation for fact in facts_of(RelayWorld(0, 20, 3, relations="employer"))} == {"employer"}
        world = RelayWorld(0, 20, 3, 2, relations=("employer", "founder", "profession"))
        assert all(
            [fact.relation for fact in chain] == ["employer", "founder"] for q in world.questions for chain in q.chains
        )

    def test_write_corpus(self, tmp_path):
        world = RelayWorld(0, 5, distractors=2)
        path = tmp_path / "new" / "corpus.jsonl"
        world.write_corpus(path)
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert lines == world.documents
        assert all(set(line) == {"id", "contents"} for line in lines)
        assert all(re.fullmatch(r'"[A-Z]\w+ [A-Z]\w+"\n[^\n]+', line["contents"]) for line in lines)

    def test_to_dataset(self):
        world = RelayWorld(0, 5, 2, 2)
        dataset = world.to_dataset()
        assert dataset["question"][:] == [question.question for question in world.questions]
        assert dataset["answers"][:] == [question.answers for question in world.questions]
        assert dataset[0]["num_objectives"] == 2
        assert dataset[0]["num_lookups"] == 4

    def test_vocabulary_covers_all_texts(self):
        known = set(vocabulary())
        world = RelayWorld(0, 200, (1, 4), (1, 3), extra_facts=2)
        search = make_search(world)
        texts = [document["contents"] for document in world.documents]
        for question in world.questions:
            texts += [question.question, *assistant_turns(expert_trace(question, search))]
        words = {word for text in texts for word in re.findall(r"\w+", re.sub(r"</?\w+>", " ", text))}
        assert words <= known
        assert len(known) < 700

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"num_questions": 0}, "`num_questions` must be at least 1"),
            ({"objectives": 11}, "`objectives` must be a number from 1 to 10"),
            ({"objectives": (3, 2)}, "`objectives` must be"),
            ({"hops": (1, 4)}, "`hops` must be a number from 1 to 3"),
            ({"relations": ["boss"]}, r"unknown names \['boss'\]"),
            ({"relations": ["profession"], "hops": 2}, "cannot form a chain of 2"),
            ({"relations": ["founder"]}, "cannot form a chain of 1"),
            ({"extra_facts": -1}, "`extra_facts` must not be negative"),
            ({"distractors": -1}, "`distractors` must not be negative"),
            ({"num_questions": 1500, "objectives": 10}, "have run out"),
        ],
    )
    def test_wrong_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            RelayWorld(**{"seed": 0, "num_questions": 5, **arguments})


class TestExpertTrace:
    @pytest.fixture(scope="class")
    def world(self) -> RelayWorld:
        return RelayWorld(0, 300, (1, 4), (1, 3), extra_facts=1)

    def test_traces_keep_to_the_protocol(self, world):
        search = make_search(world)
        for question in world.questions:
            messages = expert_trace(question, search)
            assert [message["role"] for message in messages] == [
                *["assistant", "tool"] * len(question.documents),
                "assistant",
            ]
            turns = assistant_turns(messages)
            assert check_trajectory(turns) == []
            queries = [parse_turn(turn).tool_calls[0] for turn in turns[:-1]]
            subjects = [fact.subject for chain in question.chains for fact in chain]
            assert queries == [{"name": "search", "arguments": {"query": subject}} for subject in subjects]

    def test_a_perfect_memory_answers_right(self, world):
        search = make_search(world)
        for question in world.questions:
            turns = assistant_turns(expert_trace(question, search, memory_loss=0))
            assert exact_match(parse_turn(turns[-1]).answer, question.answers) == 1

    def test_answers_come_from_the_memory_alone(self, world):
        search = make_search(world)
        for question in world.questions:
            last = assistant_turns(expert_trace(question, search, memory_loss=0.5))[-1]
            entries = memory_of(last).removesuffix(".").split(". ")
            for chain, answer in zip(question.chains, answers_of(last), strict=True):
                complete = all(f"{fact.subject}: {fact.object}" in entries for fact in chain)
                assert answer == (chain[-1].object if complete else UNKNOWN)

    def test_a_lost_fact_never_comes_back(self, world):
        search = make_search(world)
        for question in world.questions:
            memories = [memory_of(turn) for turn in assistant_turns(expert_trace(question, search))[1:]]
            for earlier, later in pairwise(memories):
                assert later.startswith(earlier) or earlier == "nothing"
            facts = [fact for chain in question.chains for fact in chain]
            for number, fact in enumerate(facts):
                entry = f"{fact.subject}: {fact.object}."
                assert not any(entry in memory for memory in memories[:number])
                assert len({entry in memory for memory in memories[number:]}) == 1

    def test_thoughts_name_only_what_is_looked_up(self):
        world = RelayWorld(0, 100, 3)
        search = make_search(world)
        for question in world.questions:
            for turn in assistant_turns(expert_trace(question, search)):
                thought = parse_turn(turn).thought
                assert thought is not None
                assert not any(fact.object in thought for chain in question.chains for fact in chain)

    @pytest.mark.parametrize("memory_loss", [0.0, 0.3, 1.0])
    def test_share_of_lost_facts(self, memory_loss):
        world = RelayWorld(0, 700, 3)
        search = make_search(world)
        answers = [
            answer
            for question in world.questions
            for answer in answers_of(assistant_turns(expert_trace(question, search, memory_loss))[-1])
        ]
        assert answers.count(UNKNOWN) / len(answers) == pytest.approx(memory_loss, abs=0.04)

    def test_losses_follow_the_generator(self, world):
        search = make_search(world)
        question = world.questions[0]
        assert expert_trace(question, search) == expert_trace(question, search)
        traces = [expert_trace(question, search, 0.5, random.Random(seed)) for seed in range(20)]
        assert traces[0] == expert_trace(question, search, 0.5, random.Random(0))
        assert any(trace != traces[0] for trace in traces)

    def test_what_is_not_found_is_unknown(self):
        question: RelayQuestion = RelayWorld(0, 1, 2, 2).questions[0]
        messages = expert_trace(question, lambda query: "No documents found.", memory_loss=0)
        assert [message["role"] for message in messages] == ["assistant", "tool", "assistant", "tool", "assistant"]
        last = parse_turn(messages[-1]["content"])
        assert last.memory == "nothing"
        assert last.answer == f"{UNKNOWN} ; {UNKNOWN}"

    @pytest.mark.parametrize("memory_loss", [-0.1, 1.1])
    def test_memory_loss_is_a_probability(self, world, memory_loss):
        with pytest.raises(ValueError, match="must lie between 0 and 1"):
            expert_trace(world.questions[0], make_search(world), memory_loss)


def test_a_smaller_vocabulary():
    world = RelayWorld(seed=0, num_questions=20, objectives=2, max_words=10)
    words = set(vocabulary(max_words=10))
    assert len(words) < len(vocabulary()) / 2
    for question in world.questions:
        for fact in (fact for chain in question.chains for fact in chain):
            assert {*fact.subject.split(), *fact.object.split()} <= words
    with pytest.raises(ValueError, match="run out"):
        RelayWorld(seed=0, num_questions=60, objectives=2, max_words=10)
    with pytest.raises(ValueError, match="`max_words` must be at least 1"):
        RelayWorld(seed=0, num_questions=1, max_words=0)
