"""The decoder as pure-functional Flax modules: one forward serves training, drafting, verifying and prefill.

Token order, position IDs and visibility are arguments; nothing about ReFusion is built in. Parameter names follow
Hugging Face's, with all layers stacked along a leading axis under `layers`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from refusion_jax.config import PROJECTIONS, ModelConfig
from refusion_jax.modeling import backends
from refusion_jax.modeling.attention import KVCache, Visibility
from refusion_jax.modeling.embedding import look_up
from refusion_jax.modeling.quantization import scaled_product
from refusion_jax.modeling.rope import rotary_angles, rotate
from refusion_jax.sharding import constrain


@functools.partial(jax.checkpoint, static_argnums=2)
def _rms_norm(inputs: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    x = inputs.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return (x * scale.astype(jnp.float32)).astype(inputs.dtype)


@jax.checkpoint
def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return nn.silu(gate) * up


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    epsilon: float
    axis_name: str | None
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.ones_init(), (self.axis_name,))
        scale = self.param("scale", init, (inputs.shape[-1],), self.param_dtype)
        return _rms_norm(inputs, scale, self.epsilon)


class Dense(nn.Dense):
    """A matrix product named for rematerialisation, plus the adapter in the "lora" collection where there is one.

    An adapter's leaves are `a` (inputs, rank) and `b` (rank, outputs), the latter already times `alpha / rank`. A
    kernel beside which there is a `scale` is one of `quantize`; its product has the type `scaled_dtype`, else `dtype`.
    """

    scaled_dtype: Any = None

    def __call__(self, inputs: jax.Array) -> jax.Array:
        outputs = self._scaled(inputs) if self.has_variable("params", "scale") else super().__call__(inputs)
        if self.has_variable("lora", "a"):
            a, b = (self.get_variable("lora", name).astype(self.dtype) for name in ("a", "b"))
            outputs += (inputs @ a) @ b
        return checkpoint_name(outputs, self.name)

    def _scaled(self, inputs: jax.Array) -> jax.Array:
        kernel, scale = (self.get_variable("params", name) for name in ("kernel", "scale"))
        outputs = scaled_product(inputs.astype(self.dtype), kernel, scale)
        if self.use_bias:
            outputs += self.get_variable("params", "bias").astype(jnp.float32)
        return outputs.astype(self.scaled_dtype or self.dtype)


class Embed(nn.Embed):
    """The embedding table; one beside which there is a `scale` is one of `quantize`."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Embeddings (tokens, features) of tokens (tokens,)."""
        if (scale := self._scale) is None:
            return look_up(self.embedding, tokens, self.dtype)
        table = constrain(self.embedding, "vocab", "activation_embed")
        rows = jnp.take(table, tokens, axis=0) * jnp.take(scale, tokens)[:, None]
        return constrain(rows.astype(self.dtype), "batch", "activation_embed")

    def attend(self, query: jax.Array) -> jax.Array:
        """Products (..., num_embeddings) float32 of queries (..., features) with all embeddings."""
        scale = self._scale
        if scale is None:
            return super().attend(query).astype(jnp.float32)
        return scaled_product(query.astype(self.dtype), self.embedding.T, scale)

    @property
    def _scale(self) -> jax.Array | None:
        return self.get_variable("params", "scale") if self.has_variable("params", "scale") else None


def _dense(config: ModelConfig, features: int, axes: tuple[str, str], name: str) -> Dense:
    kernel_init = nn.with_logical_partitioning(nn.initializers.normal(config.initializer_range), axes)
    bias_init = nn.with_logical_partitioning(nn.initializers.zeros_init(), axes[1:])
    dtypes = {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}
    if name == "lm_head":
        dtypes["scaled_dtype"] = jnp.dtype(jnp.float32)
    has_bias = name in config.biases
    return Dense(features, use_bias=has_bias, kernel_init=kernel_init, bias_init=bias_init, name=name, **dtypes)


def _remat(block: type[nn.Module], config: ModelConfig) -> Any:
    """`block`, keeping the activations that `config.remat` says for the backward pass."""
    if config.remat == "none":
        return block
    names = {"minimal": PROJECTIONS, "full": ()}.get(config.remat, config.remat_names)
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return nn.remat(block, prevent_cse=False, policy=policy)


def _norm(config: ModelConfig, axis_name: str | None, name: str) -> RMSNorm:
    return RMSNorm(config.rms_norm_eps, axis_name, jnp.dtype(config.param_dtype), name=name)


class Packing(flax.struct.PyTreeNode):
    """Where the live tokens of a (batch, length) query stand when they are packed into one line.

    Attributes:
      sources: (tokens,) int32, for each packed token its index in the flattened (batch * length) query. Padding at the
        end may repeat any.
      places: (batch, length) int32, for each query token its index among the packed ones; anything where idle.
    """

    sources: jax.Array
    places: jax.Array


