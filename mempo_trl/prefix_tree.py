"""Log-probabilities of many token sequences that share prefixes, for about the price of their distinct tokens.

The memories of a rollout are judged after contexts that all begin with the same prompt and grow out of one another, and
with a window each turn is conditioned on a piece of the same history. Merged at their common prefixes, such sequences
form a tree. In preorder, with `end[j]` one past the last token that follows token j on any path, token i sees

    j  iff  j <= i < end[j],

so one forward over the packed tree, with that mask and explicit positions, gives what one forward each gives. With
sdpa the mask of a large tree is a `TreeMask`, which skips what no token sees; flex_attention has a block mask for that.
Models whose layers cannot be told what to see (sliding windows, linear attention, state spaces, flash attention) get
the unrolled form: every sequence a row of a padded batch.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.utils import add_fused_lm_head

from . import tree_attention
from .tree_attention import TreeMask


logger = logging.getLogger(__name__)

Form = Literal["auto", "packed", "unrolled"]

# Attention implementations that take a mask over pairs of tokens.
_MASKED_ATTENTION = ("sdpa", "eager", "flex_attention")
_IGNORED = -100  # label of tokens that nothing is scored at
# Without gradients nothing needs to be in one forward, so trees share one only until it keeps the machine busy.
_ENOUGH_TOKENS = 4096


@dataclass(frozen=True)
class Branch:
    """A sequence, of which a part is scored.

    Attributes:
        ids: token ids, from the beginning of the context to the end of the scored part.
        start: index of the first scored token, at least 1.
        end: one past the last scored token; `None` for all.
        unit_temperature: whether TRL's fused head is to score it at temperature 1, whatever its own temperature.
    """

    ids: Sequence[int]
    start: int
    end: int | None = None
    unit_temperature: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def scored(self) -> range:
        """Indices of the scored tokens."""
        return range(self.start, len(self.ids) if self.end is None else self.end)


_Label = tuple[int, bool]  # a token, and whether it is scored at temperature 1


@dataclass
class _Node:
    """A run of tokens without a fork. `labels[n]` are what is scored right after token n, in order of first use."""

    ids: list[int]
    position: int
    children: dict[int, "_Node"] = field(default_factory=dict)
    labels: dict[int, list[_Label]] = field(default_factory=dict)

    def split(self, at: int) -> None:
        """Keep the first `at` tokens; the others become the only child."""
        rest = _Node(self.ids[at:], self.position + at, self.children)
        self.ids, self.children = self.ids[:at], {self.ids[at]: rest}


class PrefixTree:
    """Branches merged at their common prefixes, as flat arrays in preorder.

    A position predicts one token. Where branches fork, every further token that is scored there gets a copy of the
    token before it: a leaf that sees what the original sees, and that nothing sees.

    Attributes:
        ids, positions: token ids and their positions, shape (tokens,).
        ends: one past the last token that sees a token, shape (tokens,).
        labels: the token scored at each position, or −100, shape (tokens,).
        units: whether it is scored at temperature 1, shape (tokens,).
        slots: for each branch the positions at which its scored tokens are predicted, in order.
    """

    def __init__(self, branches: Sequence[Branch]):
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._ends: list[int] = []
        self._labels: list[int] = []
        self._units: list[bool] = []
        root = _Node([], 0)
        for branch in branches:
            _insert(root, branch.ids)
        for branch in branches:
            for node, index, scored in _steps(root, branch):
                labels = node.labels.setdefault(index, [])
                if scored not in labels:
                    labels.append(scored)
        places: dict[tuple[int, int, _Label], int] = {}
        self._emit(root, places)
        self.slots = [[places[id(node), index, label] for node, index, label in _steps(root, b)] for b in branches]
        self.ids = torch.tensor(self._ids, dtype=torch.long)
        self.positions = torch.tensor(self._positions, dtype=torch.long)
        self.ends = torch.tensor(self._ends, dtype=torch.long)
        self.labels = torch.tensor(self._labels, dtype=torch.long)
        self.units = torch.tensor(self._units, dtype=torch.bool)

    def __len__(self) -> int:
        return len(self._ids)

    def _emit(self, node: _Node, places: dict[tuple[int, int, _Label], int]) -> None:
        first = len(self._ids)
        for index, token in enumerate(node.ids):
            self._add(token, node.position + index, node.labels.get(index, [])[:1])
            if index in node.labels:
                places[id(node), index, node.labels[index][0]] = first + index
        for child in node.children.values():
            self._emit(child, places)
        for index in reversed(range(len(node.ids))):
            # Copies stand behind everything that sees the original, inside of what sees the token before it.
            self._ends[first + index] = len(self._ids)
            for label in node.labels.get(index, [])[1:]:
                places[id(node), index, label] = len(self._ids)
                self._add(node.ids[index], node.position + index, [label])

    def _add(self, token: int, position: int, labels: list[_Label]) -> None:
        label, unit = labels[0] if labels else (_IGNORED, False)
        self._ids.append(token)
        self._positions.append(position)
        self._labels.append(label)
        self._units.append(unit)
        self._ends.append(len(self._ids))


def _insert(root: _Node, ids: Sequence[int]) -> None:
    node, at = root, 0
    while at < len(ids):
        child = node.children.get(ids[at])
        if child is None:
            node.children[ids[at]] = _Node(list(ids[at:]), at)
            return
        shared = _common(child.ids, ids, at)
        if shared < len(child.ids):
            child.split(shared)
        node, at = child, at + shared


def _common(ids: list[int], other: Sequence[int], offset: int) -> int:
    """Length of the common prefix of `ids` and `other[offset:]`."""
    most = min(len(ids), len(other) - offset)
    if ids[:most] == list(other[offset : offset + most]):
        return most
    return next(n for n in range(most) if ids[n] != other[offset + n])


def _steps(root: _Node, branch: Branch) -> Iterator[tuple[_Node, int, _Label]]:
    """For each scored token of a branch: the node and the index in it of the token before, and what is scored."""
    node, at = root, 0
    wanted = branch.scored
    while at < len(branch.ids):
        node = node.children[branch.ids[at]]
        for predicted in range(max(wanted.start, at + 1), min(wanted.stop, at + len(node.ids) + 1)):
            yield node, predicted - 1 - at, (branch.ids[predicted], branch.unit_temperature)
        at += len(node.ids)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout and the like off in the body, and give every module its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _head_sees(core: Any, scored: torch.Tensor, scale: torch.Tensor) -> Iterator[None]:
    """Give the head of a model the hidden states of scored positions alone, as one row, times a factor each.

    TRL's fused head skips the others itself on GPUs that run Triton, but on no other device.

    Args:
        core: a causal language model (not wrapped).
        scored: shape (rows, tokens).
        scale: shape (scored positions,).
    """

    def select(module, args, output):
        states = output.last_hidden_state
        chosen = states[scored.to(states.device)]
        if bool((scale != 1).any()):
            chosen = (chosen.float() * scale.unsqueeze(-1).to(states.device)).to(states.dtype)
        output.last_hidden_state = chosen.unsqueeze(0)
        return output

    handle = core.base_model.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _unit_head(core: Any) -> Iterator[None]:
    """Give a model a fused head of temperature 1 in place of its own.

    Its own forward would do as well, were it not for ZeRO-3: there a head that is called as a module in one forward,
    and whose weight is read by TRL's fused head in the next, is found empty in the backward.

    Args:
        core: a causal language model (not wrapped).
    """
    forward = vars(core).get("forward")
    head = core.get_output_embeddings()
    single = head.weight.dtype == torch.float32 != core.dtype  # as TRL's `cast_lm_head_to_fp32` makes it
    add_fused_lm_head(core, cast_lm_head_to_fp32=single)
    try:
        yield
    finally:
        if forward is None:
            del core.forward
        else:
            core.forward = forward


def may_be_packed(model: Any) -> bool:
    """Whether a model's configuration lets a mask decide what each token sees.

    What the configuration cannot tell is tried by `BranchScorer` on the model itself.

    Args:
        model: a causal language model (not wrapped).
    """
    config = model.config.get_text_config()
    if getattr(config, "_attn_implementation", None) not in _MASKED_ATTENTION:
        return False
    layers = getattr(config, "layer_types", None)
    if layers is not None:
        return all(layer == "full_attention" for layer in layers)
    return not (getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None))


class BranchScorer:
    """Scores branches with a model, packed where the model allows it.

    Args:
        pad_token_id: fills up rows; nothing sees it.
        device: where the model takes its inputs.
        unwrap: gives the causal language model inside of a wrapped one (DDP, DeepSpeed).
        form: `"packed"`, `"unrolled"`, or `"auto"`, packed if the model's configuration allows it and a small tree
            gives the numbers of the unrolled form.
        max_tokens: tokens in one forward, padding included; a tree that would exceed it is split by branches. `None`
            for no limit. A single branch is never split.
        max_over_processes: the largest of an integer over all processes, which must make equally many forwards.
        temperature: what TRL's fused head divides logits by.
    """

    def __init__(
        self,
        pad_token_id: int,
        device: torch.device | str,
        unwrap: Callable[[Any], Any] = lambda model: model,
        form: Form = "auto",
        max_tokens: int | None = None,
        max_over_processes: Callable[[int], int] = int,
        temperature: float = 1.0,
    ):
        if form not in ("auto", "packed", "unrolled"):
            raise ValueError(f"Unknown `form` {form!r}: choose 'auto', 'packed' or 'unrolled'.")
        self.pad_token_id = pad_token_id
        self.device = torch.device(device)
        self.unwrap = unwrap
        self.form = form
        self.max_tokens = max_tokens
        self.max_over_processes = max_over_processes
        self.temperature = temperature
        self._packs: dict[int, bool] = {}
        self._cores: dict[int, Any] = {}  # unwrapping takes a walk over all modules

    def packs(self, model: Any) -> bool:
        """Whether this model's branches are packed."""
        if self.form != "auto":
            return self.form == "packed"
        core = self._core(model)
        if id(core) not in self._packs:
            self._packs[id(core)] = may_be_packed(core) and self._packing_agrees(model, core)
        return self._packs[id(core)]

    def _core(self, model: Any) -> Any:
        if id(model) not in self._cores:
            self._cores[id(model)] = self.unwrap(model)
        return self._cores[id(model)]

    def _packing_agrees(self, model: Any, core: Any) -> bool:
        """Compare both forms on a small tree: some models ignore positions, or a mask over pairs."""
        words = torch.arange(5, 25).remainder(core.config.get_text_config().vocab_size).tolist()
        trees = [[Branch([*words[:8], *words[n : n + 4]], 8) for n in (8, 12, 16)]]
        with evaluation_mode(model):
            unrolled = torch.cat(self.unit_logps(model, trees, packed=False)[0])
            try:
                packed = torch.cat(self.unit_logps(model, trees, packed=True)[0])
            except Exception as error:  # ALiBi models, for one, compute their bias from a mask of two dimensions
                logger.debug("The model refuses a packed tree: %s", error)
                return False
        exact = core.dtype == torch.float32 and not torch.is_autocast_enabled(self.device.type)
        tolerance = 1e-3 if exact else 0.1
        return bool(torch.allclose(packed, unrolled, atol=tolerance, rtol=tolerance))

    def mixes_temperatures(self, model: Any) -> bool:
        """Whether branches at temperature 1 and at that of TRL's fused head can be scored by the same forward.

        The head sees hidden states, and multiplying them by the temperature undoes its division, if it is linear.
        """
        core = self._core(model)
        if self.temperature == 1:
            return True
        linear = getattr(core.get_output_embeddings(), "bias", None) is None
        return linear and getattr(core.config.get_text_config(), "final_logit_softcapping", None) is None

    def logps_and_entropies(
        self,
        model: Any,
        trees: Sequence[Sequence[Branch]],
        packed: bool | None = None,
    ) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]], torch.Tensor]:
        """Log-probabilities and entropies of the scored tokens, at the temperature of TRL's fused head, with gradients.

        Args:
            model: a model with TRL's fused head (`trl.trainer.utils.add_fused_lm_head`), wrapped or not.
            trees: groups of branches. Prefixes are shared within a group. Branches of `unit_temperature` need a head
                that `mixes_temperatures`.
            packed: overrules `form`.

        Returns:
            For each group, for each branch, tensors of shape (scored tokens,), log-probabilities and entropies; and a
            zero that depends on every forward made, to be added to what is differentiated, so that each process has the
            same backward.
        """
        results, zero = self._score(model, trees, packed, self.temperature)
        return [[b[0] for b in tree] for tree in results], [[b[1] for b in tree] for tree in results], zero

    @torch.no_grad()
    def unit_logps(
        self, model: Any, trees: Sequence[Sequence[Branch]], packed: bool | None = None
    ) -> list[list[torch.Tensor]]:
        """Log-probabilities of the scored tokens, at temperature 1, without gradients.

        Args:
            model: a causal language model, wrapped or not.
            trees: groups of branches. Prefixes are shared within a group.
            packed: overrules `form`.

        Returns:
            For each group, for each branch, a float32 tensor of shape (scored tokens,).
        """
        with _unit_head(self._core(model)):
            results, _ = self._score(model, trees, packed, 1.0)
        return [[b[0].float() for b in tree] for tree in results]

    def _score(
        self, model: Any, trees: Sequence[Sequence[Branch]], packed: bool | None, temperature: float
    ) -> tuple[list[list[Any]], torch.Tensor]:
        """Log-probabilities and entropies of every branch, by a fused head that divides by `temperature`."""
        packed = self.packs(model) if packed is None else packed

        def forward(rows: _Rows) -> tuple[torch.Tensor, torch.Tensor]:
            core = self._core(model)
            inputs = rows.inputs(core, self.device)
            labels = rows.labels.to(self.device)
            scored = labels != _IGNORED
            scored[0, 0] |= not scored.any()  # a head that is given nothing would be left out of the backward
            scale = torch.where(rows.units, temperature, 1.0).to(self.device)[scored]
            with _head_sees(core, scored, scale):
                outputs = model(**inputs, shift_labels=labels[scored].unsqueeze(0), fused_lm_head=True)
            entropy = torch.zeros_like(outputs.log_probs) if outputs.entropy is None else outputs.entropy
            logps, entropies = (
                part.new_zeros(labels.shape).masked_scatter(scored, part) for part in (outputs.log_probs, entropy)
            )
            return logps, entropies

        return self._run(trees, packed, forward, None if torch.is_grad_enabled() else _ENOUGH_TOKENS)

    def _run(
        self, trees: Sequence[Sequence[Branch]], packed: bool, forward: Callable, limit: int | None = None
    ) -> tuple[list[list[Any]], torch.Tensor]:
        """Cut the trees into forwards, run as many on every process, and put the results back in order."""
        limits = [limit for limit in (self.max_tokens, limit) if limit is not None]
        batches = list(self._batches(trees, packed, min(limits, default=None)))
        results: list[list[Any]] = [[None] * len(tree) for tree in trees]
        zero = torch.zeros((), device=self.device)
        # At least one, since a loss without a forward could not be differentiated.
        for number in range(max(self.max_over_processes(len(batches)), 1)):
            members, rows = batches[number] if number < len(batches) else self._spare(packed)
            outputs = forward(rows)
            zero = zero + 0.0 * outputs[0].sum()
            for (tree, branch), (row, slots) in zip(members, rows.places, strict=True):
                results[tree][branch] = tuple(output[row, slots] for output in outputs)
        return results, zero

    def _spare(self, packed: bool) -> tuple[list[tuple[int, int]], "_Rows"]:
        """A forward whose results nobody wants, so that every process makes as many."""
        spare = [Branch([0, 0], 1)]
        rows = _pack([PrefixTree(spare)], self.pad_token_id) if packed else _unroll(spare, self.pad_token_id)
        rows.places.clear()
        return [], rows

    def _batches(
        self, trees: Sequence[Sequence[Branch]], packed: bool, limit: int | None
    ) -> Iterator[tuple[list[tuple[int, int]], "_Rows"]]:
        """Groups of branches for one forward each, as `(tree, branch)` indices, and their rows."""
        arrange = _pack if packed else _unroll
        members: list[tuple[int, int]] = []
        rows: list[Any] = []
        for tree, branches in enumerate(trees):
            for part, added in self._split(branches, packed):
                if rows and limit is not None and _tokens([*rows, *added]) > limit:
                    yield members, arrange(rows, self.pad_token_id)
                    members, rows = [], []
                members = members + [(tree, index) for index in part]
                rows = rows + added
        if rows:
            yield members, arrange(rows, self.pad_token_id)

    def _split(self, branches: Sequence[Branch], packed: bool) -> Iterator[tuple[range, list[Any]]]:
        """Split one tree by branches, so that each part fits: indices of branches, and the rows that they make."""
        first = 0
        while first < len(branches):
            last, rows = len(branches), _rows_of(branches[first:], packed)
            if self.max_tokens is not None and _tokens(rows) > self.max_tokens:
                last, rows = first + 1, _rows_of(branches[first : first + 1], packed)
                while _tokens(more := _rows_of(branches[first : last + 1], packed)) <= self.max_tokens:
                    last, rows = last + 1, more
            yield range(first, last), rows
            first = last


