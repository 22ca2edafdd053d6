"""The plainest possible decoding by masked diffusion: the oracle that the compiled one is compared with.

What a cache keeps is modelled without one: the tokens as a block began with them are still there and see each other
only; the new ones see those of them that are kept.
"""

import numpy as np
from reference_decoders import softmax


class PlainDecode:
    """One response, as lists and loops.

    `answer`, `probabilities` and `by` are per response token, None for a mask: what it became, with which probability,
    and in which forward. `margin` is the smallest distance of any decision from its opposite.
    """

    def __init__(self, model, method, prompt, length, mask, eos, temperature, gumbel, uniform):
        """`gumbel` (forwards, length, vocab) and `uniform` (forwards, length) are the noise of every forward."""
        self.model, self.method, self.prompt, self.length = model, method, prompt, length
        self.mask, self.eos, self.temperature, self.gumbel, self.uniform = mask, eos, temperature, gumbel, uniform
        self.block, self.steps = method.blocks(self.length)
        self.answer, self.probabilities, self.by = ([None] * self.length for _ in range(3))
        self.forwards = self.positions = self.cached = 0
        self.margin = np.inf

    def run(self):
        for begin in range(0, self.length, self.block):
            block, step, old = range(begin, begin + self.block), 0, None
            while any(self.answer[i] is None for i in block) and not self.ended:
                logits, old = self.logits(block, old)
                self.reveal(logits, [i for i in block if self.answer[i] is None], step)
                step += 1
        return self

    @property
    def tokens(self):
        return [token for token in self.answer if token is not None]

    @property
    def ended(self):
        first_mask = self.answer.index(None) if None in self.answer else self.length
        return any(token in self.eos for token in self.answer[:first_mask])

    def sequence(self):
        return self.prompt + [self.mask if token is None else token for token in self.answer]

    def logits(self, block, old):
        """(length, vocab) predictions of the response by the next forward, and the tokens that a block began with."""
        shift, size = int(self.method.name == "dream"), len(self.prompt)
        now, places = self.sequence(), np.arange(size + self.length)
        read = places[size:] - shift
        if self.method.guidance:
            self.forwards += 2
            return self.guided(now, places, read), None
        self.forwards += 1
        if self.method.cache == "none" or old is None:
            self.positions += len(now)
            return self.model.forward(now, places, np.True_)[read], now
        end = len(now) if self.method.cache == "prefix" else size + block.stop
        window = places[size + block.start - shift : end]
        kept = np.setdiff1d(places, window)
        self.positions, self.cached = self.positions + len(window), self.cached + len(kept)
        # The old tokens, which see each other, and behind them the window, which sees what is kept and itself.
        sees = np.zeros((len(now) + len(window),) * 2, bool)
        sees[: len(now), : len(now)] = sees[len(now) :, len(now) :] = True
        sees[len(now) :, kept] = True
        tokens = old + [now[place] for place in window]
        after = self.model.forward(tokens, np.concatenate([places, window]), sees)[len(now) :]
        predictions = np.full((self.length, after.shape[-1]), np.nan, np.float32)
        predictions[np.array(block)] = after[size + np.array(block) - shift - window[0]]
        return predictions, old

    def guided(self, now, places, read):
        size, shift = len(self.prompt), int(self.method.name == "dream")
        hidden = [self.mask] * size + now[size:]
        first = 0 if self.method.unconditional == "mask" else size - shift
        self.positions += 2 * len(now) - first
        conditional = self.model.forward(now, places, np.True_)[read]
        unconditional = self.model.forward(hidden[first:], places[first:], np.True_)[read - first]
        return unconditional + np.float32(self.method.guidance + 1) * (conditional - unconditional)

    def reveal(self, logits, masks, step):
        drawn = np.array(logits)
        drawn[:, self.mask] = -np.inf
        drawn += np.float32(self.temperature) * self.gumbel[self.forwards - 1, : self.length]
        choice, p = drawn.argmax(axis=-1), softmax(logits)
        sure = p[np.arange(self.length), choice]
        second, first = np.sort(p, axis=-1)[:, -2:].T
        scores = {
            "confidence": sure,
            "entropy": 1 + (p * np.log(p)).sum(axis=-1) / np.log(p.shape[-1]),
            "margin": first - second,
            "random": self.uniform[self.forwards - 1, : self.length],
        }[self.method.scores]
        best = sorted(masks, key=lambda i: (-scores[i], i))
        count = max(self.count(scores[best], step), 1)
        gaps = np.diff(np.sort(drawn[best[:count]], axis=-1)[:, -2:])
        self.margin = min(self.margin, gaps.min(), *(scores[best[count - 1]] - scores[i] for i in best[count:]))
        for i in best[:count]:
            self.answer[i], self.probabilities[i], self.by[i] = int(choice[i]), sure[i], self.forwards - 1

    def count(self, best, step):
        if self.method.threshold:
            self.margin = min(self.margin, np.abs(best - self.method.threshold).min())
            return sum(best >= self.method.threshold)
        if self.method.factor:
            costs = np.arange(2, len(best) + 2) * (1 - best)
            self.margin = min(self.margin, np.abs(costs - self.method.factor).min())
            return max((n for n, cost in enumerate(costs, 1) if cost < self.method.factor), default=0)
        return self.block // self.steps + (step < self.block % self.steps)
