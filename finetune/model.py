"""Tokenizer and base model: dtype, attention and storage as they were chosen, read back after loading."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import hub, launch_env, modules, shapes, untrusted
from finetune.adapter_types import FOUR_BIT, QUANTISED
from finetune.errors import Exit, Problem, UserError, first_line
from finetune.hardware import DTYPES, STORED
from finetune.recipe import local_path
from finetune.recipe_errors import similar_files

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.hardware import Setup
    from finetune.receipts import Ledger
    from finetune.sections import Model

FP8_WIDTH = 2048  # hidden size from which `speed.base: auto` takes fp8


def check_exists(model: Model) -> None:
    """A local folder that is not there, said before anything loads (exit 2)."""
    if local_path(model.name) and not Path(model.name).exists():
        found = f"looked in {Path.cwd()} and beside the recipe"
        fix = similar_files(Path(model.name))
        raise UserError(Problem(f"local path not found: {model.name}", "model.name", found=found, fix=fix))


def check_folder(model: Model) -> None:
    """What a model's files must not say or hold, where they are here (exit 2)."""
    check_exists(model)
    if Path(model.name).is_dir():
        untrusted.check_model(Path(model.name), "model.name")


def load_tokenizer(model: Model, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a padding token and, if given, another chat template (Jinja source)."""
    from transformers import AutoTokenizer

    check_exists(model)
    if Path(model.name).is_dir():  # of a model, or of an adapter with its tokenizer
        untrusted.check_files(Path(model.name), "model.name")
    tokenizer = _from_hub(AutoTokenizer.from_pretrained, model)
    if tokenizer.eos_token is None:
        fix = "name one in its tokenizer_config.json: the token that ends a turn"
        raise UserError(Problem("the tokenizer has no eos token", "model.name", found=model.name, fix=fix))
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # what tokenizer.json says of it: rows are cut by us, and padded by the collator
        backend.no_truncation()
        backend.no_padding()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding carries no label, so eos is still learnt
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    known = [token for token in model.add_tokens if token in tokenizer.get_vocab()]
    if known:
        raise UserError(
            Problem("is a token already", "model.add_tokens", found=", ".join(known), fix="drop it")
        )
    _add_tokens(tokenizer, model.add_tokens)
    return tokenizer


def _add_tokens(tokenizer: Any, texts: list[str]) -> None:
    """New tokens, each of which is seen wherever its text stands."""
    from transformers import AddedToken

    # found in the text as it stands: a normaliser, such as Llama 2's, may put a space before it
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    vocabulary = tokenizer.get_vocab()
    lost = [t for t in texts if vocabulary.get(t) not in tokenizer.encode(f"0{t}0", add_special_tokens=False)]
    if lost:
        what, found = "the tokenizer does not see it inside of a text", ", ".join(map(repr, lost))
        raise UserError(Problem(what, "model.add_tokens", found=found, fix="another text"))


def foreign_template(model: Model, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A note where chats are not rendered as the base's repository says: a template is a program, and a place
    to hide instructions."""
    own, used = own_template(model), tokenizer.chat_template
    if used is None or (own and digest(used) == digest(own)):
        return []
    known = f"own ({digest(own)})" if own else "own: it has none"
    return [f"the chat template ({digest(used)}) is not {model.name}'s {known}"]


def own_template(model: Model) -> str | dict[str, str] | None:
    """The chat template in the files of a base, or those by name; a recipe, or an adapter's tokenizer, may
    overrule it."""
    found = {name: _small_file(model, name) for name in ("chat_template.jinja", "tokenizer_config.json")}
    if path := found["chat_template.jinja"]:
        default = path.read_text(encoding="utf-8")
        more = _small_file(model, "additional_chat_templates/tool_use.jinja")
        return {"default": default, "tool_use": more.read_text(encoding="utf-8")} if more else default
    path = found["tokenizer_config.json"]
    said = json.loads(path.read_text(encoding="utf-8")).get("chat_template") if path else None
    return {one["name"]: one["template"] for one in said} if isinstance(said, list) else said


def digest(template: str | dict[str, str]) -> str:
    """Of a chat template; of several by name, of the two that transformers renders chats by."""
    if isinstance(template, dict):
        used = [template.get(name, "") for name in ("default", "tool_use")]
        template = "\0".join(used) if used[1] else used[0]
    return hashlib.sha256(template.encode()).hexdigest()[:16]


def _small_file(model: Model, name: str) -> Path | None:
    """A file of a model that may lack it, here or on the Hub."""
    if local_path(model.name):
        path = Path(model.name) / name
        return path if path.is_file() else None
    found = untrusted.from_hub(model.name, _commit(model), name)
    return Path(found) if found else None


def declared_ends(model: Model) -> set[int]:
    """Ids that the model's own files say to end an answer: the config's, without one of generation."""
    path = _small_file(model, "generation_config.json")
    said = json.loads(path.read_text(encoding="utf-8")) if path else read_config(model).to_dict()
    ends = said.get("eos_token_id")
    return {end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)}


