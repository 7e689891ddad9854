"""Put earlier bugs of finetune and of other projects back, one at a time. A named test must fail for each of
them.

    python benchmarks/reliability.py --seeded

Each is a change of one place in our source. The tree is copied, changed and tested, and compared with the
same test on the tree as it is. tests/unit/core/test_seeded_bugs.py checks that every place and test exists.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = (".git", ".venv", "runs", "__pycache__", ".pytest_cache", ".ruff_cache", "dist", "build")


class Bug(NamedTuple):
    name: str
    file: str
    old: str
    """Stands in `file` exactly once."""
    new: str
    test: str
    """As pytest names it."""


BUGS = (
    Bug(
        "accumulation of 2024: each micro-batch weighs the same, however many tokens it has",
        "finetune/training/trainer.py",
        "items = num_labels if num_items_in_batch is None else num_items_in_batch",
        "items = num_labels * self.current_gradient_accumulation_steps",
        "tests/integration/test_train.py::test_how_a_batch_is_split_does_not_matter",
    ),
    Bug(
        "random state missing in a checkpoint",
        "finetune/checkpointing/training_state.py",
        '"rng": (lambda trainer: random_state(), lambda trainer, kept: set_random_state(kept)),',
        '"rng": (lambda trainer: random_state(), lambda trainer, kept: None),',
        "tests/integration/test_resume.py::test_every_kind_goes_on_bit_for_bit[lora]",
    ),
    Bug(
        "optimizer dropped: a resumed run starts with an empty one",
        "finetune/checkpointing/training_state.py",
        "    trainer.optimizer.load_state_dict(saved)",
        "    pass",
        "tests/integration/test_resume.py::test_every_kind_goes_on_bit_for_bit[lora]",
    ),
    Bug(
        "leaked packing mask: documents of a packed row see each other",
        "finetune/training/training_arguments.py",
        '"padding_free": data.flat,',
        '"padding_free": False,',
        "tests/integration/test_packed_training.py::test_a_step_on_packed_rows_is_a_step_on_the_same_documents",
    ),
    Bug(
        "labels not shifted",
        "finetune/speed/lm_head_loss.py",
        "labels[:, 1:], (0, 1), value=IGNORED",
        "labels, (0, 0), value=IGNORED",
        "tests/unit/speed/test_chunked_cross_entropy.py::test_on_each_family_it_is_the_model_s_own_loss[llama]",
    ),
    Bug(
        "prompt not masked",
        "finetune/data/encoding.py",
        "        return Encoded(ids, found, merged, weights=tuple(weights), is_divided=is_divided)",
        "        return Encoded(ids, [(0, len(ids))], merged)",
        "tests/unit/data/test_encoding.py::test_train_on_says_which_turns",
    ),
    Bug(
        "end of text lost: the model never learns to stop",
        "finetune/data/encoding.py",
        "            ids.append(self.tokenizer.eos_token_id)",
        "            pass",
        "tests/unit/data/test_encoding.py::test_a_tokenizer_that_ends_texts_does_not_end_prompts",
    ),
    Bug(
        "NaN replaced by an old average in the log",
        "finetune/training/training_arguments.py",
        '"logging_nan_inf_filter": False,',
        '"logging_nan_inf_filter": True,',
        "tests/unit/recipe/test_error_messages.py::test_a_log_shows_nan_as_nan",
    ),
    Bug(
        "adapter saved empty",
        "finetune/adapters/initialization.py",
        "adapted.save_pretrained(str(target), state_dict=state, **options)",
        "adapted.save_pretrained(str(target), state_dict={}, **options)",
        "tests/integration/test_train.py::test_a_run_trains_and_verifies[lora]",
    ),
    Bug(
        "manifest not checked: a flipped byte is loaded",
        "finetune/checkpointing/checkpoints.py",
        'if client.sha256(file) != said["sha256"]:',
        "if False:",
        "tests/integration/test_resume.py::test_damage_is_seen_and_passed_over",
    ),
    Bug(
        "older checkpoints let go before the new one is published",
        "finetune/checkpointing/checkpoints.py",
        "            safe_files.rename(root, private.name, to)\n        flush(checkpoints)",
        "            for old in checkpoints.glob('step-*'):\n                _let_go(old)\n"
        "            safe_files.rename(root, private.name, to)\n        flush(checkpoints)",
        "tests/unit/checkpointing/test_checkpoints.py::test_wherever_a_save_is_cut_off_one_verifies[next-1]",
    ),
    Bug(
        "merge with another scaling than was trained",
        "finetune/export/merged_files.py",
        "        merged: Any = adapted.merge_and_unload(safe_merge=True)",
        "        for one in adapted.modules():\n            getattr(one, 'scaling', {}).update(default=1.0)\n"
        "        merged: Any = adapted.merge_and_unload(safe_merge=True)",
        "tests/integration/test_merge.py::test_in_float32_the_merge_is_exact[lora]",
    ),
    Bug(
        "DoRA's norm not refreshed after a step",
        "finetune/speed/dora_norm.py",
        "if stepped or state != self.seen[index]:",
        "if not self.seen[index]:",
        "tests/unit/speed/test_fused_layers.py::test_norms_follow_the_weights",
    ),
    Bug(
        "AdaLoRA never allocates: every rank stays",
        "finetune/training/trainer_setup.py",
        "    allocates = [adalora.AllocateRanks()] if adalora.allocates(adapted) else []",
        "    allocates = []",
        "tests/integration/test_train.py::test_adalora_ends_at_its_budget",
    ),
    Bug(
        "effective batch multiplied by the number of ranks",
        "finetune/autoconfig/batch_size.py",
        "    share = effective // processes",
        "    share = effective",
        "tests/unit/recipe/test_error_messages.py::test_58_a_batch_that_processes_can_t_share",
    ),
    Bug(
        "resume takes a changed learning rate for nothing",
        "finetune/checkpointing/resume_contract.py",
        '    "train.output_dir",\n)',
        '    "train.output_dir",\n    "train.learning_rate",\n)',
        "tests/integration/test_resume.py::test_what_differs_must_match_or_is_named",
    ),
    Bug(
        "secrets shown",
        "finetune/core/privacy.py",
        "for value in secrets() if known is None else known:",
        "for value in ():",
        "tests/security/test_secrets.py::test_errors_screen_and_logs_mask_every_secret",
    ),
    Bug(
        "code of a repository trusted",
        "finetune/models/model_files.py",
        "revision=revision, trust_remote_code=False, **options",
        "revision=revision, trust_remote_code=True, **options",
        "tests/security/test_advisories.py::test_cve_2026_22807_cve_2026_4944_code_of_a_repository_never_runs"
        "[CVE-2026-22807-unknown type]",
    ),
    Bug(
        "fp8: the weights' scale dropped in the gradient",
        "finetune/quantization/fp8_linear.py",
        "gradient = input_gradient(grads[0], weight, weight_scale)",
        "gradient = input_gradient(grads[0], weight, torch.ones_like(weight_scale))",
        "tests/unit/quantization/test_fp8_linear.py::test_forward_and_gradient_against_the_dequantized_weight",
    ),
    Bug(
        "held-out rows trained on",
        "finetune/data/source_loading.py",
        'return (row for row in read(source, "data.name") if not is_held_out(row, data, held_out, seed))',
        'return read(source, "data.name")',
        "tests/unit/data/test_preparation.py::test_equal_rows_stay_on_one_side_whatever_their_ids",
    ),
    Bug(
        "an index of weights names files elsewhere",
        "finetune/core/untrusted_files.py",
        "outside = {str(file): None for file in named.values() if not is_plain_name(file)}",
        "outside: dict[str, None] = {}",
        "tests/security/test_untrusted_files.py::test_an_index_names_files_of_its_folder[../victim/model.safetensors]",
    ),
    Bug(
        "a run is reported to the Hub's telemetry",
        "finetune/cli/main.py",
        "    privacy.switch_off_telemetry()",
        "    pass",
        "tests/security/test_secrets.py::test_no_secret_is_left_anywhere",
    ),
)


def run(words: list[str]) -> dict[str, Any]:
    """The tests on the tree as it is, and each on the tree with its bug.

    Args:
        words: of the bugs' names; none: all bugs.
    """
    bugs = [bug for bug in BUGS if not words or any(word in bug.name for word in words)]
    folder = Path(tempfile.mkdtemp(prefix="finetune-seeded-"))
    tree, found = folder / "tree", {}
    try:
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        sound = tested(tree, sorted({bug.test for bug in bugs}))
        for bug in bugs:
            path = tree / bug.file
            text = path.read_text(encoding="utf-8")
            assert text.count(bug.old) == 1, f"{bug.file}: {bug.old}"
            path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
            code = tested(tree, [bug.test])
            path.write_text(text, encoding="utf-8")
            found[bug.name] = {"caught": code == 1, "by": bug.test}
            print("caught" if code == 1 else f"NOT CAUGHT ({code})", bug.name, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"all pass without a bug": sound == 0, "found": found}


def tested(tree: Path, names: list[str]) -> int:
    """pytest's exit code: 0 all pass, 1 some fail."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *names]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if len(names) > 1 and done.returncode:
        print(done.stdout[-3000:])
    return done.returncode
