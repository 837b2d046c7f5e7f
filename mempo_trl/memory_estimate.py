"""How much memory training needs on each GPU: an estimate, from a model's configuration."""

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig


Engine = Literal["ddp", "zero2", "zero3", "fsdp2"]
GIB = 2**30

# DeepSpeed's defaults, in elements: `reduce_bucket_size` and `sub_group_size`.
_REDUCE_BUCKET = 500_000_000
_SUB_GROUP = 1_000_000_000
# TRL's fused head works on tiles of so many tokens and so many words of the vocabulary.
_TILE_TOKENS, _TILE_VOCABULARY = 4096, 32768


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that its memory depends on.

    Attributes:
        parameters: of the whole model, tied ones counted once.
        layer_parameters: of the largest decoder layer.
        head_parameters: of the language model head.
        linear_width: inputs and outputs of all linear layers but the head, added up: adapters of rank r on all of them
            have `r * linear_width` parameters.
        layers: decoder layers.
        hidden: width of the residual stream.
        intermediate: width inside of the gated MLP.
        queries: width of all query heads together.
        keys: width of all key heads together; the values' is the same.
    """

    parameters: int
    layer_parameters: int
    head_parameters: int
    linear_width: int
    layers: int
    hidden: int
    intermediate: int
    queries: int
    keys: int


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Measure a model without making its weights.

    Args:
        config: of a causal language model in Llama's shape (Llama, Qwen2, Qwen3, Mistral, SmolLM2, …): RMSNorm, rotary
            positions, a gated MLP.

    Returns:
        Its sizes, counted on the meta device.

    Raises:
        ValueError: if the configuration lacks a size that such a model has.
    """
    text = config.get_text_config()
    missing = [
        name
        for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
        if not isinstance(getattr(text, name, None), int)
    ]
    if missing:
        raise ValueError(f"The `config` of a {text.model_type!r} has no {', '.join(missing)}: it cannot be estimated.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    layers = [
        module
        for block in model.modules()
        if isinstance(block, torch.nn.ModuleList) and len(block) == text.num_hidden_layers
        for module in block
    ]
    heads = text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelShape(
        parameters=_count(model),
        layer_parameters=max(map(_count, layers)),
        head_parameters=_count(head),
        linear_width=sum(
            module.in_features + module.out_features
            for module in model.modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        ),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        queries=heads * head_width,
        keys=(getattr(text, "num_key_value_heads", None) or heads) * head_width,
    )


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each GPU.

    Attributes:
        weights: those that are trained and those that are frozen, as this GPU holds them between two steps.
        gradients: with the buffers that they are exchanged through.
        optimizer: Adam's two moments, and single-precision copies of the weights where the engine keeps them.
        reference: weights of the reference model.
        activations: what one forward keeps for its backward, and the head's buffers.
        working: copies of weights that exist during forward and backward: layers gathered, or cast to half precision.
        generation: whole weights gathered while rollouts are generated, or sent to vLLM.
        step: single-precision gradients that DeepSpeed makes for the optimizer's step.
        vllm: what a colocated vLLM takes.
        vllm_sleeps: whether it gives that back outside of generation.
        host: in the memory of the machine, for this GPU: what is offloaded.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    working: int
    generation: int
    step: int
    vllm: int
    vllm_sleeps: bool
    host: int

    @property
    def states(self) -> int:
        """What is there all the time: weights, gradients, optimizer, reference."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def peak(self) -> int:
        """The largest of generation, forward with backward, and the optimizer's step, which do not overlap."""
        beside = 0 if self.vllm_sleeps else self.vllm
        return self.states + max(
            self.activations + self.working + beside, self.generation + self.vllm, self.step + beside
        )