def _rows_of(branches: Sequence[Branch], packed: bool) -> list[Any]:
    """What branches of one tree make the rows of a forward."""
    return [PrefixTree(branches)] if packed else list(branches)


def _tokens(rows: Sequence["PrefixTree | Branch"]) -> int:
    """Tokens of a forward, padding included."""
    return len(rows) * max(map(len, rows))


@dataclass
class _Rows:
    """A batch for one forward: either packed trees, with the ends of what sees each token, or plain sequences.

    Attributes:
        ids, positions, labels, units: as in `PrefixTree`, shape (rows, tokens).
        ends: as in `PrefixTree`, shape (rows, tokens); `None` for plain sequences.
        mask: 1 on tokens, 0 on padding, shape (rows, tokens).
        places: for each branch its row and the positions at which its scored tokens are predicted.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    units: torch.Tensor
    ends: torch.Tensor | None
    mask: torch.Tensor
    places: list[tuple[int, torch.Tensor]]

    def inputs(self, model: Any, device: torch.device) -> dict[str, Any]:
        """Arguments of the model's forward."""
        inputs: dict[str, Any] = {"input_ids": self.ids.to(device)}
        if getattr(model.config.get_text_config(), "output_router_logits", False):
            inputs["output_router_logits"] = False  # a load-balancing loss takes no mask over pairs
        if "position_ids" in inspect.signature(model.forward).parameters:
            inputs["position_ids"] = self.positions.to(device)
        if self.ends is None:
            return {**inputs, "attention_mask": self.mask.to(device)}
        implementation = model.config.get_text_config()._attn_implementation
        tree = TreeMask(self.ends.to(device), self.mask.sum(1).tolist())
        return {**inputs, "attention_mask": _attention_mask(tree, implementation, model.dtype)}


