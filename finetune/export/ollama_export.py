"""`--to ollama`: a GGUF file and a Modelfile, whose template renders chats as the tokenizer's template does.

Ollama's templates are Go templates. finetune finds the text that the Jinja template writes around a turn of
each role, and writes a Go template with the same text. It compares both on the validation chats.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.core import safe_files
from finetune.core.errors import Exit, Problem, UserError
from finetune.data.chat_texts import render_chat
from finetune.export import gguf_export
from finetune.export.export_job import ExportJob
from finetune.models import token_limits

KINDS = gguf_export.KINDS
check = gguf_export.check
USER, ANSWER, AGAIN, SYSTEM = "qzuser", "qzanswer", "qzagain", "qzsystem"

PROBES = {
    "chats of several turns: Ollama writes other text around them": [
        ("user", USER), ("assistant", ANSWER), ("user", AGAIN), ("assistant", ANSWER), ("user", USER)
    ],
    "chats with a system message: Ollama drops the message": [("system", SYSTEM), ("user", USER)],
    "contents with spaces at their ends: Ollama keeps the spaces": [("user", f" {USER} \n")],
    "earlier answers with reasoning (<think>): Ollama keeps the reasoning": [
        ("user", USER), ("assistant", f"<think>\n{AGAIN}\n</think>\n\n{ANSWER}"), ("user", AGAIN)
    ],
}  # fmt: skip
"""Chats that templates change -> what Ollama makes of them."""


@dataclass(frozen=True)
class Parts:
    """The text of a chat template around the content of each turn."""

    head: str
    """Before the first turn. A chat with a system message has it only if `head_with_system`."""
    head_with_system: bool
    around: dict[str, tuple[str, str]]
    """Role -> the text before and after its content."""
    prompt: str
    """Before the answer that the model writes."""

    def render(self, messages: list[dict[str, Any]]) -> str | None:
        """Return a chat as the Go template writes it, or `None` if it has a part that it does not know."""
        if any(
            set(message) - {"role", "content"} or message["role"] not in self.around for message in messages
        ):
            return None
        has_system = any(message["role"] == "system" for message in messages)
        turns = [message["content"].join(self.around[message["role"]]) for message in messages]
        return (self.head if self.head_with_system or not has_system else "") + "".join(turns) + self.prompt

    def go(self) -> str:
        """Return the Go template."""
        head = (
            self.head
            if self.head_with_system or not self.head
            else ("{{ if .System }}{{ else }}" + self.head + "{{ end }}")
        )
        branches = ""
        for role, (before, after) in self.around.items():
            branches += f'{{{{ {"else if" if branches else "if"} eq .Role "{role}" }}}}'
            branches += before + "{{ .Content }}" + after
        return f"{head}{{{{ range .Messages }}}}{branches}{{{{ end }}}}{{{{ end }}}}{self.prompt}"


def write(job: ExportJob, folder: Path) -> dict[str, Any]:
    """Write the GGUF file and the Modelfile."""
    chats = [example for example in job.expected.examples if example.messages]
    template, differing = "{{ .Prompt }}", list[str]()
    found = {"chats": len(chats), "different": 0}
    if job.tokenizer.chat_template and (chats or (job.chats and not job.expected.examples)):
        parts = parts_of(job.tokenizer, opens=gguf_export.opens(job))
        check_rendering(parts, job, chats)
        template, differing = parts.go(), differences(parts, job.tokenizer, gguf_export.opens(job))
    report = gguf_export.write(job, folder)
    (name,) = report["files"]
    safe_files.write_text(folder, "Modelfile", modelfile(name, template, job))
    report["serving_check"]["template"] = found
    report["notes"] += [
        *differing,
        "Ollama itself was not run: llama.cpp read the file, and finetune rendered the template",
    ]
    return report | {"serve": [f"ollama create {job.name} -f Modelfile", f"ollama run {job.name}"]}


def modelfile(name: str, template: str, job: ExportJob) -> str:
    """Return the text of the Modelfile."""
    stops = [job.tokenizer.convert_ids_to_tokens(stop) for stop in job.expected.stops]
    config: Any = job.config.get_text_config()
    lines = [
        f"FROM ./{name}",
        f'TEMPLATE """{template}"""',
        *(f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops),
        f"PARAMETER num_ctx {token_limits.batch_limit(config) or config.max_position_embeddings}",
    ]
    return "\n".join([*lines, "# The evaluation of finetune is greedy", "PARAMETER temperature 0", ""])


def parts_of(tokenizer: Any, opens: bool) -> Parts:
    """Return the text that a chat template writes around each role.

    Args:
        opens: whether the GGUF file adds the BOS token, so that the template must not.

    Raises:
        UserError: the template can't be written in this form (exit 2).
    """

    def text(prompt: bool, *turns: tuple[str, str]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        found = render_chat(tokenizer, messages, prompt=prompt)
        return found.removeprefix(tokenizer.bos_token) if opens and tokenizer.bos_token else found

    user, answer = ("user", USER), ("assistant", ANSWER)
    try:
        start, after_user = text(False, user).split(USER)
        after_answer = text(False, user, answer).split(ANSWER)[1]
        first, rest = text(False, user, answer, ("user", AGAIN)).split(ANSWER)
        before_answer = _without(first.split(USER)[1], after_user)
        before_user = _without(rest.split(AGAIN)[0], after_answer)
        head = start.removesuffix(before_user)
        prompt = _without(text(True, user), text(False, user))
        if not start.endswith(before_user):
            raise ValueError("the first user turn differs from later ones")
    except (ValueError, IndexError) as error:
        raise _refused(str(error)) from error
    around = {"user": (before_user, after_user), "assistant": (before_answer, after_answer)}
    with_head = True
    try:
        before, after = text(False, ("system", SYSTEM), user).split(SYSTEM)
        after_system = after.split(USER)[0]
        if after_system.endswith(before_user):
            with_head = before.startswith(head)
            before = before.removeprefix(head) if with_head else before
            around = {"system": (before, after_system.removesuffix(before_user)), **around}
    except ValueError:
        pass  # the template has no system turn, so a chat with one is refused below
    parts = Parts(head, with_head, around, prompt)
    texts = [head, prompt, *(part for pair in around.values() for part in pair)]
    ends = parts.go()[:1] + parts.go()[-1:]
    if any("{{" in part or part.endswith("{") or '"""' in part for part in texts) or '"' in ends:
        raise _refused("a text of the template has characters that end a Go template")
    return parts


