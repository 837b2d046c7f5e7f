"""Running an agent outside training: a model of transformers, vLLM, or an OpenAI-compatible endpoint."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from ..agent_settings import AgentSettings
from ..tools import check_tools, tool_name
from .base import EndpointError, Engine, Sampling
from .endpoint import ChatEngine, CompletionSampler, Endpoint, ToolRole
from .episode import Episode, Step
from .tokens import TokenEngine, TransformersSampler, VLLMSampler


__all__ = ["AgentSettings", "ChatEngine", "Endpoint", "EndpointError", "Engine", "Episode", "Sampling", "Step"]
__all__ += ["TokenEngine", "open_engine"]

Backend = Literal["transformers", "vllm", "openai"]


def open_engine(
    model: Any,
    tools: Any = None,
    *,
    backend: Backend | None = None,
    endpoint: str | None = None,
    tokenizer: Any = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    sampling: Sampling | None = None,
    batch_size: int | None = None,
    concurrency: int = 16,
    timeout: float = 600.0,
    tool_role: ToolRole = "user",
    request: Mapping[str, Any] | None = None,
    tool_timeout: float | None = 60.0,
    max_unavailable_turns: int | None = 10,
    vllm_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Engine:
    """Get an agent ready to run.

    Args:
        model: a checkpoint's folder or its name on the Hub; a model of transformers, with its `tokenizer`; a
            `vllm.LLM`; an engine, which is returned as it is; the URL of an endpoint that has one model; with an
            `endpoint`, what that calls the model.
        tools: functions that the agent may call, as `MemPOTrainer` takes them.
        backend: what runs the model. If not given, "openai" with an endpoint, else "transformers".
        endpoint: base URL of an OpenAI-compatible endpoint, for instance http://localhost:8000/v1. Its key is in the
            environment variable `OPENAI_API_KEY`.
        tokenizer: the model's tokenizer, its folder or its name. With an endpoint, the tokenizer means that the server
            is sent token ids, which vLLM takes; without it, it is sent conversations.
        revision: branch, tag or commit on the Hub.
        dtype, device, trust_remote_code: as transformers and vLLM take them. Without a device, the model is spread over
            the GPUs that there are.
        sampling: how tokens are drawn; greedily if not given.
        batch_size: questions that run together in this process: 16 with transformers, 256 with vLLM if not given.
        concurrency: questions that run together behind an endpoint.
        timeout: seconds that an attempt at an endpoint may take; there are nine attempts.
        tool_role, request: see `ChatEngine`. They are for conversations.
        tool_timeout: seconds that a call of a tool may take in this process.
        max_unavailable_turns: turns in a row in which a tool could not be reached, after which a run stops.
        vllm_options: further arguments of `vllm.LLM`.
        **settings: fields of `AgentSettings` that are to differ from those of the checkpoint's `agent.json`, or from
            the defaults if it has none. Tools that are not as it says are a warning.

    Raises:
        ValueError, TypeError: if an argument is wrong.
        ImportError: if a package is missing.
        OSError: if there is no such checkpoint.
    """
    if not isinstance(model, str) and hasattr(model, "rollout") and hasattr(model, "turns"):
        if settings or endpoint or tokenizer is not None:
            raise ValueError("An engine has its settings already: give them where it is made.")
        return model
    tools, sampling = check_tools(tools), Sampling() if sampling is None else sampling
    _check(tools, sampling, request, vllm_options, max_unavailable_turns)
    if endpoint is None and isinstance(model, str) and model.startswith(("http://", "https://")):
        model, endpoint = None, model
    if backend is None:
        backend = "openai" if endpoint is not None else "transformers"
    if backend not in ("transformers", "vllm", "openai"):
        raise ValueError(f"`backend={backend!r}` is not allowed: it must be 'transformers', 'vllm' or 'openai'.")
    if (backend == "openai") != (endpoint is not None):
        raise ValueError("`endpoint` and `backend='openai'` go together: give both, or neither.")
    named = model if isinstance(model, str) else None
    identity = f"{named or _name(model)}{'' if revision is None else f'@{revision}'}"
    for name in (named if endpoint is None else None, tokenizer):
        if isinstance(name, str) and _is_path(name) and not Path(name).is_dir():
            raise FileNotFoundError(f"There is no folder {name}: name a checkpoint's folder, or a model on the Hub.")
    if backend == "transformers" and named is not None and Path(named).is_dir():
        if not any((Path(named) / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise FileNotFoundError(
                f"{named} holds no model: name a folder with a `config.json`, as is saved with one."
            )
    if endpoint is not None:
        chosen = _settings(tokenizer if isinstance(tokenizer, str) else None, revision, settings, tools)
        connection = Endpoint(endpoint, model, timeout=timeout)
        if tokenizer is None:
            return ChatEngine(
                connection, tools, chosen, sampling, concurrency, tool_role, request, max_unavailable_turns
            )
        tokenizer = _tokenizer(tokenizer, revision, trust_remote_code)
        sampler: Any = CompletionSampler(connection, [], sampling, concurrency)
        batch_size = 1
        if max_unavailable_turns is not None:
            max_unavailable_turns *= concurrency
    else:
        chosen = _settings(named, revision, settings, tools)
        if tokenizer is None and named is None:
            raise ValueError("`tokenizer` is missing: a model that is no checkpoint does not bring its own.")
        tokenizer = _tokenizer(named if tokenizer is None else tokenizer, revision, trust_remote_code)
        if backend == "vllm":
            if named is not None:
                model = _load_vllm(named, revision, dtype, trust_remote_code, sampling.seed, vllm_options or {})
            sampler = VLLMSampler(model, _end_ids(model), sampling, identity)
            batch_size = 256 if batch_size is None else batch_size
        else:
            if named is not None:
                model = _load_transformers(named, revision, dtype, device, trust_remote_code)
            pad = tokenizer.pad_token_id
            pad = tokenizer.eos_token_id if pad is None else pad
            sampler = TransformersSampler(model, 0 if pad is None else pad, sampling, identity)
            batch_size = 16 if batch_size is None else batch_size
    return TokenEngine(tokenizer, sampler, tools, chosen, sampling, batch_size, tool_timeout, max_unavailable_turns)


def _check(
    tools: list[Callable],
    sampling: Any,
    request: Any,
    vllm_options: Any,
    max_unavailable_turns: Any,
) -> None:
    """Raise for arguments that would else be found wrong in the middle of a run."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    if not isinstance(sampling, Sampling):
        raise TypeError(f"`sampling={sampling!r}` is not allowed: it must be a `mempo_trl.engines.Sampling`.")
    for name, value in (("request", request), ("vllm_options", vllm_options)):
        if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
            raise TypeError(f"`{name}={value!r}` is not allowed: it must be a dictionary.")
    limit = max_unavailable_turns
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(
            f"`max_unavailable_turns={limit!r}` is not allowed: it must be a whole number, at least 1, or None."
        )
    for tool in tools:
        try:
            get_json_schema(tool)
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ValueError(f"The tool {tool_name(tool)!r} cannot be described to the model: {error}") from error


