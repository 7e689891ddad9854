"""Programs that read a GGUF file for the serving check: llama.cpp, or else transformers' GGUF reader."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from finetune.core import packages
from finetune.core.model_config import ModelConfig
from finetune.data.chat_texts import render_chat
from finetune.data.encoding import Encoded
from finetune.data.examples import Example
from finetune.data.loss_mask import IGNORED
from finetune.export import serving_check
from finetune.export.export_job import ExportJob
from finetune.export.gguf_families import load_gguf
from finetune.export.serving_check import LIKELIEST, AnswerToken, Reader

NONE_INSTALLED = "no reader of GGUF files is installed; run `pip install xllamacpp`"
STARTUP = 600  # seconds to load a model


@contextlib.contextmanager
def reader_of(path: Path, job: ExportJob) -> Iterator[Reader | None]:
    """Open a GGUF file with the best program that is installed, or give `None`."""
    with llama_cpp(path, context_of(job)) as reader:
        if reader is None and packages.installed("gguf"):
            reader = transformers_reader(path, job)
        yield reader


def context_of(job: ExportJob) -> int:
    """Return the most tokens of a prompt and its answer."""
    longest = max((len(document.ids) for document in job.expected.documents), default=0)
    return max([longest, *map(len, job.expected.prompts)]) + serving_check.ROOM + 8


def has_llama_cpp() -> bool:
    """Return whether llama.cpp is installed as a Python package or as a program."""
    return packages.installed("xllamacpp") or shutil.which("llama-server") is not None


@contextlib.contextmanager
def llama_cpp(path: Path, context: int, lora: Path | None = None) -> Iterator[Reader | None]:
    """Open a GGUF file with llama.cpp, or give `None` if it is not installed.

    Args:
        context: the most tokens of a prompt and its answer.
        lora: a GGUF LoRA, which llama.cpp applies to the model.
    """
    if packages.installed("xllamacpp"):
        yield from _xllamacpp(path, context, lora)
    elif program := shutil.which("llama-server"):
        yield from _llama_server(program, path, context, lora)
    else:
        yield None


def _xllamacpp(path: Path, context: int, lora: Path | None) -> Iterator[Reader]:
    """Start llama.cpp's server in this process."""
    xllamacpp: Any = importlib.import_module("xllamacpp")

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = str(path), context, 1, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.verbosity, params.warmup = -1, False
    if lora:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(lora), 1.0)]
    # Two threads on a busy machine are ten times slower than one
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    server = xllamacpp.Server(params)
    version = getattr(xllamacpp, "__version__", "")
    name = f"llama.cpp (xllamacpp {version})".replace(" )", ")")
    yield _server_reader(name, server.listening_address, path)
    del server


def _llama_server(program: str, path: Path, context: int, lora: Path | None) -> Iterator[Reader]:
    """Start the program `llama-server` of llama.cpp, in a folder where it finds no backends of a stranger."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [
        os.path.abspath(program),
        "-m",
        str(path.absolute()),
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "-c",
        str(context),
        "-np",
        "1",
        "-ngl",
        "0",
        "-ctk",
        "f32",
        "-ctv",
        "f32",
        "-fa",
        "off",
        "--no-warmup",
        "--jinja",
    ]
    words += ["--lora", str(lora.absolute())] if lora else []
    silent = subprocess.DEVNULL
    with tempfile.TemporaryDirectory() as empty:
        process = subprocess.Popen(words, stdout=silent, stderr=silent, cwd=empty)
        try:
            address, end = f"http://127.0.0.1:{port}", time.monotonic() + STARTUP
            while process.poll() is None and time.monotonic() < end:
                # While it loads the model, the server rejects requests, which is a ValueError
                with contextlib.suppress(URLError, ConnectionError, TimeoutError, ValueError):
                    _ask(f"{address}/health")
                    break
                time.sleep(0.2)
            yield _server_reader("llama.cpp (llama-server)", address, path)
        finally:
            process.kill()
            process.wait()


def _server_reader(name: str, address: str, path: Path) -> Reader:
    """Return a reader that asks llama.cpp's server. It stops at the tokens that the file's keys name."""
    return Reader(
        name,
        prompt_ids=lambda examples: [_prompt_of_server(address, example) for example in examples],
        answer=partial(_answer_of_server, address),
        stop_ids=partial(_stops_of, _keys_of(path)),
        losses=lambda documents: [_loss_of_server(address, document) for document in documents],
    )


def _keys_of(path: Path) -> dict[str, Any]:
    """Return the keys of a GGUF file without its lists."""
    gguf = load_gguf()

    fields = gguf.GGUFReader(path).fields
    kind = gguf.GGUFValueType.ARRAY
    return {name: field.contents() for name, field in fields.items() if field.types[:1] != [kind]}


def _stops_of(keys: dict[str, Any]) -> set[int]:
    names = [f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom")]
    return {int(keys[name]) for name in names if name in keys}


def _prompt_of_server(address: str, example: Example) -> list[int]:
    """Return the token ids of a prompt as llama.cpp's server makes them."""
    text = example.prompt or ""
    if example.messages:
        body: dict[str, Any] = {"messages": example.messages[:-1], "add_generation_prompt": True}
        body |= {"tools": example.tools} if example.tools else {}
        text = _ask(f"{address}/apply-template", body)["prompt"]
    request = {"content": text, "add_special": True, "parse_special": True}
    return list(_ask(f"{address}/tokenize", request)["tokens"])


def _answer_of_server(address: str, prompt: list[int], room: int) -> list[AnswerToken]:
    request = {
        "prompt": prompt,
        "n_predict": room,
        "temperature": 0,
        "n_probs": LIKELIEST,
        "cache_prompt": False,
        "return_tokens": True,
    }
    done = _ask(f"{address}/completion", request)
    steps = steps_of(done["tokens"], done["completion_probabilities"])
    return [
        AnswerToken(token, {top["id"]: top["logprob"] for top in steps.get(place, ())})
        for place, token in enumerate(done["tokens"])
    ]