def training_memory(
    shape: ModelShape,
    *,
    engine: Engine,
    processes: int,
    tokens: int,
    bf16: bool = True,
    dtype: Literal["float32", "bfloat16"] = "float32",
    lora_rank: int | None = None,
    offload: bool = False,
    gradient_checkpointing: bool = True,
    reference: bool = False,
    gather_for_generation: bool = True,
    vllm_gpu_memory_utilization: float | None = None,
    vllm_tensor_parallel_size: int = 1,
    vllm_enable_sleep_mode: bool = False,
    gpu_memory: int | None = None,
) -> MemoryEstimate:
    """Estimate the memory that training with AdamW takes on each GPU.

    Bytes per parameter, where N is `processes`, as (weights, gradients, optimizer):

    - `"ddp"`: (4, 4, 8), the optimizer working on the weights themselves; (2, 2, 4) with `dtype="bfloat16"`, which has
      no single-precision copy of the weights anywhere. With more than one process the gradients count twice, for
      DistributedDataParallel's buckets (`gradient_as_bucket_view=False`). `bf16` casts single-precision weights in the
      forward: 2 more.
    - `"zero2"`: (2, 2/N, 12/N), and `"zero3"`: (2/N, 2/N, 12/N): weights and gradients in bfloat16; a copy of the
      weights and two moments in single precision: K = 12 of the ZeRO paper (arXiv:1910.02054, section 3.1, figure 1).
      4/N more exist during the optimizer's step, and 2 · 5e8 bytes always, DeepSpeed's `reduce_bucket_size`. Without
      `bf16` weights and gradients take 4.
    - `"fsdp2"`: (4/N, 4/N, 8/N): accelerate casts what is trained to single precision. Layers are gathered in bfloat16.

    With adapters, this holds for them, and every other weight takes 2 bytes (4 with `dtype="float32"` in `"ddp"` and
    `"fsdp2"`), divided by N where the engine divides weights.

    Activations are counted as in Korthikanti et al. (arXiv:2205.05198, section 4.1), tensor by tensor, for a layer with
    RMSNorm, grouped key heads, attention that stores no scores (sdpa, flash) and a gated MLP. Per token and layer, in
    bytes, with h = hidden, i = intermediate, q = queries, k = keys:

        bf16 weights:                16h + 4(q + k) + 8i
        float32 weights, bf16 casts: 26h + 4(q + k) + 8i
        float32:                     24h + 8(q + k) + 16i

    With `gradient_checkpointing`, all layers keep their input alone (2h, or 4h in single precision) and one layer at a
    time all of it (ibid., section 5). Logits of shape (tokens, vocabulary) are never made: TRL's fused head has one
    tile of them, single-precision gradients of its input and, unless frozen, of its weights.

    It is a lower bound in that it leaves out the CUDA context and NCCL (1 to 2 GiB), fragments, the temporary tensors
    of a backward, the activations of adapters, and the cache of keys and values when transformers generates. It counts
    half-precision Adam moments as they are, and no quantization.

    Args:
        shape: of the model, from [`model_shape`].
        engine: what spreads the training over the GPUs; with one process, `"ddp"` is one GPU alone.
        processes: GPUs together.
        tokens: in one backward on one GPU, padding included: `per_device_train_batch_size` times the longest rollout
            with its prompt. A windowed policy (`context_turns`) has the tokens of its packed turns instead;
            `max_tokens_per_forward` does not lower it, since all forwards of a micro-batch come before its backward.
        bf16: mixed precision, TRL's default.
        dtype: precision that the weights are loaded in, TRL's `dtype` of `model_init_kwargs`. DeepSpeed overrides it,
            FSDP2 does for what is trained.
        lora_rank: rank of adapters on all linear layers but the head; `None` trains all weights.
        offload: gradients and optimizer, and with `"zero3"` weights, are in the memory of the machine.
        gradient_checkpointing: whether layers are computed again in the backward, TRL's default.
        reference: whether there is a reference model (`beta` above 0). Adapters need none: they are switched off.
        gather_for_generation: TRL's `ds3_gather_for_generation`: without vLLM, ZeRO-3 gathers the whole model on every
            GPU while it generates.
        vllm_gpu_memory_utilization: share of the GPU for a colocated vLLM; `None` for none, or a server.
        vllm_tensor_parallel_size: GPUs that one vLLM spreads over.
        vllm_enable_sleep_mode: whether vLLM gives its memory back while there is no generation.
        gpu_memory: bytes of a GPU, which `vllm_gpu_memory_utilization` is a share of.

    Returns:
        Bytes on each GPU.

    Raises:
        ValueError: if the arguments do not go together, or vLLM's share does not even hold its weights.
    """
    if engine not in ("ddp", "zero2", "zero3", "fsdp2"):
        raise ValueError(f"Unknown `engine` {engine!r}: choose 'ddp', 'zero2', 'zero3' or 'fsdp2'.")
    if processes < 1 or tokens < 1 or (lora_rank is not None and lora_rank < 1) or vllm_tensor_parallel_size < 1:
        raise ValueError(
            "`processes`, `tokens`, `lora_rank` and `vllm_tensor_parallel_size` must be whole numbers, at least 1."
        )
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"Unknown `dtype` {dtype!r}: choose 'float32' or 'bfloat16'.")
    deepspeed = engine in ("zero2", "zero3")
    if offload and not deepspeed:
        raise ValueError(f"`offload` is DeepSpeed's: with `engine={engine!r}` set it to False.")
    if dtype == "bfloat16" and not bf16 and engine != "ddp":
        raise ValueError("`dtype='bfloat16'` without `bf16` is estimated for `engine='ddp'` alone.")

    half = 2 if bf16 else 4
    loaded = 2 if dtype == "bfloat16" else 4
    base = half if deepspeed else loaded
    shards = processes if engine in ("zero3", "fsdp2") else 1
    trained = shape.parameters if lora_rank is None else lora_rank * shape.linear_width
    frozen = 0 if lora_rank is None else shape.parameters
    if deepspeed:
        weights = half * trained / shards
        gradients = half * trained / processes
        optimizer = 12 * trained / processes
    else:
        # PEFT loads adapters in single precision whatever the model's, FSDP2 trains in it.
        width = loaded if engine == "ddp" and lora_rank is None else 4
        weights = width * trained / shards
        gradients = width * trained / shards * (2 if engine == "ddp" and processes > 1 else 1)
        optimizer = 2 * width * trained / shards
    weights += base * frozen / shards
    has_reference = reference and lora_rank is None

    working: float = 0
    if shards > 1:
        # The layer that computes and the next one, which is fetched meanwhile.
        working = half * max(2 * shape.layer_parameters, shape.head_parameters)
    elif engine == "ddp" and bf16 and loaded == 4:
        # autocast keeps the casts of what is trained until the forward ends, those of other weights only while used.
        working = half * (shape.parameters if lora_rank is None else trained + shape.layer_parameters)

    generation: float = 0
    if engine == "zero3" and processes > 1:
        vllm_gathers = lora_rank is not None  # to merge the adapters
        whole = vllm_gathers if vllm_gpu_memory_utilization is not None else gather_for_generation
        generation = half * (shape.parameters if whole else max(shape.layer_parameters, shape.head_parameters))

    step: float = 0
    if deepspeed and not offload:
        share = trained / processes
        step = 4 * (share if engine == "zero2" else min(share, _SUB_GROUP))
    host: float = 0
    if offload:
        host = gradients + optimizer
        gradients = optimizer = 0
        if engine == "zero3":
            host += weights
            weights = 0
            working = half * max(2 * shape.layer_parameters, shape.head_parameters)
    if deepspeed:
        gradients += half * _REDUCE_BUCKET

    vllm: float = 0
    if vllm_gpu_memory_utilization is not None:
        if gpu_memory is None or not 0 < vllm_gpu_memory_utilization <= 1:
            raise ValueError("`vllm_gpu_memory_utilization` is a share, 0 < share <= 1, of `gpu_memory`: give both.")
        vllm = vllm_gpu_memory_utilization * gpu_memory
        needed = 2 * shape.parameters / vllm_tensor_parallel_size
        if vllm <= needed:
            raise ValueError(
                f"vLLM's weights take {needed / GIB:.1f} GiB, but its share is {vllm / GIB:.1f} GiB: raise "
                "`vllm_gpu_memory_utilization` or `vllm_tensor_parallel_size`, or use a server."
            )
    return MemoryEstimate(
        weights=int(weights),
        gradients=int(gradients),
        optimizer=int(optimizer),
        reference=int(base * shape.parameters / shards) if has_reference else 0,
        activations=activation_memory(
            shape,
            tokens,
            bf16=bf16,
            casts=engine == "ddp" and loaded == 4,
            gradient_checkpointing=gradient_checkpointing,
            head_is_trained=lora_rank is None,
        ),
        working=int(working),
        generation=int(generation),
        step=int(step),
        vllm=int(vllm),
        vllm_sleeps=vllm_enable_sleep_mode,
        host=int(host),
    )


