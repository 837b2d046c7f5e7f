"""Engines behind an OpenAI-compatible endpoint: a hosted model, a vLLM server.

`ChatEngine` sends conversations, which every such endpoint takes. `CompletionSampler`, for `TokenEngine`, sends token
ids to a server that takes and returns them (vLLM does): then a turn sees exactly what it saw in training.
"""

import functools
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from transformers.utils import get_json_schema

from ..agent_settings import AgentSettings
from ..chat_templates import TRUNCATION_MARK, describe_tools, equal_share
from ..protocol import clean_text
from ..tools import ToolRunner, tool_name
from .base import ContextTooLongError, EndpointError, Episodes, RefusedError, Sampling, in_threads, last_turn
from .episode import Episode, Message, Step


logger = logging.getLogger(__name__)

ToolRole = Literal["user", "tool"]

# What a token of English has, on average: the endpoint's tokenizer is not known here.
_CHARACTERS_PER_TOKEN = 4
_MOST_REFUSALS = 20  # in a row
# vLLM takes what a request does not say from the checkpoint's generation configuration; training takes none of it.
_NOTHING_ELSE = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_RETRIES = 8  # with growing pauses of up to 8 seconds: a server that is being restarted is waited for
_LONGEST_PAUSE, _LONGEST_WISH = 8.0, 60.0  # seconds: our own pauses, and those that a server may ask for
_LONGEST_MESSAGE = 400  # characters: some servers answer with a page


class _PassingError(Exception):
    """An attempt failed in a way that another one may not. `wait` is how long the server wants to be left alone."""

    def __init__(self, message: str, wait: float | None = None):
        super().__init__(message)
        self.wait = wait


