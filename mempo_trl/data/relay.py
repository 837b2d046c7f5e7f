"""A synthetic world for look-up questions: facts that no model knows, documents to find them in, experts to imitate.

A question asks for one or more *objectives*, and each objective is a chain of one or more *hops*: "the employer of
Alda Brackett" is one look-up, "the head office of the employer of Alda Brackett" is two. Every name combines words of
finite lists, so a small closed vocabulary covers any number of worlds; every fact is drawn anew for its question, so
nothing can be memorised and a policy has to search, to remember and to answer.

The module needs neither torch nor a network.
"""

import json
import random
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from datasets import Dataset


MAX_OBJECTIVES = 10
MAX_HOPS = 3
UNKNOWN = "unknown"
"""What an expert answers for an objective that its memory has lost."""

# Every possible fact belongs to one residue of the seed modulo this number.
NUM_DISJOINT_SEEDS = 64


def _words(heads: str, tails: str) -> list[str]:
    return [head + tail for head in heads.split() for tail in tails.split()]


# A name is one word of the first list and one of the second. No word is in two lists, so that a search for one kind of
# entity never matches the words of another.
_NAMES: dict[str, tuple[list[str], list[str]]] = {
    "person": (
        _words("Al Bel Cor Dar El Fen Gal Hel Is Jor Kal Lor", "da dan mira nor ric sa to va vin wen"),
        _words(
            "Brack Crom Dun Farn Gold Hart Kirk Lang Marsh Nor Pem Rad Shel Thorn", "berg dale ett ley man ster ton"
        ),
    ),
    "company": (
        _words("Arc Bor Cen Dyn Ex Fer Hy Ion Lum Nov Op Pax Quan Syn", "ara ero ido ilon ivo onix ora udo uma yx"),
        "Airways Biotech Builders Chemicals Dairy Energy Farms Foods Glass Instruments Labs Lines Logistics Mills "
        "Mining Motors Optics Paper Partners Pumps Rail Robotics Salt Shipping Steel Studios Textiles Timber Tools "
        "Works".split(),
    ),
    "city": (
        "Cape Castle East Fort Grand Great High Lake Little Lower Mount New North Old Port Saint South Upper Warm "
        "West".split(),
        _words(
            "Ash Bram Clay Dray Elm Gren Hol Kel Mor Oak Pell Ros", "brook bury den field ford gate ham mere stow wick"
        ),
    ),
    "profession": (
        "amateur chief coastal freelance itinerant junior maritime medical military municipal naval private royal "
        "rural senior tropical urban veteran visiting volunteer".split(),
        "accountant archivist astronomer baker botanist brewer carpenter chemist composer courier dentist diver "
        "editor engineer gardener geologist glazier jeweller judge librarian locksmith mason notary painter pilot "
        "poet potter printer sculptor surveyor tailor teacher translator weaver zoologist".split(),
    ),
}


@dataclass(frozen=True)
class _Relation:
    name: str
    subject_kind: str
    object_kind: str
    sentence: str


_RELATIONS = (
    _Relation("employer", "person", "company", "{subject} works for {object}."),
    _Relation("home town", "person", "city", "{subject} lives in {object}."),
    _Relation("mentor", "person", "person", "{subject} was trained by {object}."),
    _Relation("profession", "person", "profession", "{subject} earns a living as {object}."),
    _Relation("head office", "company", "city", "{subject} has its head office in {object}."),
    _Relation("founder", "company", "person", "{subject} was founded by {object}."),
    _Relation("mayor", "city", "person", "{subject} has elected {object} as mayor."),
)
RELATIONS = tuple(relation.name for relation in _RELATIONS)
"""The names of all relations."""


@dataclass(frozen=True)
class Fact:
    """One look-up: the `relation` of `subject` is `object`."""

    subject: str
    relation: str
    object: str


@dataclass(frozen=True)
class RelayQuestion:
    """A question with everything that is needed to answer and to grade it.

    Attributes:
        id (`str`): Unique among the worlds of different seeds.
        question (`str`): The text that a policy is asked.
        answers (`list[list[str]]`): The accepted answers of each objective, in the order in which they are asked.
        documents (`list[dict[str, str]]`): The documents that hold the facts, one per look-up, as
            `{"id", "contents"}`.
        chains (`list[list[Fact]]`): The look-ups of each objective in their order; the subject of each is the object
            of the one before, and the object of the last is the answer.
    """

    id: str
    question: str
    answers: list[list[str]]
    documents: list[dict[str, str]]
    chains: list[list[Fact]]


