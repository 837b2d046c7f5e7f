"""Packed, unrolled, and one sequence at a time give the same numbers."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import byte_tokenizer, tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from mempo_trl import prefix_tree, tree_attention
from mempo_trl.prefix_tree import Branch, BranchScorer, PrefixTree, evaluation_mode, may_be_packed


SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 256,
}
ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "sliding_window": None, "output_router_logits": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "bloom": {"n_layer": 2, "n_head": 4},
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": "auto",
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
        "mamba_expand": 2,
    },
}
# Those whose layers a mask over pairs of tokens decides.
PACKED = {"llama", "qwen2", "qwen3", "mixtral", "gpt2"}


def make_model(name, implementation="sdpa"):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SMALL, **ARCHITECTURES[name]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    for parameter in model.parameters():  # so that contexts matter
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    return model


def one_at_a_time(model, branch, temperature=1.0):
    logits = model(torch.tensor([list(branch.ids)])).logits[0] / temperature
    logps = logits.log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    before = [token - 1 for token in branch.scored]
    return logps[before, [branch.ids[token] for token in branch.scored]], entropies[before]


branches = st.builds(
    lambda ids, a, b: Branch(ids, 1 + a % (len(ids) - 1), max(1 + a % (len(ids) - 1), 1 + b % len(ids))),
    st.lists(st.integers(1, 3), min_size=2, max_size=10),
    st.integers(0, 99),
    st.integers(0, 99),
)
trees = st.lists(st.lists(branches, min_size=1, max_size=6), min_size=1, max_size=3)
LLAMA = make_model("llama")


@given(trees, st.sampled_from([None, 12, 30]), st.booleans(), st.sampled_from([4, 512]))
@settings(max_examples=120, deadline=None)
def test_random_trees(trees, max_tokens, packed, chunk):
    scorer = BranchScorer(0, "cpu", max_tokens=max_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "CHUNK", chunk)  # shorter trees get a dense mask
        got = scorer.unit_logps(LLAMA, trees, packed)
    for tree, logps in zip(trees, got, strict=True):
        for branch, values in zip(tree, logps, strict=True):
            with torch.no_grad():
                torch.testing.assert_close(values, one_at_a_time(LLAMA, branch)[0], atol=1e-5, rtol=1e-4)


@given(st.lists(branches, min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_every_distinct_prefix_is_there_once(tree):
    packed = PrefixTree(tree)
    prefixes = {tuple(branch.ids[:n]) for branch in tree for n in range(1, len(branch.ids) + 1)}
    # Beside them there is a copy for each further token that is scored at a fork.
    forks = {(tuple(b.ids[:n]), b.ids[n]) for b in tree for n in b.scored}
    copies = len(forks) - len({prefix for prefix, _ in forks})
    assert len(packed) == len(prefixes) + copies
    for branch, slots in zip(tree, packed.slots, strict=True):
        assert packed.labels[slots].tolist() == [branch.ids[n] for n in branch.scored]
        for slot, token in zip(slots, branch.scored, strict=True):
            seen = [j for j in range(slot + 1) if slot < packed.ends[j]]
            assert packed.ids[seen].tolist() == list(branch.ids[:token])
            assert packed.positions[seen].tolist() == list(range(token))


def a_rollout(vocabulary=40, turns=4):
    """Memories and baselines of a rollout, as the trainer makes them, in two trees of different sizes."""
    generator = torch.Generator().manual_seed(1)

    def some(count):
        return torch.randint(1, vocabulary, (count,), generator=generator).tolist()

    trees = []
    for count in (turns, 2):
        prompt, target, tree, history = some(9), some(4), [], []
        for _ in range(count):
            memory = some(5)
            tree += [
                Branch(prompt + memory + target, len(prompt + memory), len(prompt + memory) + 3),
                Branch(prompt + history + target, len(prompt + history)),
            ]
            history = history + memory + some(6)
        trees.append(tree)
    return trees


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, "eager") for name in ARCHITECTURES] + [(name, "sdpa") for name in ARCHITECTURES if name != "bloom"],
)
def test_architectures(name, implementation, monkeypatch):
    monkeypatch.setattr(tree_attention, "CHUNK", 16)
    model = make_model(name, implementation)
    scorer = BranchScorer(0, "cpu")
    assert scorer.packs(model) == (name in PACKED)
    trees = a_rollout()
    for packed in {scorer.packs(model), False}:
        got = scorer.unit_logps(model, trees, packed)
        with torch.no_grad():
            for tree, logps in zip(trees, got, strict=True):
                for branch, values in zip(tree, logps, strict=True):
                    torch.testing.assert_close(values, one_at_a_time(model, branch)[0], atol=1e-4, rtol=1e-4)


def test_flex_attention():
    """A block mask instead of a dense one."""
    scorer = BranchScorer(0, "cpu", form="packed")
    trees = a_rollout()
    for got, wanted in zip(
        scorer.unit_logps(make_model("llama", "flex_attention"), trees), scorer.unit_logps(LLAMA, trees), strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_compiled_models(monkeypatch):
    monkeypatch.setattr(tree_attention, "CHUNK", 4)
    compiled = torch.compile(make_model("llama"), backend="aot_eager")
    scorer = BranchScorer(0, "cpu", unwrap=lambda model: model._orig_mod)
    trees = a_rollout()
    got, wanted = scorer.unit_logps(compiled, trees, True), scorer.unit_logps(compiled, trees, False)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "bamba"])
@pytest.mark.parametrize(("max_tokens", "chunk"), [(None, 512), (60, 512), (None, 4)])
def test_gradients(name, max_tokens, chunk, monkeypatch):
    """Log-probabilities, entropies and gradients through TRL's fused head, at a temperature."""
    monkeypatch.setattr(tree_attention, "CHUNK", chunk)
    temperature = 0.7
    plain = make_model(name)
    fused = copy.deepcopy(plain)
    add_fused_lm_head(fused, temperature=temperature, outputs=("log_probs", "entropy"))
    trees = a_rollout()
    wanted = [one_at_a_time(plain, branch, temperature) for tree in trees for branch in tree]
    sum((logps * torch.arange(1, len(logps) + 1) + entropies).sum() for logps, entropies in wanted).backward()
    scorer = BranchScorer(0, "cpu", max_tokens=max_tokens)
    for packed in {scorer.packs(fused), False}:
        fused.zero_grad()
        logps, entropies, zero = scorer.logps_and_entropies(fused, trees, packed)
        got = [pair for tree in zip(logps, entropies, strict=True) for pair in zip(*tree, strict=True)]
        for (a, b), (c, d) in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, c, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(b, d, atol=1e-4, rtol=1e-4)
        (sum((a * torch.arange(1, len(a) + 1) + b).sum() for a, b in got) + zero).backward()
        for (parameter, p), (_, q) in zip(plain.named_parameters(), fused.named_parameters(), strict=True):
            if p.grad is None:
                continue
            error = (p.grad - q.grad).norm() / p.grad.norm().clamp(min=1e-6)
            assert error < 1e-3, (parameter, error)