def added_tokens(model: Model, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of `model.add_tokens`."""
    return [int(tokenizer.get_vocab()[token]) for token in model.add_tokens]


def vocabulary(model: Model, tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows of the model's embedding, from its config and the tokens that are added to it."""
    rows = read_config(model).get_text_config().vocab_size
    return max([rows, *(token + 1 for token in added_tokens(model, tokenizer))])


def read_config(model: Model) -> Any:
    """The model's config, as transformers has it."""
    from transformers import AutoConfig

    check_folder(model)
    return _from_hub(AutoConfig.from_pretrained, model)


def load(model: Model, setup: Setup, device: str, ledger: Ledger | None = None) -> PreTrainedModel:
    """The base model, stored and attending as `setup` chose.

    Args:
        device: `cpu`, `cuda:0`; `auto`: layer by layer over all GPUs.

    Attention is always named here: what a model's own config.json says of it is not followed.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = read_config(model)
    if setup.storage.value == "fp8":
        from finetune.speed import fp8_base

        fp8_base.check_checkpoint(config)
        vars(config).pop("quantization_config", None)  # our layers take its weights as those of a plain model
    # as an argument it would yield to an `_attn_implementation` in config.json, a Hub kernel's name too
    config._attn_implementation = setup.attn_implementation
    options: dict[str, Any] = {"config": config, "attn_implementation": setup.attn_implementation}
    if setup.storage.value in QUANTISED:
        options["dtype"] = getattr(torch, DTYPES[setup.launch.precision])
        options["quantization_config"] = _quantised(setup.storage.value, options["dtype"])
    else:
        options["dtype"] = getattr(torch, STORED[setup.storage.value])
    # Accelerate hands on what rank 0 read; DeepSpeed splits it while it is read, and takes no map
    if device != "cpu" and not launch_env.read_by_rank_0() and setup.launch.sharded != "DeepSpeed":
        options["device_map"] = device if device == "auto" else {"": device}
    if launch_env.read_by_rank_0() and not setup.launch.main:
        loaded, missing = without_weights(config, options["dtype"]), []
    else:
        read = AutoModelForCausalLM.from_pretrained
        loaded, found = _from_hub(read, model, output_loading_info=True, use_safetensors=True, **options)
        missing = sorted(found["missing_keys"])
    if missing:  # transformers would make them up
        what, fix = f"its files lack {len(missing)} of the model's weights", "download it again"
        raise UserError(Problem(what, "model.name", found=", ".join(missing[:6]), fix=fix))
    if setup.launch.sharded == "DeepSpeed":
        from finetune import zero

        zero.own_buffers(loaded)
    for module in loaded.modules():
        # On CPUs with AVX512-BF16, bitsandbytes repacks 4-bit weights at the first evaluation, and computes
        # wrong gradients from then on (bitsandbytes 0.50.2, nn/modules.py, Linear4bit.forward)
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    if setup.storage.value == "fp8":
        from finetune.speed import fp8_base

        if ledger:
            fp8_base.add_receipt(loaded, ledger)
        if setup.launch.sharded == "FSDP":
            fp8_base.pack(loaded)
    elif ledger and setup.storage.value in QUANTISED:
        modules.add_coded_receipt(loaded, setup.storage.value, ledger)
    if setup.storage.value in FOUR_BIT and setup.launch.sharded == "FSDP":
        from finetune.speed import four_bit

        four_bit.pack(loaded)
    if not local_path(model.name):
        loaded.config._commit_hash = _commit(model)  # transformers no longer does (5.22)
    if model.add_tokens:
        _add_rows(loaded, added_tokens(model, load_tokenizer(model)))
    return loaded


def without_weights(config: Any, dtype: torch.dtype) -> Any:
    """A model of this config, for a process that gets its part of the weights from rank 0.

    Names, shapes, dtypes and buffers are right; the weights' memory is never touched, so that it takes none.

    transformers itself has every process read all files, and forget them.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        made = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for module in made.modules():
        for name, held in list(module.named_parameters(recurse=False)):
            empty = torch.empty(held.shape, dtype=held.dtype, device="cpu")
            setattr(module, name, torch.nn.Parameter(empty, requires_grad=held.requires_grad))
    made.tie_weights()
    return made.eval()


def _add_rows(loaded: Any, tokens: list[int]) -> None:
    """Rows for new tokens, in the embeddings and the head: the mean of the old ones, no random draw."""
    import torch

    old = len(loaded.get_input_embeddings().weight)
    if max(tokens) >= old:
        loaded.resize_token_embeddings(max(tokens) + 1, mean_resizing=False)
    for module in (loaded.get_input_embeddings(), loaded.get_output_embeddings()):
        with torch.no_grad():
            mean = module.weight[: min(old, min(tokens))].float().mean(0)
            module.weight[tokens] = mean.to(module.weight.dtype)


def declared_stops(generation: Any) -> set[int]:
    """Token ids at which a model ends an answer by its own generation config."""
    ids = generation.eos_token_id
    return set(ids if isinstance(ids, list) else [ids]) - {None}


def settle_generation(generation: Any, stops: list[int]) -> list[str]:
    """Make a base's generation config that of what is saved; returns what was changed.

    Args:
        stops: token ids that end an answer: `scoring.stop_ids`.
    """
    notes = []
    if declared_stops(generation) != set(stops):
        other = f"{stops}, not the base's {generation.eos_token_id}: so the run's answers end"
        notes.append(f"generation_config.json is saved with eos_token_id {other}")
        generation.eos_token_id = stops
    return notes + _storable(generation)


def _storable(generation: Any) -> list[str]:
    """Make it one that can be saved: transformers opens one that samples without `do_sample`, and won't."""
    refused, sampling = _refused(generation), generation.do_sample
    if not refused:
        return []
    generation.do_sample = True
    left = _refused(generation)
    if left == refused:
        generation.do_sample = sampling
    mended = ", ".join(f"{name} {getattr(generation, name)}" for name in refused if name not in left)
    notes = [f"generation_config.json is saved with do_sample: true, which the base's {mended} asks for"]
    for name in left:
        notes.append(f"generation_config.json is saved without the base's {name} {getattr(generation, name)}")
        setattr(generation, name, None)
    return notes if mended else notes[1:]


def _refused(generation: Any) -> list[str]:
    """The values for which transformers does not save a generation config."""
    try:
        generation.validate(strict=True)
    except ValueError as error:
        return re.findall(r"^- `(\w+)`", str(error), re.MULTILINE)
    return []


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """A hash of names, shapes and bytes, computed where each tensor lives; of parts, that of the whole.

    Two 64-bit sums for each tensor (plain, and weighted by position) see any single changed byte for certain.
    """
    from finetune import shards

    digest, found = hashlib.sha256(), shards.sums(tensors)
    for name in sorted(tensors):
        plain, weighted = found[name]
        digest.update(f"{name} {tuple(shards.shape(tensors[name]))} {plain} {weighted}\n".encode())
    return digest.hexdigest()[:16]


def twin(model: Any, setup: Setup, device: str) -> Any:
    """Two layers of a model's architecture, whole, with random weights.

    Where the model itself is in parts, what is to be proved of attention is proved on these.
    """
    import torch

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = copy.deepcopy(base.config)
    text = config.get_text_config()
    text.num_hidden_layers = 2
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        made = type(base)(config)
    return made.to(getattr(torch, setup.compute_dtype))


def against_fp8(model: Model) -> str:
    """Why `speed.base: auto` does not store this model in fp8, from its config; the empty string: it may."""
    return config_against_fp8(read_config(model))


def config_against_fp8(config: Any) -> str:
    """Why `speed.base: auto` does not store a model with this config in fp8; the empty string: it may."""
    width = getattr(config.get_text_config(), "hidden_size", 0)
    if width < FP8_WIDTH:
        return f"layers of width {width} are too small to gain (from {FP8_WIDTH} up they do)"
    if count := shapes.experts(config.get_text_config()):
        return (
            f"its {count} experts are no linear layers: they would stay in bf16, which is most of the model"
        )
    if getattr(config, "quantization_config", None):
        from finetune.speed import fp8_base

        try:
            fp8_base.check_checkpoint(config)
        except UserError as error:
            return f"{error.problems[0].what}: {error.problems[0].found}"
    return ""


def _quantised(storage: str, compute: torch.dtype) -> Any:
    """transformers' quantisation config: our fp8; NF4 and FP4 in blocks of 64 with double quantisation (arXiv
    2305.14314), LLM.int8() (arXiv 2208.07339), or torchao's int8 weights with a scale for each output."""
    if storage == "fp8":
        from finetune.speed.fp8_base import Fp8BaseConfig

        return Fp8BaseConfig()
    if storage == "torchao_int8":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    from transformers import BitsAndBytesConfig

    if storage == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=storage,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )


