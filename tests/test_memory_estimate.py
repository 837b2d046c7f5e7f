"""The memory estimate against tensors that really exist."""

import contextlib

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config

from mempo_trl.memory_estimate import (
    GIB,
    activation_memory,
    layer_activations,
    model_shape,
    training_memory,
)


def small(layers: int = 2, **kwargs) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            **kwargs,
        }
    )


def size(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_those_of_a_real_step(dtype):
    model = LlamaForCausalLM(small()).to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(16)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    estimate = training_memory(model_shape(model.config), engine="ddp", processes=1, tokens=16, dtype=dtype)
    assert estimate.weights == size(model.parameters())
    assert estimate.gradients == size(parameter.grad for parameter in model.parameters())
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim() > 0]
    assert estimate.optimizer == size(moments)


def saved(layers: int, tokens: int, weights: torch.dtype, autocast: bool, checkpointing: bool) -> int:
    """Bytes that the backbone's forward keeps for its backward, weights apart."""
    model = LlamaForCausalLM(small(layers, attn_implementation="sdpa")).to(weights).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {parameter.shape for parameter in model.parameters()} | {
        parameter.T.shape for parameter in model.parameters() if parameter.dim() == 2
    }
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor):
        # Casts of weights are not activations: their shapes do not depend on the tokens.
        if tensor.untyped_storage().data_ptr() not in own and tensor.shape not in shapes:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
        out = model.model(input_ids=torch.arange(tokens)[None] % 256, use_cache=False)
    assert out.last_hidden_state.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("weights", "autocast"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)]
)
def test_activations_are_those_of_a_real_layer(weights, autocast):
    tokens = 300  # none of the model's sizes
    measured = saved(4, tokens, weights, autocast, False) - saved(2, tokens, weights, autocast, False)
    bf16, casts = autocast, weights == torch.float32
    estimated = 2 * tokens * layer_activations(model_shape(small()), bf16=bf16, casts=casts)
    assert 0.85 < estimated / measured < 1.15


def test_checkpointed_layers_keep_their_input():
    tokens = 300
    measured = saved(6, tokens, torch.float32, False, True) - saved(2, tokens, torch.float32, False, True)
    four = [
        activation_memory(model_shape(small(layers)), tokens, bf16=False, casts=True, gradient_checkpointing=True)
        for layers in (6, 2)
    ]
    assert measured == pytest.approx(four[0] - four[1], rel=0.05)


def test_zero_divides_what_its_paper_says():
    # arXiv:1910.02054, figure 1: 7.5 billion parameters, 64 GPUs, K = 12, in 10^9 bytes.
    shape = model_shape(small())
    shape = shape.__class__(**{**vars(shape), "parameters": 7_500_000_000})
    bucket = 10**9  # of DeepSpeed, not in the paper

    def states(engine, processes):
        return (training_memory(shape, engine=engine, processes=processes, tokens=1).states - bucket) / 1e9

    assert states("zero2", 1) == pytest.approx(120)
    assert states("zero2", 64) == pytest.approx(16.6, abs=0.05)
    assert states("zero3", 64) == pytest.approx(1.9, abs=0.05)


def test_shape_of_a_published_model():
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    assert model_shape(config).parameters == 494_032_768


def test_adapters_are_counted_as_peft_does():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(LlamaForCausalLM(small()), peft.LoraConfig(r=8, target_modules="all-linear"))
    shape = model_shape(small())
    assert 8 * shape.linear_width == model.get_nb_trainable_parameters()[0]
    estimate = training_memory(shape, engine="ddp", processes=1, tokens=1, lora_rank=8, reference=True)
    assert estimate.weights == size(model.parameters())
    assert estimate.reference == 0


def test_phases():
    shape = model_shape(small())
    whole = 2 * shape.parameters
    zero3 = {"engine": "zero3", "processes": 8, "tokens": 1}
    assert training_memory(shape, **zero3).generation == whole
    assert training_memory(shape, **zero3, gather_for_generation=False).generation < whole
    vllm = {"vllm_gpu_memory_utilization": 0.5, "gpu_memory": 80 * GIB}
    awake = training_memory(shape, **zero3, **vllm)
    asleep = training_memory(shape, **zero3, **vllm, vllm_enable_sleep_mode=True)
    assert awake.vllm == asleep.vllm == 40 * GIB
    assert awake.peak >= asleep.peak == asleep.states + asleep.generation + asleep.vllm
    assert training_memory(shape, **zero3, **vllm, lora_rank=8).generation == whole
    assert training_memory(shape, **zero3, reference=True).reference == whole // 8
    offloaded = training_memory(shape, **zero3, offload=True)
    kept = training_memory(shape, **zero3)
    assert offloaded.weights == offloaded.optimizer == 0
    assert offloaded.host == pytest.approx(16 * shape.parameters / 8, abs=3)
    assert offloaded.peak < kept.peak


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "zero1"}, "Unknown `engine`"),
        ({"processes": 0}, "at least 1"),
        ({"dtype": "float16"}, "Unknown `dtype`"),
        ({"offload": True}, "`offload` is DeepSpeed's"),
        ({"vllm_gpu_memory_utilization": 0.3}, "give both"),
        ({"vllm_gpu_memory_utilization": 0.3, "gpu_memory": 1000}, "raise `vllm_gpu_memory_utilization`"),
    ],
)
def test_what_does_not_go_together_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        training_memory(model_shape(small()), **{"engine": "ddp", "processes": 8, "tokens": 1, **change})