def check_rendering(parts: Parts, job: ExportJob, chats: list[Any]) -> None:
    """Raise a UserError if both templates write a validation chat differently (exit 4)."""
    bos = job.tokenizer.bos_token if gguf_export.opens(job) else ""
    for index, example in enumerate(chats):
        wanted = render_chat(job.tokenizer, example.messages[:-1], example.tools).removeprefix(bos or "")
        found = parts.render(example.messages[:-1])
        if found != wanted:
            raise UserError(
                Problem(
                    "the template for Ollama writes a validation chat differently",
                    where=f"chat {index}",
                    found="it has no such part" if found is None else repr(found[:120]),
                    expected=repr(wanted[:120]),
                    fix="--to gguf",
                    code="export",
                    why="the model would read other prompts in Ollama than in training",
                ),
                code=Exit.ARTIFACT,
            )


def differences(parts: Parts, tokenizer: Any, opens: bool) -> list[str]:
    """Return in which chats both templates differ, even if no validation chat is such a chat."""
    bos = tokenizer.bos_token if opens else ""
    found = []
    for what, turns in PROBES.items():
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            wanted = render_chat(tokenizer, messages).removeprefix(bos or "")
        except ValueError:  # the template refuses such a chat
            wanted = None
        if wanted is None or parts.render(messages) != wanted:
            found.append(f"the template for Ollama differs from the tokenizer's template for {what}")
    return found


def _without(text: str, start: str) -> str:
    if not text.startswith(start):
        raise ValueError("the text around a turn depends on other turns")
    return text.removeprefix(start)


def _refused(found: str) -> UserError:
    return UserError(
        Problem(
            "finetune can't write this chat template for Ollama",
            found=found,
            fix="--to gguf",
            why="it does more than frame each turn",
            code="export",
        )
    )
