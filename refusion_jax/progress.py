"""How far a long run is: a bar on a terminal, lines elsewhere."""

import sys
import time

import tqdm

from refusion_jax.decoding import Statistics

PLAIN_PROGRESS_SECONDS = 10.0


class Progress:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, done: int, total: int, statistics: Statistics):
        self._start = self._printed = time.perf_counter()
        self._first, self._done, self._total, self._tokens = done, done, total, 0
        self._statistics = statistics
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(total=total, initial=done, unit=" prompts", dynamic_ncols=True)

    def add(self, tokens: int) -> None:
        """Counts an answered prompt with so many response tokens."""
        self._done += 1
        self._tokens += tokens
        now = time.perf_counter()
        seconds = max(now - self._start - self._statistics.compile_seconds, 1e-9)  # compiling does not come again
        rate = f"{self._tokens / seconds:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(rate, refresh=False)
            self._bar.update()
        elif now - self._printed >= PLAIN_PROGRESS_SECONDS:
            self._printed = now
            left = seconds / (self._done - self._first) * (self._total - self._done)
            text = f"{self._done}/{self._total} prompts, {rate}, {tqdm.tqdm.format_interval(left)} left"
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the bar's line."""
        if self._bar is not None:
            self._bar.close()
