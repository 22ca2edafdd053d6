"""A model as EleutherAI's lm-evaluation-harness knows one: `--model refusion_jax`.

    lm_eval --model refusion_jax --model_args checkpoint=runs/demo,slot_size=16 --tasks gsm8k_cot

`model_args` are the arguments of `RefusionLM`; any field of `DecodeConfig` and `Method` may be among them. What
decoding did and cost is in the harness's results under config, refusion_jax.
"""

import dataclasses
import importlib.metadata
import inspect
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from refusion_jax.api import Model, load, own_settings
from refusion_jax.config import ConfigError, DecodeConfig, nearest, to_dict
from refusion_jax.data import DataError
from refusion_jax.data.chat import CHATML_TEMPLATE, check_messages
from refusion_jax.decoding import Rules
from refusion_jax.decoding.rules import SLOT_SCORES
from refusion_jax.evaluation import NAME
from refusion_jax.evaluation.journal import Journal, request_key
from refusion_jax.evaluation.runner import Ask, Record, Runner, cut_prompt
from refusion_jax.evaluation.settings import decode_config, find_eval_config
from refusion_jax.evaluation.speed import generation_speed, scoring_speed
from refusion_jax.likelihood import choose_estimate
from refusion_jax.methods import METHOD_SETTINGS, OBJECTIVE_OF, Method, choose_method, methods_of, without_slots
from refusion_jax.processes import ALONE, Process, Signals
from refusion_jax.sharding import decoding_mesh

# The harness would fork this process to estimate errors by bootstrap, which may hang: JAX has threads.
os.environ.setdefault("DISABLE_MULTIPROC", "1")

THINK_END = "</think>"