@pytest.mark.parametrize("packed", [True, False])
def test_adapters_around_a_model_with_absolute_positions(packed):
    """The wrapper's signature does not tell what the model takes."""
    from peft import LoraConfig, get_peft_model

    model = make_model("gpt2")
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    trees = a_rollout()
    scorer = BranchScorer(0, "cpu", unwrap=lambda wrapped: wrapped.get_base_model())
    for tree, logps in zip(trees, scorer.unit_logps(adapted, trees, packed), strict=True):
        for branch, values in zip(tree, logps, strict=True):
            with torch.no_grad():
                torch.testing.assert_close(values, one_at_a_time(model, branch)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("packed", [True, False])
def test_small_trees_share_a_forward_and_large_ones_do_not(packed, monkeypatch):
    monkeypatch.setattr(prefix_tree, "_ENOUGH_TOKENS", 800)
    model = make_model("llama")
    sizes = []
    model.register_forward_pre_hook(lambda m, args, kwargs: sizes.append(kwargs["input_ids"].shape), with_kwargs=True)
    trees = a_rollout() * 8
    alone = [BranchScorer(0, "cpu").unit_logps(model, [tree], packed)[0] for tree in trees]
    sizes.clear()
    torch.testing.assert_close(BranchScorer(0, "cpu").unit_logps(model, trees, packed), alone, atol=1e-5, rtol=1e-5)
    assert 1 < len(sizes) < len(trees)
    assert all(rows * tokens <= 800 for rows, tokens in sizes)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_two_temperatures_in_one_forward(packed, temperature):
    """The same tokens after the same tokens, once at the head's temperature and once at 1."""
    model = make_model("llama")
    plain = copy.deepcopy(model)
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    scorer = BranchScorer(0, "cpu", temperature=temperature)
    assert scorer.mixes_temperatures(model)
    tree = [branch for branch in a_rollout()[0] for _ in range(2)]
    tree = [dataclasses.replace(branch, unit_temperature=bool(n % 2)) for n, branch in enumerate(tree)]
    with torch.no_grad():
        logps = scorer.logps_and_entropies(model, [tree], packed)[0][0]
        for branch, values in zip(tree, logps, strict=True):
            wanted = one_at_a_time(plain, branch, 1.0 if branch.unit_temperature else temperature)[0]
            torch.testing.assert_close(values, wanted, atol=1e-4, rtol=1e-4)
    assert not model.model._forward_hooks


def test_heads_that_are_not_linear_do_not_mix_temperatures():
    model = make_model("llama")
    model.config.final_logit_softcapping = 30.0
    assert not BranchScorer(0, "cpu", temperature=0.5).mixes_temperatures(model)
    assert BranchScorer(0, "cpu").mixes_temperatures(model)
    model = make_model("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(40))
    assert not BranchScorer(0, "cpu", temperature=0.5).mixes_temperatures(model)


def test_what_a_configuration_tells():
    tokenizer = byte_tokenizer()
    model = tiny_llama(tokenizer)
    assert may_be_packed(model)
    model.config._attn_implementation = "flash_attention_2"
    assert not may_be_packed(model)
    with pytest.raises(ValueError, match="Unknown `form` 'dense'"):
        BranchScorer(0, "cpu", form="dense")


def test_the_form_can_be_forced():
    assert BranchScorer(0, "cpu", form="packed").packs(None)
    assert not BranchScorer(0, "cpu", form="unrolled").packs(LLAMA)


def test_a_budget_bounds_every_forward():
    sizes = []
    model = make_model("llama")
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    trees = a_rollout()
    longest = max(len(branch.ids) for tree in trees for branch in tree)
    for packed in (True, False):
        whole = BranchScorer(0, "cpu").unit_logps(model, trees, packed)
        sizes.clear()
        parts = BranchScorer(0, "cpu", max_tokens=longest).unit_logps(model, trees, packed)
        assert len(sizes) > 2
        assert max(sizes) <= longest
        torch.testing.assert_close(whole, parts)


@pytest.mark.parametrize("packed", [True, False])
def test_processes_make_as_many_forwards(packed):
    """Where another process has more to do, this one makes up for it, and nothing changes."""
    model = make_model("llama")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    calls = []
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    trees = a_rollout()
    alone = BranchScorer(0, "cpu").unit_logps(model, trees, packed)
    calls.clear()
    behind = BranchScorer(0, "cpu", max_over_processes=lambda count: max(count, 5))
    torch.testing.assert_close(behind.unit_logps(model, trees, packed), alone)
    assert len(calls) == 5
    calls.clear()
    assert behind.unit_logps(model, [[], []], packed) == [[], []]
    assert len(calls) == 5
    logps, _, zero = behind.logps_and_entropies(model, [[]], packed)
    assert logps == [[]]
    zero.backward()  # a process without any rollout has a backward all the same
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_every_module_gets_its_own_mode_back():
    model = make_model("llama").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    with pytest.raises(RuntimeError), evaluation_mode(model):
        assert not any(module.training for module in model.modules())
        raise RuntimeError
    assert [module.training for module in model.modules()] == modes
