"""Does an optimized recipe keep its promise? Baseline and optimized, the same seed, runs that take turns.

    python scripts/validate_optimizations.py --baseline recipes/baselines/llama3_8b.yaml \\
        --optimized recipes/gpus/80gb_fastest.yaml --min-speedup 3 --max-loss-delta 0.5%

Several GPUs: --accelerate ddp_4 (a shipped config, or a file) launches both. A word with `=` overrides a key
of both recipes. Finished runs are kept: the same command goes on where it was stopped.

A loss may be lower than the baseline's by any amount, and higher by --max-loss-delta. Models and checkpoint
frequencies of both recipes, and machine, packages and training data of every run, have to be the same: else
they are NOT COMPARABLE.

Exit codes: 0 every limit holds; 5 one does not, or a run failed; 2 a recipe or an argument is wrong, or what
is there is NOT COMPARABLE; 3 this machine lacks what a recipe asks for; 75 stopped by a signal.
"""

import argparse
import sys
from pathlib import Path

from finetune.cli.arguments import at_least_one, at_least_zero
from finetune.cli.main import guarded
from finetune.core.console import Console
from finetune.experiments.ablation import ab_test


def loss_delta(text: str) -> tuple[float, bool]:
    """0.5%, of the baseline's loss; or 0.001, nats a token."""
    return at_least_zero(text.rstrip("%")) / (100 if text.endswith("%") else 1), text.endswith("%")


def validate(options: argparse.Namespace) -> None:
    loss, relative = options.max_loss_delta
    limits = ab_test.Limits(options.min_speedup, loss, relative, options.max_memory_gib)
    launches = (options.baseline_accelerate or options.accelerate, options.accelerate)
    asked = ab_test.Asked(
        options.baseline, options.optimized, options.overrides, launches, Path(options.output),
        options.steps, options.warm_up, options.repeats, options.price_per_hour,
    )  # fmt: skip
    ab_test.run(asked, limits, Console(quiet=options.quiet))


def main(given: list[str] | None = None) -> int:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of both recipes")
    parser.add_argument("--baseline", required=True, metavar="RECIPE")
    parser.add_argument("--optimized", required=True, metavar="RECIPE")
    parser.add_argument("--min-speedup", required=True, type=at_least_zero, metavar="X", help="of tokens/s")
    parser.add_argument(
        "--max-loss-delta", type=loss_delta, default="0.5%", help="higher: 0.5%% (the default), or 0.001"
    )
    parser.add_argument("--max-memory-gib", type=at_least_zero, metavar="X", help="of one device")
    parser.add_argument("--price-per-hour", type=at_least_zero, metavar="X", help="of one device")
    parser.add_argument("--accelerate", metavar="FILE", help="an accelerate config for both")
    parser.add_argument("--baseline-accelerate", metavar="FILE", help="another one for the baseline")
    parser.add_argument("--steps", type=at_least_one, default=20)
    parser.add_argument("--warm-up", type=at_least_one, default=5, help="steps that do not count: 5")
    parser.add_argument("--repeats", type=at_least_one, default=3)
    parser.add_argument("--output", default="results", metavar="DIR")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--debug", action="store_true")
    return guarded(validate, parser.parse_intermixed_args(given))


if __name__ == "__main__":
    sys.exit(main())
