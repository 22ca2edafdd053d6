"""What the decoders of the other systems take and give: a rectangle of rows, each a prompt and its settings."""

import flax
import jax
import jax.numpy as jnp


class Rows(flax.struct.PyTreeNode):
    """Prompts and what each is asked for. `capacity` is the longest response there is room for.

    Attributes:
      prompts: (batch, prompt_length) int32, padded at the end.
      prompt_lengths: (batch,) int32; 0 for a row that only fills the batch up.
      lengths: (batch,) int32, tokens to respond with; 0 for a row that only fills the batch up.
      block_lengths, block_steps: (batch,) int32, as `Method.blocks` gives them.
      thresholds, factors, guidances: (batch,) float32.
      temperatures, top_ps: (batch,) float32. top_ks: (batch,) int32, the vocabulary's size for no limit.
      keys: (batch, 2) uint32, the row's random key data.
      eos_ids: (batch, n) int32.
      suppressed_ids: (batch, n) int32 token IDs never proposed; one beyond the vocabulary stands for none.
    """

    prompts: jax.Array
    prompt_lengths: jax.Array
    lengths: jax.Array
    block_lengths: jax.Array
    block_steps: jax.Array
    thresholds: jax.Array
    factors: jax.Array
    guidances: jax.Array
    temperatures: jax.Array
    top_ps: jax.Array
    top_ks: jax.Array
    keys: jax.Array
    eos_ids: jax.Array
    suppressed_ids: jax.Array


class Responses(flax.struct.PyTreeNode):
    """What came of them.

    Attributes:
      tokens: (batch, capacity) int32.
      committed: (batch, capacity) bool, tokens that were decided. A row ends when all up to its first EOS are, or all.
      probabilities: (batch, capacity) float32, with which a token was decided, of the unfiltered distribution.
      commit_forwards: (batch, capacity) int32, which of the row's forwards decided it, from 0.
      forwards: (batch,) int32, forwards the row took part in; those over a prompt alone do not count.
      positions: (batch,) int32, query positions that the row needed, summed over its forwards.
      cached: (batch,) int32, keys that they read from buffers, summed over its forwards.
    """

    tokens: jax.Array
    committed: jax.Array
    probabilities: jax.Array
    commit_forwards: jax.Array
    forwards: jax.Array
    positions: jax.Array
    cached: jax.Array

    @classmethod
    def none(cls, batch: int, capacity: int, token: int) -> "Responses":
        """Nothing decided yet; `token` stands everywhere."""
        shape, counts = (batch, capacity), jnp.zeros(batch, jnp.int32)
        return cls(
            tokens=jnp.full(shape, token, jnp.int32),
            committed=jnp.zeros(shape, jnp.bool_),
            probabilities=jnp.zeros(shape, jnp.float32),
            commit_forwards=jnp.zeros(shape, jnp.int32),
            forwards=counts,
            positions=counts,
            cached=counts,
        )

    def running(self, rows: Rows) -> jax.Array:
        """(batch,) bool, the rows with something undecided before their first EOS."""
        is_eos = self.committed & jnp.any(self.tokens[..., None] == rows.eos_ids[:, None], axis=-1)
        is_wanted = (jnp.cumsum(is_eos, axis=1) == 0) & (jnp.arange(self.tokens.shape[1]) < rows.lengths[:, None])
        return jnp.any(is_wanted & ~self.committed, axis=1)