def pinned(model: Model) -> Model:
    """The same with the commit that its revision is now, where it is on the Hub."""
    return model if local_path(model.name) else model.model_copy(update={"revision": _commit(model)})


def _commit(model: Model) -> str:
    return hub.commit(model.name, model.revision or "main")


def _from_hub(load: Any, model: Model, **options: Any) -> Any:
    """Call `from_pretrained`; its errors become ours, with the remedy. The model's own code never runs."""
    revision = "main" if local_path(model.name) else _commit(model)
    try:
        if not local_path(model.name):
            untrusted.check_hub(model.name, revision, "model.name")
        # said, not left out: without it transformers asks at the terminal whether it may run the code
        return load(model.name, revision=revision, trust_remote_code=False, **options)
    except ImportError as error:  # of a tokenizer, or of a checkpoint that others quantised
        fix = "install it; of weights that are quantised take those in 16 bits"
        problem = Problem("wants a package that is not here", "model.name", found=first_line(error), fix=fix)
        raise UserError(problem, code=Exit.ENVIRONMENT) from error
    except (OSError, ValueError) as error:
        reason = first_line(error)
        if "trust_remote_code" in str(error):
            what = "needs code of its own to be run, which this program does not do"
            fix = "a model that transformers knows by itself, or one converted to such"
            raise UserError(Problem(what, "model.name", found=reason, fix=fix)) from error
        if "model.safetensors" in reason and "use_safetensors=True" in str(error):
            raise UserError(untrusted.only_pickles("model.name", model.name)) from error
        if local_path(model.name):
            problem = Problem("the folder does not hold a model that loads", "model.name", found=reason)
            raise UserError(problem) from error
        raise UserError(hub.unread(error, model.name, revision), code=Exit.ENVIRONMENT) from error