class RelayWorld:
    """Questions and the documents that answer them, drawn from a seed.

    The same arguments always give the same world. Worlds whose seeds differ modulo `NUM_DISJOINT_SEEDS` (64) share no
    fact, so splits are made by seed: one for the expert traces, one for training, one held out.

    Within a world no two documents are about the same entity, so a search for an entity's name has one right result.
    Names run out at some size (at three objectives: 3,500 questions of one hop, 1,500 of two, 750 of three); draw
    several worlds for more.

    Args:
        seed (`int`): Decides everything that is random.
        num_questions (`int`): How many questions to draw.
        objectives (`int` or `tuple[int, int]`): Objectives per question, from 1 to 10: a number, or the bounds
            (inclusive) of a uniform draw per question.
        hops (`int` or `tuple[int, int]`): Look-ups per objective, from 1 to 3: a number, or the bounds (inclusive) of
            a uniform draw per objective.
        relations (`Collection[str]`, *optional*): Use only these of `RELATIONS`. By default all.
        extra_facts (`int`): How many facts that nobody asks for each document also states, as far as its kind of
            entity has relations.
        distractors (`int`): How many documents about entities that no question needs to add to the corpus.
        max_words (`int`, *optional*): Take first and second names from that many words each. A smaller vocabulary is
            learned faster, and names run out sooner.

    Raises:
        ValueError: If an argument is out of range, the relations cannot form chains that long, or names run out.

    Attributes:
        questions (`list[RelayQuestion]`): The questions.
        documents (`list[dict[str, str]]`): The documents of all questions and the distractors, as `{"id", "contents"}`
            with contents `'"Title"\\ntext'`, the format of Search-R1's corpora.

    Example:

    ```python
    >>> world = RelayWorld(seed=0, num_questions=100, objectives=(2, 4), hops=(1, 2))
    >>> world.write_corpus("corpus.jsonl")
    >>> dataset = world.to_dataset()
    ```
    """

    def __init__(
        self,
        seed: int,
        num_questions: int,
        objectives: int | tuple[int, int] = 3,
        hops: int | tuple[int, int] = 1,
        *,
        relations: Collection[str] | None = None,
        extra_facts: int = 0,
        distractors: int = 0,
        max_words: int | None = None,
    ):
        if isinstance(relations, str):
            relations = [relations]
        if num_questions < 1:
            raise ValueError(f"`num_questions` must be at least 1, got {num_questions}.")
        if max_words is not None and max_words < 1:
            raise ValueError(f"`max_words` must be at least 1, got {max_words}.")
        for name, value in (("extra_facts", extra_facts), ("distractors", distractors)):
            if value < 0:
                raise ValueError(f"`{name}` must not be negative, got {value}.")
        if unknown := sorted(set(relations or ()) - set(RELATIONS)):
            raise ValueError(f"`relations` has unknown names {unknown}. Choose from {list(RELATIONS)}.")
        objective_bounds = _bounds("objectives", objectives, MAX_OBJECTIVES)
        hop_bounds = _bounds("hops", hops, MAX_HOPS)

        self.seed = seed
        self._rng = random.Random(seed)
        self._extra_facts = extra_facts
        self._words = {kind: (first[:max_words], second[:max_words]) for kind, (first, second) in _NAMES.items()}
        self._relations = [relation for relation in _RELATIONS if relations is None or relation.name in relations]
        if not self._relations_from("person", hop_bounds[1]):
            names = [relation.name for relation in self._relations]
            raise ValueError(
                f"`relations`={names} cannot form a chain of {hop_bounds[1]} hop(s) that starts at a person. Add "
                f"relations that continue it, or ask for fewer `hops`."
            )

        self._documented: set[str] = set()
        self.questions = [self._draw_question(i, objective_bounds, hop_bounds) for i in range(num_questions)]
        self.documents = [document for question in self.questions for document in question.documents]
        self.documents += [self._draw_distractor(i) for i in range(distractors)]

    def write_corpus(self, path: str | Path) -> None:
        """Write all documents as JSON lines, `{"id": …, "contents": '"Title"\\ntext'}` each.

        Args:
            path (`str` or `Path`): The file to write; its folder is made if need be.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for document in self.documents:
                file.write(json.dumps(document, ensure_ascii=False) + "\n")

    def to_dataset(self) -> "Dataset":
        """The questions as a dataset for the trainer.

        Returns:
            `datasets.Dataset`: Columns `id` and `question` (str), `answers` (list of lists of str: the accepted
            answers of each objective), `num_objectives` and `num_lookups` (int).
        """
        from datasets import Dataset

        return Dataset.from_list(
            [
                {
                    "id": question.id,
                    "question": question.question,
                    "answers": question.answers,
                    "num_objectives": len(question.chains),
                    "num_lookups": sum(len(chain) for chain in question.chains),
                }
                for question in self.questions
            ]
        )

    def _draw_question(self, index: int, objectives: tuple[int, int], hops: tuple[int, int]) -> RelayQuestion:
        question_id = f"relay-{self.seed}-{index}"
        chains: list[list[Fact]] = []
        documents: list[dict[str, str]] = []
        for _ in range(self._rng.randint(*objectives)):
            chain = self._draw_chain(self._rng.randint(*hops))
            for fact in chain:
                documents.append(self._document(f"{question_id}-{len(documents)}", fact))
            chains.append(chain)
        asked = [
            " of ".join([f"the {fact.relation}" for fact in reversed(chain)] + [chain[0].subject]) for chain in chains
        ]
        return RelayQuestion(
            id=question_id,
            question=f"Find {'; '.join(asked)}.",
            answers=[[chain[-1].object] for chain in chains],
            documents=documents,
            chains=chains,
        )

    def _draw_chain(self, hops: int) -> list[Fact]:
        kind, subject = "person", self._new_entity("person")
        chain = []
        for remaining in range(hops, 0, -1):
            relation = self._rng.choice(self._relations_from(kind, remaining))
            chain.append(self._draw_fact(subject, relation, documented=remaining > 1))
            kind, subject = relation.object_kind, chain[-1].object
        return chain

    def _draw_distractor(self, index: int) -> dict[str, str]:
        # Every set of relations that passed the constructor has some for people.
        relation = self._rng.choice(self._relations_from("person", 1))
        fact = self._draw_fact(self._new_entity("person"), relation, documented=False)
        return self._document(f"relay-{self.seed}-distractor-{index}", fact)

    def _document(self, document_id: str, fact: Fact) -> dict[str, str]:
        facts = [fact]
        asked = next(relation for relation in _RELATIONS if relation.name == fact.relation)
        others = [r for r in _RELATIONS if r.subject_kind == asked.subject_kind and r is not asked]
        for relation in self._rng.sample(others, min(self._extra_facts, len(others))):
            facts.append(self._draw_fact(fact.subject, relation, documented=False))
        self._rng.shuffle(facts)
        sentences = {relation.name: relation.sentence for relation in _RELATIONS}
        text = " ".join(sentences[f.relation].format(subject=f.subject, object=f.object) for f in facts)
        return {"id": document_id, "contents": f'"{fact.subject}"\n{text}'}

    def _relations_from(self, kind: str, hops: int) -> list[_Relation]:
        """The relations that can begin a chain of so many hops at an entity of this kind."""
        relations = [relation for relation in self._relations if relation.subject_kind == kind]
        if hops == 1:
            return relations
        return [relation for relation in relations if self._relations_from(relation.object_kind, hops - 1)]

    def _new_entity(self, kind: str) -> str:
        """Draw an entity that has no document yet, and count it as one that has."""
        for index in self._draws(kind, range(self._num_names(kind))):
            if (name := self._name(kind, index)) not in self._documented:
                self._documented.add(name)
                return name
        raise AssertionError("_draws raises when it ends")

    def _draw_fact(self, subject: str, relation: _Relation, documented: bool) -> Fact:
        """Draw what the `relation` of `subject` is: if it gets a document (`documented`), an entity that has none."""
        kind = relation.object_kind
        # Of all the objects that this fact could have, each seed uses every 64th. A checksum rather than `hash`, whose
        # values differ from one process to the next.
        offset = (self.seed + zlib.crc32(f"{subject}|{relation.name}".encode())) % NUM_DISJOINT_SEEDS
        for index in self._draws(kind, range(offset, self._num_names(kind), NUM_DISJOINT_SEEDS)):
            name = self._name(kind, index)
            if name == subject or (documented and name in self._documented):
                continue
            if documented:
                self._documented.add(name)
            return Fact(subject, relation.name, name)
        raise AssertionError("_draws raises when it ends")

    def _num_names(self, kind: str) -> int:
        first, second = self._words[kind]
        return len(first) * len(second)

    def _name(self, kind: str, index: int) -> str:
        first, second = self._words[kind]
        return f"{first[index // len(second)]} {second[index % len(second)]}"

    def _draws(self, kind: str, indices: range) -> Iterator[int]:
        for _ in range(1000):
            yield self._rng.choice(indices)
        raise ValueError(
            f"The names for another {kind} have run out: this world is too large. Draw several worlds with different "
            f"seeds, or lower `num_questions`, `objectives`, `hops` or `distractors`."
        )


def expert_trace(
    question: RelayQuestion,
    search: Callable[[str], str],
    memory_loss: float = 0.3,
    rng: random.Random | None = None,
) -> list[dict[str, Any]]:
    """A worked example: look everything up, one entity a turn, and answer from the memory.

    The trace follows the protocol of the package: turns with a memory (but the first), a thought and a search, then a
    memory, a thought and the answers, joined with " ; ". The thoughts never contain a fact, and neither does an answer
    that the last memory does not hold: an objective whose facts the memory lost is answered "unknown". With
    `memory_loss` > 0 a policy that imitates such traces forgets, and has keeping everything still to learn.

    Args:
        question ([`RelayQuestion`]): The question to answer.
        search (`Callable[[str], str]`): The search tool, from the name of an entity to the text of an observation. A
            fact counts as found if the observation contains its object; a chain ends at a fact that was not found.
        memory_loss (`float`): The probability, per fact, of being left out of every memory.
        rng (`random.Random`, *optional*): Decides which facts are lost. By default seeded with the question's id.

    Returns:
        `list[dict[str, Any]]`: Messages that follow the question, assistant turns and tool observations alternating.

    Raises:
        ValueError: If `memory_loss` is no probability.
    """
    if not 0 <= memory_loss <= 1:
        raise ValueError(f"`memory_loss` is a probability and must lie between 0 and 1, got {memory_loss}.")
    rng = rng or random.Random(question.id)
    kept: list[Fact] = []
    messages: list[dict[str, Any]] = []

    def turn(text: str) -> dict[str, Any]:
        memory = " ".join(f"{fact.subject}: {fact.object}." for fact in kept) or "nothing"
        return {"role": "assistant", "content": f"<mem>{memory}</mem>{text}" if messages else text}

    for chain in question.chains:
        for fact in chain:
            call = json.dumps({"name": "search", "arguments": {"query": fact.subject}})
            messages.append(turn(f"<think>look up {fact.subject}</think><tool_call>{call}</tool_call>"))
            observation = search(fact.subject)
            messages.append({"role": "tool", "name": "search", "content": observation})
            if fact.object not in observation:
                break
            if rng.random() >= memory_loss:
                kept.append(fact)
    answers = [chain[-1].object if all(fact in kept for fact in chain) else UNKNOWN for chain in question.chains]
    messages.append(turn(f"<think>answer</think><answer>{' ; '.join(answers)}</answer>"))
    return messages


def vocabulary(max_words: int | None = None) -> list[str]:
    """All words that names, relations, questions, documents and expert traces are made of.

    Args:
        max_words (`int`, *optional*): As for `RelayWorld`.

    Returns:
        `list[str]`: The words, sorted, without punctuation and tags.
    """
    words = {word for lists in _NAMES.values() for half in lists for word in half[:max_words]}
    for relation in _RELATIONS:
        words.update(relation.name.split())
        words.update(relation.sentence.format(subject="", object="").strip(" .").split())
    words.update("Find the of look up answer nothing search query name arguments".split(), [UNKNOWN])
    return sorted(words)


def _bounds(name: str, value: int | tuple[int, int], largest: int) -> tuple[int, int]:
    low, high = (value, value) if isinstance(value, int) else value
    if not 1 <= low <= high <= largest:
        raise ValueError(
            f"`{name}` must be a number from 1 to {largest}, or a pair (lowest, highest) of such numbers, got {value}."
        )
    return low, high