class Attention(nn.Module):
    """Grouped-query attention: RMSNorm on query and key heads where there is one, then RoPE (half-rotation form)."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, hidden: jax.Array, own: Any, rope: Any, shared: Any, packing: Packing | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        c = self.config
        batch, length = (rope[0] if packing is None else packing.places).shape[:2]

        def heads(name: str, count: int, axis: str) -> jax.Array:
            projected = _dense(c, count * c.head_dim, ("embed", axis), name)(hidden)
            split = projected.reshape(*leading, count, c.head_dim)
            return constrain(split, "batch", *[None] * (len(leading) - 1), "activation_heads", None)

        # Rows for attention; everything else is token by token, on packed tokens where they are packed.
        leading = (batch, length) if packing is None else hidden.shape[:1]
        query = heads("q_proj", c.num_attention_heads, "heads")
        key = heads("k_proj", c.num_key_value_heads, "kv_heads")
        value = heads("v_proj", c.num_key_value_heads, "kv_heads")
        if c.qk_norm:
            query, key = _norm(c, None, "q_norm")(query), _norm(c, None, "k_norm")(key)
        query, key = rotate(query, *rope), rotate(key, *rope)
        if packing is not None:
            query, key, value = (heads[packing.places] for heads in (query, key, value))
        key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
        mixed = backends.mix(own, query, key, value, shared).reshape(batch * length, -1)
        mixed = mixed if packing is None else mixed[packing.sources]
        return _dense(c, c.hidden_size, ("heads", "embed"), "o_proj")(mixed), (key, value)


class MLP(nn.Module):
    """SwiGLU feed-forward network."""

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array) -> jax.Array:
        c = self.config
        gate = _dense(c, c.intermediate_size, ("embed", "mlp"), "gate_proj")(hidden)
        up = _dense(c, c.intermediate_size, ("embed", "mlp"), "up_proj")(hidden)
        inner = constrain(_swiglu(gate, up), "batch", "activation_mlp")
        return _dense(c, c.hidden_size, ("mlp", "embed"), "down_proj")(inner)


class Block(nn.Module):
    """One pre-norm decoder layer on tokens in one line, (tokens, hidden_size)."""

    config: ModelConfig
    return_kv: bool

    @nn.compact
    def __call__(
        self, hidden: jax.Array, own: Any, rope: Any, shared: Any, packing: Packing | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        c = self.config
        normed = _norm(c, "embed", "input_layernorm")(hidden)
        mixed, kv = Attention(c, name="self_attn")(normed, own, rope, shared, packing)
        hidden = constrain(hidden + mixed, "batch", "activation_embed")
        normed = _norm(c, "embed", "post_attention_layernorm")(hidden)
        hidden = constrain(hidden + MLP(c, name="mlp")(normed), "batch", "activation_embed")
        return hidden, kv if self.return_kv else None


class Transformer(nn.Module):
    """Embedding, scanned layers, final norm, tied or untied output embedding: Qwen3, or what the settings make of it.

    The KV buffer is read-only: each layer attends to (buffer, query) and returns the query's keys and values, which the
    caller commits in one update after the scan.
    """

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        init = nn.with_logical_partitioning(nn.initializers.normal(c.initializer_range), ("vocab", "embed"))
        dtypes = {"dtype": jnp.dtype(c.dtype), "param_dtype": jnp.dtype(c.param_dtype)}
        self.embed_tokens = Embed(c.vocab_size, c.hidden_size, embedding_init=init, **dtypes)
        self.norm = _norm(c, "embed", "norm")
        if not c.tie_word_embeddings:
            self.lm_head = _dense(c, c.vocab_size, ("embed", "vocab"), "lm_head")

    @nn.compact
    def encode(
        self,
        tokens: jax.Array,
        position_ids: jax.Array,
        visibility: Visibility,
        caches: Sequence[KVCache] = (),
        return_kv: bool = False,
        packing: Packing | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Final hidden states, before the output embedding.

        Args:
          tokens, position_ids: (batch, length) int; (tokens,) with a packing.
          visibility: who sees whom among the (batch, length) tokens.
          caches: the KV buffers every token also sees, up to each row's committed length.
          return_kv: also return the keys and values of these tokens.
          packing: leaves idle places out of everything but attention itself.

        Returns:
          hidden: (batch * length, hidden_size), or (tokens, hidden_size) when packed; normed, in the activation dtype.
          kv: None, or keys and values (layers, batch, kv_heads, length, head_dim).
        """
        c = self.config
        hidden = self.embed_tokens(tokens.reshape(-1))
        rope = rotary_angles(position_ids, c)
        own, shared = backends.plan(c, visibility, caches)
        layers = nn.scan(
            _remat(Block, c),
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
            length=c.num_hidden_layers,
            unroll=c.scan_unroll,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(c, return_kv, name="layers")
        hidden, kv = layers(hidden, own, rope, shared, packing)
        return self.norm(hidden), kv

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits (..., vocab_size) in float32 of hidden states (..., hidden_size)."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.attend(hidden)
        return self.lm_head(hidden).astype(jnp.float32)

    def __call__(self, tokens: jax.Array, position_ids: jax.Array, visibility: Visibility | None = None) -> jax.Array:
        """Logits (batch, length, vocab_size) float32; causal in buffer order unless `visibility` says otherwise."""
        visibility = Visibility.causal(*tokens.shape) if visibility is None else visibility
        hidden, _ = self.encode(tokens, position_ids, visibility)
        return self.unembed(hidden).reshape(*tokens.shape, -1)