def _is_path(name: str) -> bool:
    """Whether this can be a folder only: names on the Hub have at most one slash."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def _settings(model: str | None, revision: str | None, changes: dict[str, Any], tools: list[Callable]) -> AgentSettings:
    own = None if model is None else AgentSettings.load(model, revision)
    known = AgentSettings.__dataclass_fields__
    for name, value in changes.items():
        if name in Sampling.__dataclass_fields__:
            raise TypeError(f"How tokens are drawn is given as `sampling=Sampling({name}={value!r})`.")
        if name not in known:
            raise TypeError(f"There is no argument {name!r}. Settings of an agent are: {', '.join(known)}.")
    if own is not None and own.tools:
        _warn_of_other_tools(own.tools, tools)
    return (own or AgentSettings()).replace(**changes)


def _warn_of_other_tools(trained: list[dict[str, Any]], tools: list[Callable]) -> None:
    """Warn if tools are not those of the training: their schemas are part of the prompt."""
    from transformers.utils import get_json_schema

    before, now = (
        {schema["function"]["name"]: schema["function"] for schema in schemas}
        for schemas in (trained, [get_json_schema(tool) for tool in tools])
    )
    found = []
    for name in {**before, **now}:
        if name not in now:
            found.append(f"{name!r} is missing")
        elif name not in before:
            found.append(f"{name!r} is a name that it does not know")
        elif other := [part for part in ("parameters", "description") if before[name].get(part) != now[name].get(part)]:
            found.append(f"{name!r} differs in its {' and '.join(other)}")
    if found:
        warnings.warn(f"The tools are not those that the agent was trained with: {', '.join(found)}.", stacklevel=4)


def _tokenizer(tokenizer: Any, revision: str | None, trust_remote_code: bool) -> Any:
    if not isinstance(tokenizer, str):
        return tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer, revision=revision, trust_remote_code=trust_remote_code)


def _load_transformers(name: str, revision: str | None, dtype: str, device: str | None, trust_remote_code: bool) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    where: dict[str, Any] = {"device_map": "auto"} if device is None and torch.cuda.is_available() else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        name, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code, **where
    )
    return (model if device is None else model.to(device)).eval()


def _load_vllm(
    name: str, revision: str | None, dtype: str, trust_remote_code: bool, seed: int, options: Mapping[str, Any]
) -> Any:
    try:
        from vllm import LLM
    except ImportError as error:
        raise ImportError("`backend='vllm'` needs the package `vllm`.") from error
    own = {"revision": revision, "dtype": dtype, "trust_remote_code": trust_remote_code, "seed": seed}
    return LLM(model=name, **{**own, "enable_prefix_caching": True, **options})


def _end_ids(llm: Any) -> list[int]:
    own = llm.llm_engine.model_config.try_get_generation_config().get("eos_token_id")
    return [own] if isinstance(own, int) else list(own or [])


def _name(model: Any) -> str:
    config = getattr(model, "config", None)
    return getattr(config, "_name_or_path", None) or type(model).__name__
