"""The harness's command line, `lm_eval`, with one model more: `--model refusion_jax`.

    lm_eval --model refusion_jax --model_args checkpoint=runs/demo --tasks gsm8k_cot --limit 50
    python -m refusion_jax.evaluation.lm_eval --model refusion_jax ...

The harness has no way to find models of other packages. So this package installs a command `lm_eval` of its own, which
makes the model known and then is the harness's; its other name, `lm-eval`, stays as it was.
"""

import sys


def main() -> None:
    """Runs the harness with this process's arguments."""
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        sys.exit(f"error: {error.name} is not installed; pip install 'refusion_jax[eval]' brings it.")

    from refusion_jax.evaluation.metrics_library import import_evaluate

    import_evaluate()  # in a checkout, python -m finds the script of that name first
    # By name: importing it takes seconds, and --help needs none of it.
    model_registry.register("refusion_jax", target="refusion_jax.evaluation.harness:RefusionLM")
    cli_evaluate()


if __name__ == "__main__":
    main()
