"""Engines behind an OpenAI-compatible endpoint: a hosted model, a vLLM server.

`ChatEngine` sends conversations, which every such endpoint takes. `CompletionSampler`, for `TokenEngine`, sends token
ids to a server that takes and returns them (vLLM does): then a turn sees exactly what it saw in training.
"""

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from transformers.utils import get_json_schema

from ..agent_settings import AgentSettings
from ..chat_templates import TRUNCATION_MARK, describe_tools, equal_share
from ..tools import ToolRunner, tool_name
from .base import Sampling, in_threads
from .episode import Episode, Message, Step


ToolRole = Literal["user", "tool"]

# What a token of English has, on average: the endpoint's tokenizer is not known here.
_CHARACTERS_PER_TOKEN = 4
_MOST_REFUSALS = 20  # in a row
# vLLM takes what a request does not say from the checkpoint's generation configuration; training takes none of it.
_NOTHING_ELSE = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_RETRIES = 8  # with growing pauses of up to 8 seconds: a server that is being restarted is waited for


class EndpointError(ConnectionError):
    """An endpoint does not answer, or refuses everything."""


class RefusedError(ValueError):
    """An endpoint that answers others refuses this request."""


class ContextTooLongError(RefusedError):
    """A request has more tokens than the model takes."""


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
        if not isinstance(timeout, int | float) or timeout <= 0:
            raise ValueError(f"`timeout={timeout!r}` is not allowed: it must be a number of seconds, more than 0.")
        host = parts.netloc.rpartition("@")[2]  # a password is nobody's business
        self.name = urlunsplit((parts.scheme, host, parts.path, "", ""))
        self._openai = openai
        self._client = openai.OpenAI(
            base_url=url,
            api_key=api_key or os.environ.get("OPENAI_API_KEY") or "none",
            timeout=timeout,
            max_retries=_RETRIES,
        )
        self._refusals = 0
        self._models: dict[str, dict[str, Any]] | None = None
        if model is None:
            found = list(self.models())
            if len(found) != 1:
                raise ValueError(f"{self.name} has the models {', '.join(found) or 'none'}: name one.")
            model = found[0]
        self.model = model

    def models(self) -> dict[str, dict[str, Any]]:
        """What the endpoint says of its models, by name."""
        if self._models is None:
            page = self._ask(self._client.models.list)
            self._models = {model.id: model.model_dump() for model in page.data}
        return self._models

    def chat(self, **request: Any) -> Any:
        """The answer to a conversation, as `openai` returns it. Raises as `complete`."""
        return self._ask(lambda: self._client.chat.completions.create(model=self.model, **request))

    def complete(self, **request: Any) -> Any:
        """The completion of a prompt, as `openai` returns it.

        Raises:
            RefusedError: if this request is refused; `ContextTooLongError` if it is too long.
            EndpointError: if there is no answer after several attempts, or 20 requests in a row are refused.
            ValueError: if there is no such model or key.
        """
        return self._ask(lambda: self._client.completions.create(model=self.model, **request))

    def _ask(self, request: Callable[[], Any]) -> Any:
        openai = self._openai
        try:
            answer = request()
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            if "context" in str(error).lower() and ("length" in str(error).lower() or "window" in str(error).lower()):
                raise ContextTooLongError(str(error)) from error
            self._refusals += 1
            if self._refusals >= _MOST_REFUSALS:
                raise EndpointError(f"{self.name} refuses every request: {error}") from error
            raise RefusedError(str(error)) from error
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise ValueError(
                f"{self.name} refuses the key ({error}): set the environment variable OPENAI_API_KEY."
            ) from error
        except openai.NotFoundError as error:
            raise ValueError(f"{self.name} has no such model or address ({error}): does it end in /v1?") from error
        except openai.APIError as error:
            raise EndpointError(f"{self.name} does not answer ({error}); start this again once it does.") from error
        self._refusals = 0
        return answer


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

    def rollout(self, prompts: Sequence[list[Message]], seeds: Sequence[int]) -> Iterator[tuple[int, Episode]]:
        """See `Engine.rollout`."""
        return in_threads(
            [functools.partial(self._run, prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)],
            self.threads,
        )

    def _run(self, prompt: list[Message], seed: int) -> Episode:
        episode = Episode()
        for episode in self._turns(prompt, seed):  # noqa: B007
            pass
        return episode

    def _turns(self, prompt: list[Message], seed: int) -> Iterator[Episode]:
        settings, episode = self.settings, Episode()
        if self.tools and self.tool_role == "user":
            prompt = describe_tools(prompt, self.tools)
        rounds: list[list[Message]] = []
        for number in range(1, settings.max_turns + 1):
            seen = rounds if settings.context_turns is None else rounds[-settings.context_turns :]
            try:
                text, ended, usage = self._ask(prompt + [message for part in seen for message in part], seed + number)
            except ContextTooLongError:
                episode.stop_reason = "max_context_length"
                yield episode
                return
            except RefusedError:
                episode.stop_reason = "refused"
                yield episode
                return
            step = Step(text, usage.prompt_tokens if usage else 0, usage.completion_tokens if usage else 0)
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
        if not getattr(answer, "choices", None):
            raise EndpointError(f"{self.endpoint.name} gave an answer without choices: {answer!r}")
        choice = answer.choices[0]
        text = choice.message.content or ""
        for call in choice.message.tool_calls or []:  # from a server that takes them out of the text
            arguments = call.function.arguments or "{}"
            text += f'<tool_call>{{"name": {json.dumps(call.function.name)}, "arguments": {arguments}}}</tool_call>'
        return text, choice.finish_reason != "length", answer.usage

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
