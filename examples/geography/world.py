"""Questions about real countries, the documents that answer them, and an expert that answers by searching.

The facts are those of the package `countryinfo` (https://pypi.org/project/countryinfo/, MIT licence): capitals,
currencies, calling codes, internet domains, provinces. A question takes one to three look-ups:

    What is the currency of Peru?
    What is the calling code of the country whose capital is Lima?
    What is the latitude of the capital of the country where Arequipa is a province?

Every fact belongs to one country, and the countries are split, so questions to train on and questions to test on have
no entity in common.
"""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import countryinfo


SYSTEM_PROMPT = (
    "Find the answer by searching. Begin every turn but the first with <mem>facts found</mem>. Then <think>…</think>. "
    "Then call the tool, or write <answer>…</answer>."
)
UNKNOWN = "unknown"

# What a document says of its subject, by the name of what it tells.
_SENTENCES = {
    "capital": "The capital of {subject} is {object}.",
    "currency": "The currency of {subject} is {object}.",
    "calling code": "The calling code is {object}.",
    "internet domain": "The internet domain is {object}.",
    "country by capital": "{subject} is the capital of {object}.",
    "country by province": "{subject} is a province of {object}.",
    "latitude": "The latitude is {object}.",
}
_OF_COUNTRIES = ("currency", "calling code", "internet domain", "capital")
_PROVINCES = 4  # of a country, at most


@dataclass(frozen=True)
class Fact:
    """The `relation` of `subject` is `object`."""

    subject: str
    relation: str
    object: str

    @property
    def query(self) -> str:
        """What an expert searches for to find this out, like "currency of Peru", or "country of Lima"."""
        return query_of(self.relation, self.subject)


@dataclass(frozen=True)
class Country:
    """What is known of a country.

    Attributes:
        name, capital: their names.
        provinces: names of provinces that no other country has.
        facts: by relation.
        latitude: of the capital, in words.
    """

    name: str
    capital: str
    provinces: list[str]
    facts: dict[str, str]
    latitude: str


@dataclass(frozen=True)
class GeographyQuestion:
    """A question and the look-ups that answer it; the subject of each is the object of the one before."""

    id: str
    question: str
    chain: list[Fact]

    def row(self) -> dict[str, Any]:
        """The question as a row of a data set."""
        answer = self.chain[-1].object
        answers = [answer] + ([answer.lstrip("+.")] if answer[0] in "+." else [])
        return {"id": self.id, "question": self.question, "answers": [answers], "num_hops": len(self.chain)}


def read_countries() -> list[Country]:
    """The countries of the package that have everything a question may ask, in the order of their names."""
    folder = Path(countryinfo.__file__).parent / "data"
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    provinces = [list(dict.fromkeys(_plain(content.get("provinces") or []))) for content in contents]
    every_name = [
        name
        for content, of_country in zip(contents, provinces, strict=True)
        for name in [_text(content, "name"), _text(content, "capital"), *of_country]
    ]
    words = [set(name.lower().split()) for name in every_name]

    def clear(name: str) -> bool:
        """Whether a search can tell it from all others: not "Brussels", if there is "Brussels Capitol Region"."""
        return bool(_plain([name])) and sum(set(name.lower().split()) <= other for other in words) == 1

    countries = []
    for content, of_country in zip(contents, provinces, strict=True):
        name, capital = _text(content, "name"), _text(content, "capital")
        currencies, codes, domains = (content.get(key) or [] for key in ("currencies", "callingCodes", "tld"))
        place = content.get("capital_latlng") or content.get("latlng")
        if not (clear(name) and clear(capital) and currencies and codes and domains and place):
            continue
        degrees = round(abs(place[0]))
        countries.append(
            Country(
                name,
                capital,
                [province for province in of_country if clear(province)][:_PROVINCES],
                {
                    "capital": capital,
                    "currency": currencies[0],
                    "calling code": f"+{codes[0]}",
                    "internet domain": domains[0],
                },
                f"{degrees} degrees {'south' if place[0] < 0 else 'north'}",
            )
        )
    return countries