class Endpoint:
    """A connection to an OpenAI-compatible endpoint; threads may share it.

    Args:
        url: its base, which for most servers ends in `/v1`.
        model: what it calls the model; `None` if it has only one.
        api_key: its key; `None` takes that of the environment variable `OPENAI_API_KEY`, if there is one.
        timeout: seconds that an attempt may take.

    Raises:
        ImportError: if the package `openai` is not installed.
        ValueError: if the URL is no URL, or no model is named where there are several.
        EndpointError: if it has to be asked for its models and does not answer.
    """

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None, timeout: float = 600.0):
        try:
            import openai
        except ImportError as error:
            raise ImportError("An endpoint needs the package `openai`: pip install 'mempo_trl[openai]'.") from error
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"`endpoint={url!r}` is not allowed: it must be like http://localhost:8000/v1.")
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout > 0:
            raise ValueError(f"`timeout={timeout!r}` is not allowed: it must be a number of seconds, more than 0.")
        host = parts.netloc.rpartition("@")[2]  # a password is nobody's business
        self.name = urlunsplit((parts.scheme, host, parts.path, "", ""))
        self._openai = openai
        self._client = openai.OpenAI(
            base_url=url,
            api_key=api_key or os.environ.get("OPENAI_API_KEY") or "none",
            timeout=timeout,
            max_retries=0,  # see `_ask`
        )
        self._refusals = 0
        self._counted = True
        self._models: dict[str, dict[str, Any]] | None = None
        if model is None:
            found = list(self.models())
            if len(found) != 1:
                raise ValueError(f"{self.name} has the models {', '.join(found) or 'none'}: name one.")
            model = found[0]
        self.model = model

    def models(self) -> dict[str, dict[str, Any]]:
        """What the endpoint says of its models, by name.

        Raises:
            EndpointError: if it does not answer, or not with a list of models.
        """
        if self._models is None:
            page = self._ask(self._client.models.list, lambda page: isinstance(getattr(page, "data", None), list))
            named = [model for model in page.data if isinstance(getattr(model, "id", None), str)]
            self._models = {model.id: model.model_dump() for model in named}
        return self._models

    def chat(self, **request: Any) -> Any:
        """The answer to a conversation, as `openai` returns it: with one choice at least, which has a message.

        Raises:
            RefusedError: if this request is refused; `ContextTooLongError` if it is too long.
            EndpointError: if there is no answer after several attempts, or 20 requests in a row are refused.
            ValueError: if there is no such model or key.
        """
        return self._ask(
            lambda: self._client.chat.completions.create(model=self.model, **request),
            lambda answer: getattr(_first_choice(answer), "message", None) is not None,
        )

    def complete(self, **request: Any) -> Any:
        """The completion of a prompt, as `openai` returns it: with one choice at least. Raises as `chat`."""
        return self._ask(
            lambda: self._client.completions.create(model=self.model, **request),
            lambda answer: _first_choice(answer) is not None,
        )

    def count(self, usage: Any, name: str) -> int:
        """The tokens that an answer says were used; 0 if it does not say, which is told once."""
        value = getattr(usage, name, None)
        if isinstance(value, int | float) and 0 <= value < float("inf"):
            return int(value)
        if self._counted:
            self._counted = False
            logger.warning("%s does not say how many tokens it used (%s): they are counted as 0.", self.name, name)
        return 0

    def _ask(self, request: Callable[[], Any], is_whole: Callable[[Any], bool]) -> Any:
        """What a request is answered with, in the end."""
        for attempt in range(_RETRIES + 1):
            try:
                answer = self._attempt(request, is_whole)
            except _PassingError as error:
                if attempt == _RETRIES:
                    raise EndpointError(f"{self.name} {error}; start this again once it does.") from error
                pause = min(0.5 * 2**attempt, _LONGEST_PAUSE) * random.uniform(0.75, 1.0)
                pause = pause if error.wait is None else error.wait
                logger.warning("%s %s. Asking again in %.1f seconds.", self.name, error, pause)
                time.sleep(pause)
            except RefusedError as error:
                self._refusals += not isinstance(error, ContextTooLongError)
                if self._refusals >= _MOST_REFUSALS:
                    raise EndpointError(f"{self.name} refuses every request: {error}") from error
                logger.warning("%s refuses a request: %s", self.name, error)
                raise
            else:
                self._refusals = 0
                return answer
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, request: Callable[[], Any], is_whole: Callable[[Any], bool]) -> Any:
        openai = self._openai
        try:
            answer = request()
        except openai.APIStatusError as error:
            raise self._failure(error.status_code, _shortened(error), error.response.headers) from error
        except openai.APIError as error:
            raise _PassingError(f"does not answer ({_shortened(error)})") from error
        except (ValueError, RecursionError) as error:  # what `json` says of half an answer
            raise _PassingError(f"does not answer in JSON ({_shortened(error)})") from error
        told = getattr(answer, "error", None)
        if told:  # some proxies answer 200 whatever happens
            code = told.get("code") if isinstance(told, dict) else None
            raise self._failure(code if isinstance(code, int) else 500, _shortened(json.dumps(told, default=str)), {})
        if not is_whole(answer):
            content = answer.model_dump() if hasattr(answer, "model_dump") else answer
            raise _PassingError(f"does not answer as the protocol says ({_shortened(content)})")
        return answer

    def _failure(self, status: int, message: str, headers: Mapping[str, str]) -> Exception:
        """What an HTTP status means."""
        if status in (401, 403):
            return ValueError(f"{self.name} refuses the key ({message}): set the environment variable OPENAI_API_KEY.")
        if status == 404:
            return ValueError(f"{self.name} has no such model or address ({message}): does it end in /v1?")
        if status in (408, 409, 429) or not 400 <= status < 500:
            try:
                wait = float(headers.get("retry-after", ""))
            except ValueError:
                wait = -1.0
            return _PassingError(f"does not answer ({message})", wait if 0 <= wait <= _LONGEST_WISH else None)
        about = message.lower()
        if status == 413 or ("context" in about and ("length" in about or "window" in about)):
            return ContextTooLongError(message)
        return RefusedError(message)


def _first_choice(answer: Any) -> Any:
    """The first choice of an answer, `None` if it has none."""
    choices = getattr(answer, "choices", None)
    return choices[0] if isinstance(choices, list) and choices else None


def _shortened(message: Any) -> str:
    text = " ".join(str(message).split())
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 1] + "…"


