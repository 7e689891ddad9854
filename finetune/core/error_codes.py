"""The codes of errors. `finetune explain CODE` prints an entry, and the documentation lists all of them.

A code names a kind of problem. Codes are stable: scripts may rely on them.
"""

from __future__ import annotations

SECRET_IN_RECIPE = "secret-in-recipe"

# code -> what the error means and how to solve it
CODES = {
    # The command line and the recipe
    "command-line": (
        "The command line has a wrong argument or option. Run the command with --help to see all "
        "arguments and options."
    ),
    "recipe-file": (
        "finetune can't read the recipe. The path is wrong, or the file is no recipe. Run "
        "`finetune recipes` to list the shipped recipes and `finetune init` to write a new one."
    ),
    "yaml-syntax": (
        "The file is not valid YAML, or it uses a part of YAML that recipes don't allow: anchors, "
        "tags, repeated keys or several documents. The caret shows the position."
    ),
    "unknown-key": (
        "A recipe has a key that finetune does not know. `train:` takes the keys of TRL's "
        "SFTConfig and `adapter:` takes the keys of PEFT's config for the adapter type. The "
        "reference of recipe keys lists all keys."
    ),
    "missing-key": (
        "A required key is missing. A recipe needs `model.name`, `data.name` and `adapter.type`."
    ),
    "renamed-key": ("The key or value has a new name. Replace it with the name after `help:`."),
    "value-type": (
        "A value has the wrong type, such as a string in place of a number. Quotes make a string: "
        "`r: 16` is an integer and `r: '16'` is a string."
    ),
    "value-range": ("A number is too small or too large. `expected:` shows the limit."),
    "value-choice": (
        "The value is not one of the allowed values. `help:` shows the most similar allowed value."
    ),
    "recipe-conflict": (
        "Two settings of the recipe exclude each other, or one of them would have no effect. "
        "finetune stops, because it can't know which setting you want. Remove one of the two."
    ),
    SECRET_IN_RECIPE: (
        "A recipe holds a token, key or password. Recipes are shared and uploaded, so finetune "
        "reads secrets only from the environment. Set HF_TOKEN or run `hf auth login`. If you "
        "have shared the recipe, revoke the secret."
    ),
    "import": (
        "finetune can't translate the file of another tool. It imports supervised fine-tuning of axolotl, "
        "LLaMA-Factory and TRL."
    ),
    # Data
    "data-not-found": (
        "finetune can't find the data. Relative paths start at the working directory, then at the "
        "recipe's folder. Other names are datasets on the Hub."
    ),
    "data-format": (
        "finetune can't read the format of the data, or the columns fit no known format. The "
        "known formats are messages, prompt and completion, alpaca, sharegpt and text. Set "
        "`data.format` and `data.columns` to choose one."
    ),
    "data-example": (
        "An example can't be used: a field is missing, a role is unknown, or turns are in the "
        "wrong order. The place shows the file and the example. Run `finetune data RECIPE` to see "
        "all examples with a problem."
    ),
    "data-lost": (
        "A part of an example does not reach the model, such as a tool call that the chat "
        "template ignores. The model would be trained on incomplete examples. Choose another chat "
        "template, or remove the part from the data."
    ),
    "data-expect": (
        "The data breaks a limit that `data.expect` sets, such as the share of dropped examples. "
        "Correct the data, or change the limit."
    ),
    "data-empty": (
        "No example is left to train on or to evaluate on. Run `finetune data RECIPE` to see why "
        "examples were dropped."
    ),
    "data-changed": (
        "Another program wrote to a data file while finetune read it. Run the command again when "
        "the file is complete."
    ),
    "data-size": (
        "A file, line or example is larger than a limit that protects memory and time. The limits "
        "are `data.max_example_bytes` and `data.max_uncompressed_bytes`."
    ),
    "chat-template": (
        "The chat template is missing, does not fit the data, or raises an error. Set "
        "`data.chat_template` to a bundled template or to a file."
    ),
    "token-limit": (
        "An example has more tokens than the model has positions, or a token id is not in the "
        "model's vocabulary. Set `data.max_length` and `data.too_long`."
    ),
    "tokenizer": (
        "finetune can't use the tokenizer: its files are missing or damaged, or it has no fast "
        "(Rust) version. Save the tokenizer again with transformers, or use another model."
    ),
    "cache": (
        "A cache of prepared data is damaged or belongs to other data. finetune prepares the data "
        "again where it can. Otherwise delete the cache folder."
    ),
    # Models and adapters
    "model-not-found": (
        "finetune can't find the model. `model.name` is a folder with config.json, or the name of "
        "a repository on the Hub."
    ),
    "model-files": (
        "The model's files are damaged, incomplete or contradict each other. Download the model "
        "again, or save it again with transformers."
    ),
    "model-config": (
        "The model's config.json holds values that no model can have, or values that do not fit the weights."
    ),
    "model-unsupported": (
        "finetune can't train this architecture, or can't train it with these settings. The "
        "message names the part. finetune trains causal language models of transformers."
    ),
    "quantization": (
        "The model can't be stored or loaded with this quantization. Set `model.quantization`, or "
        "use a checkpoint without quantization."
    ),
    "target-modules": (
        "`adapter.target_modules` or a similar key names modules that the model does not have, or "
        "modules that the adapter type can't change. Use `all-linear`, or names from the message."
    ),
    "adapter-type": ("The adapter type does not exist, or it does not fit the other settings."),
    "adapter-option": ("An option of the adapter has a value that PEFT can't use, or that has no effect."),
    "adapter-files": ("A saved adapter is damaged, or does not fit the model."),
    "unsafe-file": (
        "A file could run code, leave its folder through a link, or is no regular file. finetune "
        "does not open such files. SECURITY.md describes the rules."
    ),
    # The machine and the launch
    "package-missing": (
        "An optional package is not installed, or its version does not fit. `help:` shows the "
        "command that installs it."
    ),
    "hardware": (
        "This machine can't run the setting, for example because the GPU lacks a feature. Use "
        "`auto` to let finetune choose."
    ),
    "attention-kernel": (
        "The attention kernel is not available for this machine, model or dtype. Use "
        "`model.attention: auto` to let finetune choose."
    ),
    "speed-option": (
        "A setting of `speed:` can't be used with this model, adapter or machine. Use `auto` to "
        "let finetune choose."
    ),
    "out-of-memory": (
        "The GPU or the machine has too little memory. `finetune plan RECIPE` shows what needs "
        "memory and which settings need less."
    ),
    "disk": (
        "A disk is full or has failed, or a file can't be written. Free some space or check the drive, and "
        "run the command again with --resume=auto."
    ),
    "process-limit": (
        "The system refused a new process or thread. Raise the limit with `ulimit -u`, or the limit of "
        "processes of the container."
    ),
    "path": (
        "finetune can't open a path: it is too long, a folder in place of a file, deleted by another "
        "program, or access is denied. Or too many files are open."
    ),
    "launch-config": (
        "The accelerate config is wrong, or does not fit the recipe or the machine. The shipped "
        "configs are in accelerate_configs/."
    ),
    "launch-lost": (
        "A process of the launch ended or stopped answering. The first error in the output names the cause."
    ),
    # Training, runs and evaluation
    "non-finite": (
        "The loss, a gradient or a weight is NaN or Inf. Lower `train.learning_rate`, or inspect "
        "the examples of the named step."
    ),
    "no-gradient": (
        "A trainable tensor gets no gradient, because the model reads its weight without a call "
        "of the module. Remove the module from `adapter.target_modules`. Or all gradients of the "
        "first steps are 0, so the settings let nothing train."
    ),
    "batch-size": (
        "The batch sizes do not fit together or do not fit the number of examples. The effective "
        "batch size is the micro-batch size times the gradient accumulation steps times the "
        "processes."
    ),
    "run-check": (
        "A check of the run failed: a setting that you asked for is not the setting that ran, or "
        "a saved file differs from the trained weights."
    ),
    "run-folder": ("The run folder is missing, incomplete, in use by another process, or holds another run."),
    "run-damaged": ("A file of the run folder is damaged or was changed after the run."),
    "checkpoint": (
        "A checkpoint is damaged, missing or from another run. finetune resumes from the newest "
        "checkpoint that is valid."
    ),
    "resume-mismatch": (
        "The recipe, the data or the launch differs from the run that you want to resume, so the "
        "result would differ too. Use the old settings, or start a new run."
    ),
    "eval-setting": ("A setting of `eval:` can't be used, for example a metric that no task computes."),
    "eval-task": ("An evaluation task is unknown, is not allowed, or its file is wrong."),
    # After the run
    "merge": (
        "The adapter can't be merged into the base model, or the merged model differs from the adapter."
    ),
    "quantize": ("The merged model can't be quantized as asked."),
    "export": (
        "The model can't be exported for this server, or the exported model reads or answers prompts "
        "differently. The message names the feature, the file or the first token that differs. "
        "`--to vllm` accepts every model that vLLM serves."
    ),
    "publish-target": ("The repository to publish to is missing or not allowed. Name it with --repo."),
    "publish-secret": (
        "A file that would be uploaded holds something with the form of a secret. Remove the "
        "secret from the file. If it is a real secret, revoke it."
    ),
    "hub": (
        "The Hugging Face Hub rejected the request or can't be reached. Check your network and your token."
    ),
    "experiment": (
        "The request for `compare`, `ablate` or `sweep` is wrong, its folder holds another experiment, or a "
        "measured figure misses its limit."
    ),
    "search-space": ("The file of a sweep's search space is wrong."),
    "ablation-file": ("The file of an ablation's optimizations is wrong."),
    "report": ("finetune can't write the report or a plot."),
    # Unexpected errors
    "library-error": (
        "Another library raised an exception that finetune does not know. Run the command again "
        "with --debug to see the traceback."
    ),
    "your-code": (
        "Code that you passed to finetune, such as a callback, raised an exception. Correct the code, or "
        "remove it from the call."
    ),
    "internal-error": ("finetune has a bug. Run the command again with --debug and report the traceback."),
}