def _text(content: dict[str, Any], key: str) -> str:
    """What a key says, if it is one text: some countries have several capitals."""
    return content[key] if isinstance(content.get(key), str) else ""


def _plain(names: list[Any]) -> list[str]:
    """The names that are one to three plain words: others would be cut differently by search and by expert."""
    return [name for name in names if isinstance(name, str) and re.fullmatch(r"[A-Z][a-z]+( [A-Z][a-z]+){0,2}", name)]


class GeographyWorld:
    """Documents about all countries, and questions about some of them.

    Args:
        seed: decides which countries are tested on, and which questions are drawn.
        test_share: share of the countries that are tested on.

    Attributes:
        documents: `{"id", "contents"}` of all countries, for an index.
    """

    def __init__(self, seed: int = 0, test_share: float = 0.25):
        self.seed = seed
        countries = read_countries()
        random.Random(seed).shuffle(countries)
        held_out = round(test_share * len(countries))
        self.countries = {"test": countries[:held_out], "train": countries[held_out:]}
        self.documents = [document for country in countries for document in _documents(country)]

    def questions(self, split: str, number: int) -> list[GeographyQuestion]:
        """Draw different questions, as many of each number of look-ups as possible.

        Args:
            split: "train" or "test".
            number: how many.

        Raises:
            ValueError: if there are not that many.
        """
        rng = random.Random(f"{self.seed} {split}")
        by_hops: dict[int, list[tuple[str, list[Fact]]]] = {1: [], 2: [], 3: []}
        for country in self.countries[split]:
            for text, chain in _all_questions(country):
                by_hops[len(chain)].append((text, chain))
        for questions in by_hops.values():
            rng.shuffle(questions)
        drawn: list[tuple[str, list[Fact]]] = []
        while len(drawn) < number and any(by_hops.values()):
            drawn += [questions.pop() for questions in by_hops.values() if questions][: number - len(drawn)]
        if len(drawn) < number:
            raise ValueError(f"There are only {len(drawn)} questions to {split} on, not {number}.")
        return [GeographyQuestion(f"{split}-{n}", text, chain) for n, (text, chain) in enumerate(drawn)]


def _documents(country: Country) -> list[dict[str, str]]:
    def document(subject: str, facts: dict[str, str]) -> dict[str, str]:
        text = " ".join(_SENTENCES[name].format(subject=subject, object=found) for name, found in facts.items())
        return {"id": subject, "contents": f'"{subject}"\n{text}'}

    return [
        document(country.name, country.facts),
        document(country.capital, {"country by capital": country.name, "latitude": country.latitude}),
        *(document(province, {"country by province": country.name}) for province in country.provinces),
    ]


def _all_questions(country: Country) -> list[tuple[str, list[Fact]]]:
    """Every question about a country, with its look-ups."""
    ways: list[tuple[str, list[Fact]]] = [
        (country.name, []),
        (
            f"the country whose capital is {country.capital}",
            [Fact(country.capital, "country by capital", country.name)],
        ),
    ]
    for province in country.provinces:
        found = [Fact(province, "country by province", country.name)]
        ways.append((f"the country where {province} is a province", found))
    questions = []
    for text, found in ways:
        for relation in _OF_COUNTRIES:
            if relation == "capital" and "capital is" in text:
                continue
            asked = Fact(country.name, relation, country.facts[relation])
            questions.append((f"What is the {relation} of {text}?", [*found, asked]))
        if "capital is" not in text:
            to_capital = Fact(country.name, "capital", country.capital)
            latitude = Fact(country.capital, "latitude", country.latitude)
            questions.append((f"What is the latitude of the capital of {text}?", [*found, to_capital, latitude]))
    return questions


