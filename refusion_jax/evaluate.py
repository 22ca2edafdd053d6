"""Evaluates a model on the tasks of EleutherAI's lm-evaluation-harness, with what decoding cost beside every score.

    python evaluate.py --checkpoint=DIR --tasks=gsm8k_cot,arc_challenge_chat --limit=50
    python evaluate.py --checkpoint=DIR --tasks=gsm8k,humaneval --data=../shared/data --allow_code_execution
    python evaluate.py --checkpoint=DIR --tasks=gsm8k --sweep='slot_threshold=0.6,0.9 token_threshold=0.4,0.9'

Tasks, prompts, few-shot examples and scores are the harness's (`pip install refusion_jax[eval]`; `lm_eval ls tasks`
names all tasks). How a benchmark is decoded is said in configs/eval, as the paper did it; every setting is a flag too,
and a flag wins. With --data GSM8K and HumanEval are read from a local folder, so that no network is needed.

--output=DIR keeps every answer as it is computed: the same command goes on after an interruption, with any number of
processes, devices or batch size. results.json there is what the harness returns, with settings and speed under config,
refusion_jax; --log_samples writes samples_TASK.jsonl beside it. --sweep does so for each point of a grid of settings,
and draws quality against speed (sweep.png).

Tasks that run generated code need --allow_code_execution, and run it in a sandbox.

With --num_processes, --process_id and --coordinator_address several processes share the requests, each on the devices
it has; they need a common file system for --output.
"""

import contextlib
import importlib.metadata
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from refusion_jax import accelerators, command_line, decode_flags
from refusion_jax.api import Model
from refusion_jax.checkpoint_identity import checkpoint_identity
from refusion_jax.config import ConfigError
from refusion_jax.evaluation.sandbox import Limits
from refusion_jax.host_memory import keep_freed_memory
from refusion_jax.likelihood import ESTIMATES
from refusion_jax.methods import Method
from refusion_jax.processes import (
    Interrupted,
    Process,
    Signals,
    define_processes,
    failing_together,
    join_processes,
    wait_for_all,
)