@register_model(NAME)
class RefusionLM(TemplateLM):
    """A loaded model that answers the harness's requests.

    Args:
      checkpoint: what `load` takes, or a loaded `Model`.
      name: what results call the checkpoint; by default as it was given.
      batch_size, seed, allow_objective: as of `generate`. max_batch_size, device: not used; the harness gives them.
      dtype, quantize, kv_dtype: as of `load`. data_parallel, tensor_parallel: as of decode.py.
      slot_score: one of `SLOT_SCORES`.
      estimate: of `log_likelihood`, with `num_draws`; by default the exact one where there is one.
      enable_thinking: what the chat template is told. Of an answer in a conversation that thinks, what follows
        "</think>" counts.
      eval_configs: whether configs/eval says how its tasks are decoded.
      journal, process, signals: as of `Runner`.
      method: as of `generate`, or its name, by default as the checkpoint was trained for.
      settings: fields of `DecodeConfig`, which win over those of configs/eval; and of `Method`.

    Raises:
      ConfigError: for a setting that does not exist or cannot be used, or a model without a tokenizer.
      CheckpointError: as `load`.
    """

    def __init__(
        self,
        checkpoint: str | Model = "",
        batch_size: int | str = 32,
        max_batch_size: int | None = None,
        device: str | None = None,
        *,
        name: str = "",
        dtype: str | None = None,
        quantize: str | None = None,
        kv_dtype: str | None = None,
        data_parallel: int = 1,
        tensor_parallel: int = 1,
        seed: int = 0,
        slot_score: str = "first_token",
        allow_objective: str | None = None,
        estimate: str | None = None,
        num_draws: int = 128,
        enable_thinking: bool = True,
        eval_configs: bool = True,
        journal: Journal | None = None,
        process: Process = ALONE,
        signals: Signals | None = None,
        method: str | Method | None = None,
        **settings: Any,
    ):
        super().__init__()
        if not checkpoint:
            raise ConfigError("checkpoint is missing; give a run directory or a Hugging Face directory.")
        overrides, of_method = _split_settings(settings)
        if slot_score not in SLOT_SCORES:
            raise ConfigError(f"slot_score is {slot_score!r}, not one of {', '.join(SLOT_SCORES)}.")
        if isinstance(checkpoint, Model):
            model = checkpoint
        else:
            mesh = decoding_mesh(data_parallel, tensor_parallel, jax.local_devices())
            model = load(checkpoint, dtype=dtype, quantize=quantize, kv_dtype=kv_dtype, mesh=mesh)
        if model.tokenizer is None:
            raise ConfigError("The model has no tokenizer, and the harness's prompts are texts; add one to it.")
        if isinstance(method, Method):
            method = dataclasses.replace(method, **of_method)
        elif method is not None or of_method:
            method = Method(methods_of(model.objective)[0] if method is None else method, **of_method)
        method = choose_method(model.objective, method, allow_objective, model.block_lengths)
        self.model, self.tokenizer, self.overrides = model, model.tokenizer, overrides
        self.enable_thinking, self.eval_configs = enable_thinking, eval_configs
        self._checkpoint = name if name or isinstance(checkpoint, Model) else str(checkpoint)
        # A checkpoint that does not tell its objective is scored as it is decoded.
        scored = dataclasses.replace(model, objective=OBJECTIVE_OF[method.name])
        self._estimate = choose_estimate(scored, estimate)
        self._runner = Runner(
            model,
            scored,
            method,
            allow_objective,
            Rules(slot_score=SLOT_SCORES[slot_score]),
            seed,
            int(batch_size) if str(batch_size).isdecimal() else batch_size,
            self._estimate,
            num_draws,
            journal,
            process,
            Signals() if signals is None else signals,
        )
        self._settings: dict[str, Any] = {}
        self._speed: dict[str, Any] = {}
        self._thinks = False

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
        """As the harness's, but that a batch size among the model's arguments wins over that of its command."""
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**{**given, **arg_dict})

    # What the harness asks about the model.

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that begins with nothing."""
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """The most tokens of prompt and response together."""
        return self.model.config.context_length

    @property
    def tokenizer_name(self) -> str:
        """Tells tokenizers apart in the harness's cache of requests."""
        return f"{NAME}-{self.tokenizer.fingerprint[:16]}-thinking-{self.enable_thinking}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token IDs of a text, to which nothing is added."""
        return self.tokenizer.encode(string)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the tokenizer's template; "" when none is applied.

        Raises:
          ConfigError: for a template's name, since a tokenizer has one.
        """
        if isinstance(chat_template, str):
            raise ConfigError(f"The chat template {chat_template!r} was asked for by name; the tokenizer has one: ask "
                              "for it without a name.")  # fmt: skip
        return (self.tokenizer.chat_template or CHATML_TEMPLATE) if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; without `add_generation_prompt` the last message is left open to go on.

        Raises:
          ConfigError: when the template refuses it.
        """
        self._thinks = self.enable_thinking
        try:
            messages = check_messages(chat_history, "The conversation")
            text = self.tokenizer.render(
                messages, add_generation_prompt=add_generation_prompt, enable_thinking=self.enable_thinking
            )
        except DataError as error:
            raise ConfigError(str(error)) from error
        if add_generation_prompt:
            return text
        # What the template puts behind the last message ends it. Some strip messages, and so the end of this one.
        last = messages[-1]["content"].lstrip()
        place = text.rfind(last.rstrip())
        if place < 0:
            raise ConfigError("The chat template changes the last message, which therefore cannot be left open.")
        end = last if text.startswith(last, place) else last.rstrip()
        return text[:place] + end

    def get_model_info(self) -> dict[str, Any]:
        """What the harness adds to its results: how decoding was done and what it cost, by task."""
        model, runner = self.model, self._runner
        return {
            NAME: {
                "version": importlib.metadata.version("refusion_jax"),
                "checkpoint": self._checkpoint,
                "objective": model.objective,
                "method": dataclasses.asdict(runner.method),
                "estimate": self._estimate,
                "num_draws": runner.num_draws,
                "seed": runner.seed,
                "enable_thinking": self.enable_thinking,
                "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
                "settings": self._settings,
                "speed": self._speed,
            }
        }

    # What the harness asks of it.

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers to prompts, each up to the first of its stop texts."""
        found: list[str] = [""] * len(requests)
        for task, places in _by_task(requests).items():
            by_config: dict[DecodeConfig, list[int]] = {}
            for place in places:
                by_config.setdefault(self.decode_config(task, requests[place].args[1]), []).append(place)
            records: list[Record] = []
            for config, some in by_config.items():
                answered = self._generate(task, config, [requests[place] for place in some])
                for place, record in zip(some, answered, strict=True):
                    found[place] = self._without_thoughts(record["text"])
                records += answered
            self._speed[task] = generation_speed(records, self._runner.process.count)
        return found

    def decode_config(self, task: str, asked: Mapping[str, Any]) -> DecodeConfig:
        """How a task's prompts are decoded, see `settings.decode_config`."""
        default = own_settings(self.model, self._runner.method)
        config = decode_config(task, default, self.overrides, asked, self.eval_configs)
        return config if self._runner.method.name == "refusion" else without_slots(config)

    def room(self, task: str, config: DecodeConfig) -> int:
        """The most tokens that a prompt may have.

        Raises:
          ConfigError: when it may have none.
        """
        room = self.max_length - config.rounded_length
        if room < 1:
            raise ConfigError(
                f"Task {task}: gen_length {config.gen_length}, in whole slots {config.rounded_length} tokens, leaves "
                f"none of the model's {self.max_length} positions for prompts; lower it."
            )
        return room

    def _generate(self, task: str, config: DecodeConfig, requests: Sequence[Instance]) -> list[Record]:
        name = find_eval_config(task) if self.eval_configs else None
        source = {"configs_eval": None if name is None else name[0], "overrides": dict(self.overrides)}
        self._settings[task] = {**to_dict(config), **source}
        room = self.room(task, config)
        asks, seen = [], dict[str, int]()
        for request in requests:
            whole = self.tok_encode(request.args[0]) or [self.prefix_token_id]
            prompt, cut = cut_prompt(whole, room)
            key = request_key("generate", task, to_dict(config), whole)
            seen[key] = seen.get(key, 0) + 1  # repeats of a prompt are requests of their own
            unknown = whole.count(self.tokenizer.unk_token_id)
            asks.append(Ask(f"{key}.{seen[key]}", prompt, [], cut, unknown))

        def cache(place: int, record: Record) -> None:
            self.cache_hook.add_partial("generate_until", requests[place].args, self._without_thoughts(record["text"]))

        return self._runner.generate(asks, config, cache)

    def _without_thoughts(self, text: str) -> str:
        return text.rpartition(THINK_END)[2].lstrip() if self._thinks else text

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, in nats, and whether the model would have written it."""
        pairs = [self._encode(*request.args) for request in requests]
        return self._score(requests, pairs, "loglikelihood")

    def _encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context:
            return self._encode_pair(context, continuation)
        tokens = self.tok_encode(continuation)
        if tokens[:1] == [self.prefix_token_id]:
            return tokens[:1], tokens[1:]
        return [self.prefix_token_id], tokens

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts in nats, longer ones in windows that each see as much as fits."""
        owners, pairs = [], []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                # A window predicts its last token from those before it: together one more than this.
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            for window in map(make_disjoint_window, windows):
                pairs.append((list(window[0]), list(window[1])))
                owners.append(number)
        scores = self._score([requests[owner] for owner in owners], pairs, "")
        sums = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, scores, strict=True):
            sums[owner] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        instances = [Instance("loglikelihood", {}, pair, 0) for pair, _, _ in requests]
        return self._score(instances, [(context, continuation) for _, context, continuation in requests], "")

    def _score(
        self, requests: Sequence[Instance], pairs: Sequence[tuple[list[int], list[int]]], cached_as: str
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for task, places in _by_task(requests).items():
            config = self.decode_config(task, {})
            blocks = {"refusion": config.slot_size, "block_diffusion": self._runner.method.block_length}
            slot_size = blocks.get(self._runner.method.name)
            self._settings.setdefault(task, {"slot_size": slot_size})
            asks = [self._ask(*pairs[place], slot_size) for place in places]

            def cache(number: int, record: Record, places: list[int] = places) -> None:
                if cached_as:
                    score = record["value"], record["is_greedy"]
                    self.cache_hook.add_partial(cached_as, requests[places[number]].args, score)

            records = self._runner.score(asks, slot_size, cache)
            for place, record in zip(places, records, strict=True):
                found[place] = record["value"], record["is_greedy"]
            self._speed[task] = scoring_speed(records, self._runner.process.count)
        return found

    def _ask(self, context: list[int], continuation: list[int], slot_size: int | None) -> Ask:
        response = continuation[-(self.max_length - 1) :]
        prompt, cut = cut_prompt(context, self.max_length - len(response))
        unknown = (context + continuation).count(self.tokenizer.unk_token_id)
        draws = [self._estimate, self._runner.num_draws, slot_size]
        key = request_key("score", draws, context, continuation)
        return Ask(key, prompt, response, cut + len(continuation) - len(response), unknown)


def _by_task(requests: Iterable[Instance]) -> dict[str, list[int]]:
    """The places of each task's requests."""
    places: dict[str, list[int]] = {}
    for place, request in enumerate(requests):
        places.setdefault(request.task_name or "", []).append(place)
    return places


def _split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of `DecodeConfig`, and those of `Method`, in their types; `lm_eval` reads "1" as a whole number."""
    kinds, method_kinds = typing.get_type_hints(DecodeConfig), typing.get_type_hints(Method)
    decode: dict[str, Any] = {}
    method: dict[str, Any] = {}
    for name, value in settings.items():
        if name in kinds:
            decode[name] = _typed(kinds[name], value)
        elif name in METHOD_SETTINGS:
            method[name] = _typed(method_kinds[name], value)
        else:
            own = [parameter for parameter in inspect.signature(RefusionLM).parameters if parameter != "settings"]
            raise ConfigError(f"Unknown model argument {name!r}.{nearest(name, [*own, *kinds, *METHOD_SETTINGS])}")
    return decode, method


def _typed(kind: Any, value: Any) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(kind) is tuple:
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    return value