class Expert:
    """Answers the questions of this world by searching, a turn at a time, from nothing but the conversation.

    It reads what to look up from the question, what it has found from its last memory, and what is new from the last
    search result. It is made to fail in some turns, as teachers do: it breaks the format of a call, answers without
    having searched, or leaves out the memory.

    Args:
        failures: share of the turns in which it fails.
        seed: decides in which, together with the question and the seed of the request.

    Raises:
        ValueError: if `failures` is not from 0 to 1.
    """

    def __init__(self, failures: float = 0.0, seed: int = 0):
        if not 0 <= failures <= 1:
            raise ValueError(f"`failures={failures}` is not allowed: it must be from 0 to 1.")
        self.failures, self.seed = failures, seed

    def turn(self, messages: list[dict[str, Any]], seed: int = 0) -> str:
        """The next turn.

        Args:
            messages: the conversation so far: a system message, the question, then turns and observations, of which the
                older ones may be missing.
            seed: of the request.

        Raises:
            ValueError: if the question is none of this world.
        """
        question = next(message["content"] for message in messages if message["role"] == "user")
        rng = random.Random(f"{self.seed} {seed} {question}")
        entity, relations = read_question(question)
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        failure = None
        if rng.random() < self.failures:
            failure = rng.choice(["malformed", "no memory"] if turns else ["malformed", "guess"])
        facts: dict[str, str] = {}
        opening = ""
        if turns:
            last, observation = messages[turns[-1]]["content"], messages[turns[-1] + 1]["content"]
            facts = read_memory(last) | _new_facts(last, observation)
            if failure != "no memory":
                opening = f"<mem>{'; '.join(f'{query}: {found}' for query, found in facts.items())}</mem>"
        elif failure == "guess":
            return f"<think>I do not know</think><answer>{UNKNOWN}</answer>"
        for relation in relations:
            query = query_of(relation, entity)
            if query not in facts:
                call = json.dumps({"name": "search", "arguments": {"query": query}})
                if failure == "malformed":
                    call = call[:-2]
                return f"{opening}<think>{query}</think><tool_call>{call}</tool_call>"
            entity = facts[query]
        return f"{opening}<think>answer</think><answer>{entity}</answer>"


def query_of(relation: str, subject: str) -> str:
    """What to search for to find out the `relation` of `subject`."""
    return f"{'country' if relation.startswith('country by') else relation} of {subject}"


def read_question(question: str) -> tuple[str, list[str]]:
    """What to look up first, and what to find out in each look-up."""
    match = re.fullmatch(r"What is the ([a-z ]+?) of (.*)\?", question)
    if match is None:
        raise ValueError(f"This is no question of the world of countries: {question!r}")
    asked, rest = match.groups()
    relations = [asked]
    if rest.startswith("the capital of "):
        relations, rest = ["capital", asked], rest.removeprefix("the capital of ")
    for pattern, relation in (
        ("the country whose capital is (.*)", "country by capital"),
        ("the country where (.*) is a province", "country by province"),
    ):
        if way := re.fullmatch(pattern, rest):
            return way.group(1), [relation, *relations]
    return rest, relations


def read_memory(turn: str) -> dict[str, str]:
    """The facts in the memory of a turn: what was found, by what was searched for."""
    memory = re.match(r"<mem>(.*?)</mem>", turn, re.DOTALL)
    pairs = [pair.partition(": ") for pair in memory.group(1).split("; ")] if memory else []
    return {query: found for query, colon, found in pairs if colon}


def _new_facts(turn: str, observation: str) -> dict[str, str]:
    """What a turn searched for, if the observation says it."""
    searched = re.search(r'"query": "(([a-z ]+?) of ([^"]*))"', turn)
    if searched is None:
        return {}
    query, word, subject = searched.groups()
    for relation in ("country by capital", "country by province") if word == "country" else (word,):
        if found := read_document(observation, subject, relation):
            return {query: found}
    return {}


def read_document(observation: str, subject: str, relation: str) -> str | None:
    """What the document about a subject says of one relation; `None` if it is not there."""
    document = re.search(rf"\(Title: {re.escape(subject)}\)\n(.*)", observation)
    if document is None:
        return None
    before, after = _SENTENCES[relation].format(subject=subject, object="\0").split("\0")
    found = re.search(f"{re.escape(before)}(.+?){re.escape(after)}( |$)", document.group(1))
    return found.group(1) if found else None