FLAGS = flags.FlagValues()
decode_flags.define(FLAGS)
flags.DEFINE_list(
    "tasks", None, "Names of tasks, groups or tags, separated by commas; * is allowed.", flag_values=FLAGS
)
flags.DEFINE_string("data", None, "Folder that GSM8K and HumanEval are read from.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "Directory to write, or to continue.", flag_values=FLAGS)
flags.DEFINE_float("limit", None, "So many examples of each task, or below 1 this share.", flag_values=FLAGS)
flags.DEFINE_integer(
    "num_fewshot", None, "Examples in a prompt; by default as the task says.", lower_bound=0, flag_values=FLAGS
)
flags.DEFINE_bool("apply_chat_template", False, "Write prompts as conversations.", flag_values=FLAGS)
flags.DEFINE_bool("fewshot_as_multiturn", True, "In conversations, each example is a turn.", flag_values=FLAGS)
flags.DEFINE_string("system_instruction", None, "What stands before every prompt.", flag_values=FLAGS)
flags.DEFINE_bool("enable_thinking", True, "What the chat template is told, if it asks.", flag_values=FLAGS)
flags.DEFINE_enum(
    "estimate",
    None,
    list(ESTIMATES),
    "How likelihoods are computed; by default exactly where that is one forward, else the Monte-Carlo bound.",
    flag_values=FLAGS,
)
flags.DEFINE_integer("num_draws", 128, "Draws of the Monte-Carlo bound.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_bool(
    "eval_configs", True, "Decode benchmarks as configs/eval says; else as the checkpoint does.", flag_values=FLAGS
)
flags.DEFINE_bool("log_samples", False, "Write every prompt, answer and score; needs --output.", flag_values=FLAGS)
flags.DEFINE_bool("allow_code_execution", False, "Run generated code, in a sandbox.", flag_values=FLAGS)
flags.DEFINE_float(
    "code_seconds", Limits.wall_seconds, "Longest that a generated program may run.", lower_bound=0.1, flag_values=FLAGS
)
flags.DEFINE_string(
    "sweep",
    None,
    "Evaluate at all combinations of these settings: 'slot_threshold=0.6,0.9 token_threshold=0.4,0.9'; needs --output.",
    flag_values=FLAGS,
)
define_processes(FLAGS)


def main(args: flags.FlagValues) -> None:
    """Evaluates with the parsed flags.

    Raises:
      ConfigError: for flags, tasks or files that cannot be used.
    """
    accelerators.set_flags()
    _check_flags(args)
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'refusion_jax[eval]' brings it.") from error
    process = join_processes(args)
    keep_freed_memory()
    accelerators.keep_programs()
    try:
        with Signals() as signals, failing_together(process):
            _evaluate(args, process, signals)
    except Interrupted as interrupted:
        again = "; run the same command again to continue" if args.output else ""
        print(f"Interrupted{again}.", file=sys.stderr)
        sys.exit(128 + interrupted.number)


def _check_flags(args: flags.FlagValues) -> None:
    if not args.tasks or not all(args.tasks):
        raise ConfigError("--tasks is empty or has an empty name; name tasks of the harness, separated by commas.")
    for name in ("log_samples", "sweep"):
        if args[name].value and not args.output:
            raise ConfigError(f"--{name} needs --output, the directory to write to.")
    if args.output == "":
        raise ConfigError("--output is empty; name a directory, or leave it out.")
    for name in ("fewshot_as_multiturn", "enable_thinking"):
        if args[name].present and not args.apply_chat_template:
            raise ConfigError(f"--{name} is for conversations; give --apply_chat_template, or leave it out.")
    limit = args.limit
    if limit is not None and not (0 < limit < 1 or (1 <= limit < math.inf and limit == int(limit))):
        raise ConfigError(f"--limit is {args.limit:g}; give a number of examples, or a share below 1.")


def _evaluate(args: flags.FlagValues, process: Process, signals: Signals) -> None:
    # The harness takes seconds to import.
    from refusion_jax.evaluation.code_tasks import code_execution
    from refusion_jax.evaluation.sweep import points, report_sweep
    from refusion_jax.evaluation.task_loading import check_tasks, load_tasks

    grid = points(args.sweep) if args.sweep is not None else [{}]
    overrides = [{**decode_flags.settings(args), **point} for point in grid]
    with code_execution(args.allow_code_execution, Limits.lasting(args.code_seconds)):
        tasks = load_tasks(args.tasks, args.data)
    check_tasks(tasks, args.allow_code_execution, overrides, args.eval_configs, args.num_fewshot)
    model = decode_flags.load(args)
    method = decode_flags.method(args, model)
    results = []
    for point, settings in zip(grid, overrides, strict=True):
        name = " ".join(f"{name}={value}" for name, value in point.items())
        if name and not process.id:
            print(f"At {name}:", file=sys.stderr)
        place = None if args.output is None else Path(args.output, name.replace(" ", ","))
        results.append(_run(args, process, signals, model, method, tasks, settings, place))
    if args.sweep is not None and not process.id:
        report_sweep(grid, results, Path(args.output))
    wait_for_all(process, "evaluated")  # the first may still be scoring, and has the service that all need to end


def _run(
    args: flags.FlagValues,
    process: Process,
    signals: Signals,
    model: Model,
    method: Method,
    tasks: Sequence[Any],
    overrides: Mapping[str, Any],
    place: Path | None,
) -> Any:
    """One evaluation; the first process writes to `place` and prints."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from refusion_jax.evaluation.harness import RefusionLM
    from refusion_jax.evaluation.journal import Journal
    from refusion_jax.evaluation.results import check_free, print_results, write_results
    from refusion_jax.evaluation.task_loading import leaves

    with contextlib.ExitStack() as stack:
        journal = None
        if place is not None:
            check_free(place)
            identity = _identity(args, method, overrides)
            journal = stack.enter_context(Journal(place, identity, process))
        lm = RefusionLM(
            model,
            args.batch_size,
            name=args.checkpoint,
            seed=args.seed,
            slot_score=args.slot_score,
            allow_objective=args.allow_objective,
            estimate=args.estimate,
            num_draws=args.num_draws,
            enable_thinking=args.enable_thinking,
            eval_configs=args.eval_configs,
            journal=journal,
            process=process,
            signals=signals,
            method=method,
            **overrides,
        )
        for task in leaves(tasks):
            if task.OUTPUT_TYPE == "generate_until":
                lm.room(task.task_name, lm.decode_config(task.task_name, task.config.generation_kwargs))
        results = simple_evaluate(
            model=lm,
            model_args={"checkpoint": args.checkpoint},
            tasks=list(tasks),
            task_manager=TaskManager(include_defaults=False),  # they are loaded
            num_fewshot=args.num_fewshot,
            batch_size=args.batch_size,
            limit=args.limit,
            log_samples=args.log_samples,
            system_instruction=args.system_instruction,
            apply_chat_template=args.apply_chat_template,
            fewshot_as_multiturn=args.fewshot_as_multiturn,
            predict_only=process.id > 0,  # the first process scores
            confirm_run_unsafe_code=args.allow_code_execution,
        )
    samples = results.pop("samples", None)
    if not process.id:
        if place is not None:
            write_results(place, results, samples)
        print_results(results)
    return results


def _identity(args: flags.FlagValues, method: Method, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """All that answers depend on besides the requests, in which the tasks' settings and prompts are."""
    names = ("seed", "slot_score", "dtype", "quantize", "kv_dtype", "estimate", "num_draws", "apply_chat_template",
             "enable_thinking", "eval_configs")  # fmt: skip
    return {
        **checkpoint_identity(args.checkpoint),
        **{name: args[name].value for name in names},
        **decode_flags.method_identity(args, method),
        "overrides": json.loads(json.dumps(dict(overrides))),
        "lm_eval": importlib.metadata.version("lm_eval"),
    }


if __name__ == "__main__":
    command_line.run(main, FLAGS, required=("checkpoint", "tasks"))
