"""The harness's command line, `lm_eval`, with one model more: `--model refusion_jax`.

    lm_eval --model refusion_jax --model_args checkpoint=runs/demo --tasks gsm8k_cot --limit 50
    python -m refusion_jax.evaluation.lm_eval --model refusion_jax ...

The harness has no way to find models of other packages. So this package installs a command `lm_eval` of its own, which
makes the model known and then is the harness's; its other name, `lm-eval`, stays as it was. What this model writes is
run in the sandbox, where the harness's --confirm_run_unsafe_code allows it.
"""

import contextlib
import sys

from refusion_jax.command_line import ending_at_bad_input
from refusion_jax.evaluation import NAME


def main() -> None:
    """Runs the harness with this process's arguments."""
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        sys.exit(f"error: {error.name} is not installed; pip install 'refusion_jax[eval]' brings it.")

    from refusion_jax.evaluation.code_tasks import code_execution
    from refusion_jax.evaluation.sandbox import DEFAULT_LIMITS

    # By name: importing it takes seconds, and --help needs none of it.
    if NAME not in model_registry:
        model_registry.register(NAME, target="refusion_jax.evaluation.harness:RefusionLM")
    with ending_at_bad_input(), contextlib.ExitStack() as stack:
        if any(argument.removeprefix("--model=") == NAME for argument in sys.argv):
            is_allowed = "--confirm_run_unsafe_code" in sys.argv
            stack.enter_context(code_execution(is_allowed, DEFAULT_LIMITS, "--confirm_run_unsafe_code"))
        cli_evaluate()


if __name__ == "__main__":
    main()
