"""The decode step: one new token of each sequence, without the modules of transformers.

For one token, the Python of transformers' modules takes several times as long as the arithmetic.
The step makes the same products from the same parameters, those of one input together, in blocks
of the kind that most decoders have:

    x + W_o attention(rotate(W_q n1(x)), rotate(W_k n1(x)), W_v n1(x)),  and of that
    x + W_down (act(W_gate n2(x)) * W_up n2(x))

Where it is used it has been compared with transformers' own modules. Axis letters: B sequences, C
columns of the cache, D hidden size, H query heads, K key heads, G query heads of a key head, S size
of a head, I inner size of the perceptron.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn import functional

from logsteer_server.engines.tlens.cache import RoomyLayer, RowCache
from logsteer_server.engines.tlens.overflow import show_overflow
from logsteer_server.engines.tlens.points import HookFunction, Point

KNOWN_TYPES = frozenset(("gemma", "llama", "mistral", "qwen2", "qwen3"))
"""Types of models whose blocks may be of this kind, by the name in their configuration.

A comparison would not show what acts on large numbers alone, such as caps on scores.
"""
STILL_ROTATIONS = frozenset(("default", "linear", "llama3", "yarn"))
"""Kinds of rotary embeddings in which a position's angles do not depend on how long a text is."""
FIRST_ANGLES = 1024
"""Positions whose angles are computed first; twice as many whenever they are not enough."""
NORM_TOLERANCE = 1e-6
SMALL_STEP = 2**19
"""Products of two numbers in a block up to which a second thread costs more than it does."""

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class NextTokens:
    """One more token of each sequence, which follows those in the cache and is added to them.

    The mask is 0 where cache or tokens are padding; None: nowhere. The hooks act.
    """

    tokens_B1: Tensor
    mask_BC: Tensor | None
    positions_B1: Tensor
    cache: RowCache
    hooks: Sequence[tuple[Point, HookFunction]]


class UnknownBlockError(Exception):
    """A model has a part that the decode step knows nothing of."""


class DecodeStep:
    """A model's body for one new token of each sequence, over the same parameters.

    The weights of products that share their input are moved behind one another in memory, where
    the model's own parameters are views of them.
    Errors: UnknownBlockError.
    """

    def __init__(self, body: Any, blocks: Sequence[Any]) -> None:
        config = body.config
        if config.model_type not in KNOWN_TYPES:
            raise UnknownBlockError(config.model_type)
        devices = {parameter.device for parameter in body.parameters()}
        dtypes = {parameter.dtype for parameter in body.parameters()}
        if len(devices) > 1 or dtypes not in ({torch.float32}, {torch.bfloat16}):
            raise UnknownBlockError("several devices, or neither float32 nor bfloat16")
        self._embed: Change = body.embed_tokens.forward
        most = config.max_position_embeddings
        self._angles = _Angles(body.rotary_emb, most, dtypes.pop())
        self._blocks = [_Block.read(block) for block in blocks]
        self._norm = _read_norm(body.norm, config.hidden_size)
        self._block_size = sum(parameter.numel() for parameter in blocks[0].parameters())

    def read(self, tokens: NextTokens) -> Tensor:
        """Return the hidden states [B, D] that the head is applied to.

        Hooks must be where the residual stream enters or leaves a block.
        """
        threads = torch.get_num_threads()
        is_small = len(tokens.tokens_B1) * self._block_size <= SMALL_STEP
        if is_small and threads > 1:
            torch.set_num_threads(1)
        try:
            return self._read(tokens)
        finally:
            if is_small and threads > 1:
                torch.set_num_threads(threads)

    def _read(self, tokens: NextTokens) -> Tensor:
        by_key: dict[str, list[tuple[Point, HookFunction]]] = {}
        for point, function in tokens.hooks:
            by_key.setdefault(point.key, []).append((point, function))
        device = self._angles.device
        x_BD = self._embed(tokens.tokens_B1[:, 0].to(device))
        positions_B = tokens.positions_B1[:, 0].to(device)
        angles = self._angles.find(positions_B, tokens.cache.get_seq_length() + 1)
        bias_B11C = None
        if tokens.mask_BC is not None:
            is_hidden_BC = tokens.mask_BC.to(device) == 0
            bias_BC = torch.zeros(is_hidden_BC.shape, dtype=x_BD.dtype, device=device)
            bias_B11C = bias_BC.masked_fill_(is_hidden_BC, -torch.inf)[:, None, None]
        for layer, (block, room) in enumerate(zip(self._blocks, tokens.cache.layers, strict=True)):
            if before := by_key.get(f"blocks.{layer}.hook_in"):
                x_BD = _apply(before, x_BD)
            x_BD = block.run(x_BD, angles, bias_B11C, room, is_changed=bool(tokens.hooks))
            if after := by_key.get(f"blocks.{layer}.hook_out"):
                x_BD = _apply(after, x_BD)
        return self._norm(x_BD)