def steps_of(tokens: list[int], held: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return the likeliest tokens of the server's steps, by the place of the step's token in the answer.

    The server leaves out a token that ends within a character. So a step can belong to several places if its
    token occurs several times. Such a step is skipped, too.
    """
    ids = [step["id"] for step in held]
    first = _places(ids, tokens)
    last = [len(tokens) - 1 - place for place in _places(ids[::-1], tokens[::-1])][::-1]
    return {
        one: step["top_logprobs"] for one, other, step in zip(first, last, held, strict=True) if one == other
    }


def _places(ids: list[int], tokens: list[int]) -> list[int]:
    """Return the first places of `ids` in `tokens`, in this order."""
    rest = iter(enumerate(tokens))
    return [next(place for place, token in rest if token == one) for one in ids]


def _loss_of_server(address: str, document: Encoded) -> tuple[float, float]:
    """Return the sum of the losses of a document's tokens, and their number or the sum of their weights.

    The server gives the probability of the token that it chooses, before any bias. So a bias makes it choose
    the document's own token.
    """
    loss = count = 0.0
    for place, (label, weight) in enumerate(zip(document.labels(), document.token_weights(), strict=True)):
        if label == IGNORED or place == 0 or not weight:
            continue
        request = {
            "prompt": document.ids[:place],
            "n_predict": 1,
            "temperature": 0,
            "n_probs": 1,
            "logit_bias": [[label, 1e6]],
            "cache_prompt": True,
        }
        (chosen,) = _ask(f"{address}/completion", request)["completion_probabilities"]
        if chosen["id"] != label:
            raise ValueError(f"llama.cpp chose token {chosen['id']} in place of token {label}")
        loss, count = loss - weight * chosen["logprob"], count + weight
    return loss, count


def _ask(address: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request to a server on this machine."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, content, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=STARTUP) as response:
            return json.load(response)
    except HTTPError as error:
        raise ValueError(f"llama.cpp rejected the request: {error.read().decode()[:300]}") from error
    except HTTPException as error:
        raise ConnectionError(f"llama.cpp ended within an answer ({type(error).__name__})") from error


def transformers_reader(path: Path, job: ExportJob) -> Reader:
    """Return transformers' GGUF reader. It reads the tokenizer, the weights and a part of the settings.

    It ignores most names in `tokenizer.ggml.pre` and how a space is added, so it can't compare some tokens.
    """
    import transformers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    held = _keys_of(path)
    name, architecture = f"transformers {transformers.__version__}", held["general.architecture"]
    pre, spaced = held["tokenizer.ggml.pre"], held.get("tokenizer.ggml.add_space_prefix")
    kind = job.config.get_text_config().model_type
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        why = f"{name} does not read the architecture {architecture}"
        stops = partial(_stops_of, held)
        return Reader(name, None, None, stops, without_ids=why, without_answers=why)
    ids = answer = losses = None
    why = lacks = ""
    if spaced and architecture != "phi3":
        why = f"{name} does not read tokenizer.ggml.add_space_prefix"
    elif spaced is None and pre not in (*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2"):
        why = f"{name} does not read tokenizer.ggml.pre: {pre}"
    else:
        ids = partial(_ids_of_transformers, path, held)
    if architecture == "llama" and kind != "llama":
        lacks = f"{name} opens {kind} as llama"
    else:
        model = _model_of_transformers(path, job.config, architecture)
        answer = partial(_answer_of_transformers, model, job.expected.stops)
        losses = partial(serving_check.losses_of, model)
    stops = partial(_stops_of, held)
    return Reader(name, ids, answer, stops, losses, without_ids=why, without_answers=lacks)


def _ids_of_transformers(path: Path, held: dict[str, Any], examples: list[Example]) -> list[list[int]]:
    """Return prompts as llama.cpp's server makes them: one BOS token, from the template or from the key."""
    options: Any = {"gguf_file": path.name, "trust_remote_code": False}
    tokenizer: Any = AutoTokenizer.from_pretrained(str(path.parent), **options)
    adds, bos = bool(held.get("tokenizer.ggml.add_bos_token")), tokenizer.bos_token or ""
    found = []
    for example in examples:
        text = example.prompt or ""
        if example.messages:
            text = render_chat(tokenizer, example.messages[:-1], example.tools)
        text = text.removeprefix(bos) if adds and bos else text
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found.append([tokenizer.bos_token_id, *ids] if adds else ids)
    return found


def _model_of_transformers(path: Path, config: ModelConfig, architecture: str) -> Any:
    """Load the weights. Settings that transformers does not read from the file come from the model."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

    options: Any = {"gguf_file": path.name, "trust_remote_code": False}
    held: Any = AutoConfig.from_pretrained(str(path.parent), **options)
    merged = copy.deepcopy(config.get_text_config())
    for name in GGUF_TO_TRANSFORMERS_MAPPING["config"][architecture].values():
        if name and name != "rope_theta" and hasattr(held, name):
            setattr(merged, name, getattr(held, name))
    if "rope_theta" in (merged.rope_parameters or {}):
        merged.rope_parameters["rope_theta"] = held.rope_parameters["rope_theta"]
    options |= {"config": merged, "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(str(path.parent), **options).eval()


def _answer_of_transformers(
    model: PreTrainedModel | PeftModel, stops: list[int], prompt: list[int], room: int
) -> list[AnswerToken]:
    (tokens,), (logits,) = serving_check.answers(model, [prompt], stops, room)
    return serving_check.steps(tokens, logits)