class ChatEngine:
    """Runs an agent behind `/v1/chat/completions`. See `Engine`.

    Contexts are conversations that the endpoint renders: with a chat template that only appends, they are those of
    training. `settings.max_observation_length` counts four characters as a token, and `settings.max_completion_length`
    is not looked at. Special tokens that an observation spells out are the endpoint's business.

    Args:
        endpoint: where the model is.
        tools: what the agent may call. They run in threads, so what limits their time must be their own.
        settings: what it is run with.
        sampling: how tokens are drawn.
        threads: questions at the same time.
        tool_role: "user" describes the tools in the system message and sends what they answer as user messages, which
            every model takes. "tool" sends the tools' schemas and messages of that role, for a server whose chat
            template renders both, and a model that was trained so.
        request: what else a request holds, or holds instead: {"max_tokens": None, "max_completion_tokens": 2048} for
            models that want the one and not the other; {"repetition_penalty": 1.0, "top_k": 0} for a vLLM server, which
            takes what a request does not say from the checkpoint's `generation_config.json`.
        max_unavailable_turns: turns in a row and thread in which a tool could not be reached, after which the run
            stops.

    Raises:
        ValueError: if an argument is out of its range.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        tools: list[Callable],
        settings: AgentSettings,
        sampling: Sampling,
        threads: int = 16,
        tool_role: ToolRole = "user",
        request: Mapping[str, Any] | None = None,
        max_unavailable_turns: int | None = 10,
    ):
        check_threads(threads)
        if tool_role not in ("user", "tool"):
            raise ValueError(f"`tool_role={tool_role!r}` is not allowed: it must be 'user' or 'tool'.")
        self.endpoint, self.tools, self.settings, self.sampling = endpoint, tools, settings, sampling
        self.threads, self.tool_role, self.request = threads, tool_role, dict(request or {})
        self.identity = endpoint.model
        self.details = {"request": self.request, "tool_role": tool_role}
        self._limit = None if max_unavailable_turns is None else max_unavailable_turns * threads
        self._runner = ToolRunner()
        self._by_name = {tool_name(tool): tool for tool in tools}

    def turns(self, prompt: list[Message]) -> Iterator[Episode]:
        """See `Engine.turns`."""
        return self._turns(prompt, self.sampling.seed)

    def rollout(self, prompts: Sequence[list[Message]], seeds: Sequence[int]) -> Episodes:
        """See `Engine.rollout`."""
        return in_threads(
            [
                functools.partial(last_turn, functools.partial(self._turns, prompt, seed))
                for prompt, seed in zip(prompts, seeds, strict=True)
            ],
            self.threads,
        )

    def _turns(self, prompt: list[Message], seed: int) -> Iterator[Episode]:
        settings, episode = self.settings, Episode()
        if self.tools and self.tool_role == "user":
            prompt = describe_tools(prompt, self.tools)
        rounds: list[list[Message]] = []
        for number in range(1, settings.max_turns + 1):
            seen = rounds if settings.context_turns is None else rounds[-settings.context_turns :]
            try:
                text, ended, usage = self._ask(prompt + [message for part in seen for message in part], seed + number)
            except RefusedError as error:
                episode.stop_reason, episode.error = error.stop_reason, str(error)
                yield episode
                return
            count = self.endpoint.count
            step = Step(text, count(usage, "prompt_tokens"), count(usage, "completion_tokens"))
            episode.steps.append(step)
            turn = step.parsed
            if turn.answer is not None:
                episode.stop_reason = "answer"
            elif not turn.requests:
                episode.stop_reason = "no_action" if ended else "max_turn_length"
            elif number == settings.max_turns:
                episode.stop_reason = "max_turns"
            else:
                results = self._runner.run([(self._by_name, request) for request in turn.requests])
                self._runner.stop_if_unavailable(self._limit, "start it again")
                episode.tool_calls += len(results)
                episode.tool_failures += sum(result.failed for result in results)
                episode.unavailable_calls += sum(result.unavailable is not None for result in results)
                episode.malformed_calls += sum(result.malformed for result in results)
                step.observation = [{"role": "tool", "name": result.name, "content": result.text} for result in results]
                rounds.append([{"role": "assistant", "content": text}, *self._shown(step.observation)])
                yield episode
                continue
            yield episode
            return

    def _ask(self, messages: list[Message], seed: int) -> tuple[str, bool, Any]:
        """What the model writes, whether it came to its end, and the tokens that it took."""
        body: dict[str, Any] = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self.settings.max_turn_length,
            "seed": seed % 2**31,
        }
        if self.sampling.top_k:
            body["top_k"] = self.sampling.top_k
        if self.tools and self.tool_role == "tool":
            body["tools"] = [get_json_schema(tool) for tool in self.tools]
            body["tool_choice"] = "none"  # the calls are read here, from the text
        body = {name: value for name, value in {**body, **self.request}.items() if value is not None}
        answer = self.endpoint.chat(messages=messages, extra_body=body)
        choice = answer.choices[0]
        text = _text(choice.message)
        return text, choice.finish_reason != "length", getattr(answer, "usage", None)

    def _shown(self, observation: list[Message]) -> list[Message]:
        """The messages that the model gets to read."""
        texts = [message["content"] for message in observation]
        budget = _CHARACTERS_PER_TOKEN * self.settings.max_observation_length
        if sum(map(len, texts)) > budget:
            limit = equal_share([len(text) for text in texts], budget)
            kept = max(limit - len(TRUNCATION_MARK), 0)
            texts = [text if len(text) <= limit else text[:kept].rstrip() + TRUNCATION_MARK for text in texts]
        if self.tool_role == "user":
            return [{"role": "user", "content": "\n\n".join(texts)}]
        return [{**message, "content": text} for message, text in zip(observation, texts, strict=True)]


def _text(message: Any) -> str:
    """What a message says, calls that the server took out of the text included."""
    content = getattr(message, "content", None)
    if isinstance(content, list):  # parts: [{"type": "text", "text": "…"}, …]
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    text = content if isinstance(content, str) else ""
    for call in getattr(message, "tool_calls", None) or []:
        called = getattr(call, "function", None) or getattr(call, "custom", None)
        name = getattr(called, "name", None)
        arguments = getattr(called, "arguments", None) or getattr(called, "input", None) or {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, default=str)
        text += f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>'
    return clean_text(text)


class CompletionSampler:
    """Samples from a server whose `/v1/completions` takes token ids and returns them, as vLLM's does. See `Sampler`.

    Args:
        endpoint: where the model is.
        eos_token_ids: ids that end a turn.
        sampling: how tokens are drawn.
        threads: questions at the same time.
    """

    def __init__(self, endpoint: Endpoint, eos_token_ids: list[int], sampling: Sampling, threads: int = 16):
        check_threads(threads)
        self.endpoint, self.eos_token_ids, self.sampling, self.threads = endpoint, eos_token_ids, sampling, threads
        self.identity = endpoint.model
        about = endpoint.models().get(endpoint.model, {})
        self.max_context_length: int | None = about.get("max_model_len")

    def __call__(self, contexts: list[list[int]], max_new_tokens: int, seeds: list[int]) -> list[list[int]]:
        return [self._sample(context, max_new_tokens, seed) for context, seed in zip(contexts, seeds, strict=True)]

    def _sample(self, context: list[int], max_new_tokens: int, seed: int) -> list[int]:
        own: dict[str, Any] = {
            "return_token_ids": True,
            "stop_token_ids": self.eos_token_ids,
            "top_k": self.sampling.top_k,
            **_NOTHING_ELSE,
        }
        answer = self.endpoint.complete(
            prompt=context,
            max_tokens=max_new_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            seed=seed,
            extra_body=own,
        )
        ids = getattr(answer.choices[0], "token_ids", None)
        if ids is None:
            raise ValueError(
                f"{self.endpoint.name} does not return token ids: leave out `tokenizer`, so that it is sent "
                "conversations instead."
            )
        return list(ids)


def check_threads(threads: int) -> None:
    """Raise `ValueError` unless this is a number of threads."""
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise ValueError(f"`concurrency={threads!r}` is not allowed: it must be a whole number, at least 1.")