def _apply(hooks: Sequence[tuple[Point, HookFunction]], x_BD: Tensor) -> Tensor:
    for point, function in hooks:
        changed_B1D = function(x_BD[:, None], hook=point.hook)
        x_BD = x_BD if changed_B1D is None else changed_B1D[:, 0]
    return x_BD


class _Angles:
    """The cosines and sines by which heads are rotated, of all positions up to the largest so far.

    A head (a, b) of two halves turns by cos and sin into (a cos - b sin, b cos + a sin). The sines
    here have that sign, so that it is (a, b) * cosines + (b, a) * sines.
    """

    def __init__(self, rotary: Any, most: int, dtype: torch.dtype) -> None:
        if rotary.rope_type not in STILL_ROTATIONS:
            raise UnknownBlockError(f"angles of type {rotary.rope_type}")
        self._rotary = rotary
        self._most = most
        self._dtype = dtype
        self.device: torch.device = rotary.inv_freq.device
        self._known_P2S = self._compute(min(FIRST_ANGLES, most))

    def _compute(self, count: int) -> Tensor:
        positions_1P = torch.arange(count, device=self.device)[None]
        like = torch.zeros((), dtype=self._dtype, device=self.device)
        cos_PS, sin_PS = (x_1PS[0].clone() for x_1PS in self._rotary(like, positions_1P))
        sin_PS[:, : sin_PS.shape[-1] // 2] *= -1
        return torch.stack([cos_PS, sin_PS], dim=1)

    def find(self, positions_B: Tensor, bound: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, 1, S] of each sequence's position, all below `bound`."""
        if bound > len(self._known_P2S):
            self._known_P2S = self._compute(max(bound, min(2 * bound, self._most)))
        cos_BS, sin_BS = self._known_P2S[positions_B].unbind(1)
        return cos_BS[:, None], sin_BS[:, None]


@dataclass(frozen=True, slots=True)
class _Product:
    """One or several linear layers with the same input, as one."""

    weight_OD: Tensor
    bias_O: Tensor | None

    @classmethod
    def join(cls, linears: Sequence[Any]) -> "_Product":
        """Move the parameters of these layers behind one another."""
        if any(type(linear) is not nn.Linear for linear in linears):
            raise UnknownBlockError(" ".join(type(linear).__name__ for linear in linears))
        biases = [linear.bias for linear in linears]
        has_bias = biases[0] is not None
        if any((bias is not None) != has_bias for bias in biases):
            raise UnknownBlockError("products of which some have a bias")
        weight_OD = _move_together([linear.weight for linear in linears])
        return cls(weight_OD, _move_together(biases) if has_bias else None)

    def multiply(self, x_BD: Tensor) -> Tensor:
        """Return W x + b [B, O]."""
        return functional.linear(x_BD, self.weight_OD, self.bias_O)

    def add_to(self, stream_BD: Tensor, x_BO: Tensor) -> Tensor:
        """Return the stream with W x + b added."""
        if self.bias_O is not None:
            return stream_BD + functional.linear(x_BO, self.weight_OD, self.bias_O)
        return torch.addmm(stream_BD, x_BO, self.weight_OD.t())


def _move_together(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the parameters behind one another, in memory that they are views of from now on."""
    if len(parameters) == 1:
        return parameters[0].detach()
    joined = torch.cat([parameter.detach() for parameter in parameters])
    parts = joined.split_with_sizes([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return joined


@dataclass(frozen=True, slots=True)
class _Block:
    """A block's parameters; its heads are `size` wide."""

    first_norm: Change
    second_norm: Change
    qkv: _Product
    head_norm: Change | None
    output: _Product
    heads: int
    key_heads: int
    size: int
    scale: float
    inner: _Product
    act: Change
    down: _Product

    @classmethod
    def read(cls, block: Any) -> "_Block":
        """Take the parameters of a block of transformers. Errors: UnknownBlockError."""
        try:
            attention, mlp = block.self_attn, block.mlp
            size = attention.head_dim
            q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
            width = q.in_features
            heads, key_heads = q.out_features // size, k.out_features // size
            return cls(
                _read_norm(block.input_layernorm, width),
                _read_norm(block.post_attention_layernorm, width),
                _Product.join([q, k, v]),
                _read_head_norm(attention, heads, key_heads, size),
                _Product.join([attention.o_proj]),
                heads,
                key_heads,
                size,
                float(attention.scaling),
                _Product.join([mlp.gate_proj, mlp.up_proj]),
                mlp.act_fn.forward,
                _Product.join([mlp.down_proj]),
            )
        except AttributeError as error:
            raise UnknownBlockError(str(error)) from error

    def run(
        self,
        x_BD: Tensor,
        angles: tuple[Tensor, Tensor],
        bias_B11C: Tensor | None,
        room: RoomyLayer,
        *,
        is_changed: bool,
    ) -> Tensor:
        """Return the residual stream after the block, whose keys and values go into the cache.

        Where the model `is_changed`, overflow in attention shows.
        """
        count, heads, key_heads, size = len(x_BD), self.heads, self.key_heads, self.size
        qkv_BHS = self.qkv.multiply(self.first_norm(x_BD)).view(count, -1, size)
        turned_BHS, values_BKS = qkv_BHS.split_with_sizes((heads + key_heads, key_heads), 1)
        if self.head_norm:
            turned_BHS = self.head_norm(turned_BHS)
        cos_B1S, sin_B1S = angles
        swapped_BHS = turned_BHS.roll(size // 2, -1)
        turned_BHS = torch.addcmul(turned_BHS * cos_B1S, swapped_BHS, sin_B1S)
        queries_BHS, keys_BKS = turned_BHS.split_with_sizes((heads, key_heads), 1)
        keys_BKCS, values_BKCS = room.append(keys_BKS, values_BKS)
        # Query heads that look at one key head stand as if they were tokens.
        queries_BKGS = queries_BHS.view(count, key_heads, -1, size)
        read_BKGS = functional.scaled_dot_product_attention(
            queries_BKGS, keys_BKCS, values_BKCS, attn_mask=bias_B11C, scale=self.scale
        )
        if is_changed:
            read_BKGS = show_overflow(
                read_BKGS, queries_BKGS, keys_BKCS, values_BKCS, attn_mask=bias_B11C
            )
        x_BD = self.output.add_to(x_BD, read_BKGS.reshape(count, -1))
        gate_BI, up_BI = self.inner.multiply(self.second_norm(x_BD)).chunk(2, -1)
        return self.down.add_to(x_BD, self.act(gate_BI) * up_BI)


def _read_head_norm(attention: Any, heads: int, key_heads: int, size: int) -> Change | None:
    """Return what normalises each query and key head [B, H + K, S]; None where nothing does."""
    if getattr(attention, "q_norm", None) is None:
        return None
    weights = [_read_rms(attention.q_norm, size), _read_rms(attention.k_norm, size)]
    if weights[0][1] != weights[1][1]:
        raise UnknownBlockError("heads with different norms")
    counts = (heads, key_heads)
    per_head = [w.expand(n, size) for (w, _), n in zip(weights, counts, strict=True)]
    return _RmsNorm(torch.cat(per_head), weights[0][1])


class _RmsNorm:
    """x w / sqrt(mean(x^2) + eps), over the last axis, in fewer operations than torch's own.

    In float32, and rounded once to the dtype of x.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = torch.tensor(eps, device=weight.device)
        self._share = 1 / weight.shape[-1]

    def __call__(self, x: Tensor) -> Tensor:
        """Return x normalised."""
        wide = x.float()
        norm = vector_norm(wide, 2, -1, True)
        inverse = torch.addcmul(self._eps, norm, norm, value=self._share).rsqrt_()
        return wide.mul(inverse).mul_(self._weight).to(x.dtype)


def _read_norm(module: Any, size: int) -> Change:
    return _RmsNorm(*_read_rms(module, size))


def _read_rms(module: Any, size: int) -> tuple[Tensor, float]:
    """Return the weight that a norm multiplies by and its epsilon, as a trial shows them."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or eps is None or weight.shape != (size,):
        raise UnknownBlockError(type(module).__name__)
    trial = torch.linspace(-1, 2, 3 * size, device=weight.device).view(3, size)
    wanted = module(trial)
    for found in (weight.detach().float(), 1 + weight.detach().float()):
        if torch.allclose(_RmsNorm(found, eps)(trial), wanted, NORM_TOLERANCE, NORM_TOLERANCE):
            return found, eps
    raise UnknownBlockError(type(module).__name__)