def activation_memory(
    shape: ModelShape,
    tokens: int,
    *,
    bf16: bool,
    casts: bool,
    gradient_checkpointing: bool,
    head_is_trained: bool = True,
) -> int:
    """Bytes that a forward keeps for its backward, with the head's buffers; the formulas are [`training_memory`]'s.

    Args:
        shape: of the model.
        tokens: in the forward.
        bf16: whether matrices are multiplied in half precision.
        casts: whether weights are in single precision, and `bf16` casts them (autocast).
        gradient_checkpointing: whether layers are computed again in the backward.
        head_is_trained: whether the head needs a gradient.
    """
    half = 2 if bf16 else 4
    stream = 2 if bf16 and not casts else 4
    layer = layer_activations(shape, bf16=bf16, casts=casts)
    layers = shape.layers * stream * shape.hidden + layer if gradient_checkpointing else shape.layers * layer
    # The last norm, the head's input and its gradient.
    last = (4 + half + half + 4) * shape.hidden
    vocabulary = shape.head_parameters // shape.hidden
    tile = half * min(tokens, _TILE_TOKENS) * min(vocabulary, _TILE_VOCABULARY)
    head = 4 * shape.head_parameters if head_is_trained else 0
    return tokens * (layers + last) + tile + head


def layer_activations(shape: ModelShape, *, bf16: bool, casts: bool) -> int:
    """Bytes per token that a decoder layer keeps for its backward; arguments as in [`activation_memory`]."""
    half = 2 if bf16 else 4
    if not bf16:
        # Each norm: its input, the normalized input, its output.
        norms = 2 * 3 * 4
    elif casts:
        # Each norm: input and normalized input in single precision. Its output is cast for each matrix it goes into.
        norms = 2 * (4 + 4) + (3 + 2) * 2
    else:
        # Each norm: input in single precision, normalized input and output in half.
        norms = 2 * (4 + 2 + 2)
    attention = half * (2 * shape.queries + 2 * shape.keys)  # queries and output, keys and values
    mlp = half * 4 * shape.intermediate  # gate, its activation, the other branch, their product
    return norms * shape.hidden + attention + mlp