def _attention_mask(tree: TreeMask, implementation: str, dtype: torch.dtype) -> Any:
    """A tree's mask in the form that an attention implementation takes."""
    rows, _, tokens, _ = tree.shape
    ends = tree.ends
    if implementation == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        def sees(row, head, i, j):
            return (j <= i) & (i < ends[row, j])

        return create_block_mask(sees, rows, None, tokens, tokens, device=str(ends.device))
    if implementation == "sdpa" and tokens > tree_attention.CHUNK:
        return tree
    mask = tree.dense()
    if implementation == "sdpa":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=ends.device).masked_fill(~mask, torch.finfo(dtype).min)


def _pad(tensors: list[torch.Tensor], value: int, side: str = "right") -> torch.Tensor:
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


def _pack(trees: Sequence[PrefixTree], pad_token_id: int) -> _Rows:
    """Each tree a row."""
    ids = _pad([tree.ids for tree in trees], pad_token_id)
    ends = _pad([tree.ends for tree in trees], 0)
    # A padding token sees itself alone, since a row of the mask must not be empty.
    ends = torch.where(ends == 0, torch.arange(1, ids.size(1) + 1), ends)
    return _Rows(
        ids=ids,
        positions=_pad([tree.positions for tree in trees], 0),
        labels=_pad([tree.labels for tree in trees], _IGNORED),
        units=_pad([tree.units for tree in trees], False),
        ends=ends,
        mask=_pad([torch.ones_like(tree.ids) for tree in trees], 0),
        places=[(row, torch.tensor(slots, dtype=torch.long)) for row, tree in enumerate(trees) for slots in tree.slots],
    )


def _unroll(branches: Sequence[Branch], pad_token_id: int) -> _Rows:
    """Each branch a row, on the right, so that ends stand in the same columns and few logits need be made."""
    sequences = [torch.tensor(list(branch.ids), dtype=torch.long) for branch in branches]
    width = max(map(len, sequences))
    labels, places = [], []
    for row, (branch, sequence) in enumerate(zip(branches, sequences, strict=True)):
        slots = torch.tensor([token - 1 for token in branch.scored], dtype=torch.long)
        labels.append(torch.full_like(sequence, _IGNORED).index_copy(0, slots, sequence[slots + 1]))
        places.append((row, slots + width - len(sequence)))
    mask = _pad([torch.ones_like(sequence) for sequence in sequences], 0, "left")
    return _Rows(
        ids=_pad(sequences, pad_token_id, "left"),
        positions=(mask.cumsum(1) - 1).clamp(min=0),
        labels=_pad(labels, _IGNORED, "left"),
        units=torch.tensor([[branch.unit_temperature] for branch in branches]).expand(-1, width),
        ends=None,
        mask=mask,
        places=places,
    )
