"""What the checks before a start find in chat templates: tools, the format of a call, two calls, stream, prefix, dates.

    python evidence/families/templates.py FOLDER              # files MODEL_TYPE@NAME.jinja; without @ the type is llama
    python evidence/families/templates.py FOLDER --only Qwen3

Published templates have licences of their own and are not part of the project. Each gets a byte-level tokenizer with its
control tokens. No model is loaded.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from kit.byte_world import make_tokenizer  # noqa: E402
from kit.recipes import load_config  # noqa: E402
from verl_credit.errors import PreflightError  # noqa: E402
from verl_credit.host.process.template_check import check_template  # noqa: E402
from verl_credit.recipe.doctor.lengths import PromptMeter  # noqa: E402

QUESTION = {"role": "user", "content": "Where does the Nile end?"}
QUERIES = ("mouth of the river Nile", "delta of the Nile")
BAR = "[|\uff5c]"  # DeepSeek's is the wide one
CONTROL = re.compile(rf"<{BAR}[^<>|\uff5c]{{1,40}}{BAR}>|</?[a-z]+_of_[a-z]+>|\[/?[A-Z_]{{3,24}}\]")
DATE = "@date@"
HEAD = "| template | model_type | tools | formats that read its call | two calls | stream | before an answer | date |"


class Template:
    """A template file with a tokenizer, and a recipe that has its model_type."""

    def __init__(self, file: Path, folder: Path):
        kind, _, self.name = file.stem.rpartition("@")
        self.model_type = kind or "llama"
        self.tokenizer = make_tokenizer()
        self.tokenizer.chat_template = text = file.read_text(encoding="utf-8")
        control = sorted({*CONTROL.findall(text), "<s>", "</s>"} - set(self.tokenizer.get_vocab()))
        self.tokenizer.add_special_tokens({"additional_special_tokens": control})
        self.tokenizer.bos_token = "<s>"
        (folder / "config.json").write_text(json.dumps({"model_type": self.model_type}), encoding="utf-8")
        self.config = load_config("search_cpu", [f"actor_rollout_ref.model.path={folder}"])
        self.meter = PromptMeter(self.tokenizer, self.config)

    def cells(self) -> list[str]:
        tools, formats = self._formats()
        parts = (self._two_calls, self._stream, self._before_answer, self._date)
        return [self.name, self.model_type, tools, formats, *map(_tried, parts)]

    def _formats(self) -> tuple[str, str]:
        """What `check_template` says, and the formats with which it accepts the template."""
        from verl.experimental.agent_loop.tool_parser import ToolParser

        accepted, refused = [], []
        for name in ToolParser._registry:
            self.config.actor_rollout_ref.rollout.multi_turn.format = name
            try:
                check_template(self.config, self.meter)
                accepted.append(name)
            except PreflightError as error:
                refused.append(re.sub(r"^.*?the chat template \(.*?\) ", "", str(error)))
        if not accepted:
            unread = [text for text in refused if "does not read" in text]
            return ("written", "none") if unread else (f"refused: {_short(refused[0])}", "")
        if len(accepted) == len(ToolParser._registry):
            return "written", "not judged: it writes no call"
        self.config.actor_rollout_ref.rollout.multi_turn.format = accepted[0]
        return "written", ", ".join(accepted)

    def _two_calls(self) -> str:
        calls = [
            {
                "id": f"call{number:05}",
                "type": "function",
                "function": {"name": "search", "arguments": {"query": query}},
            }
            for number, query in enumerate(QUERIES)
        ]
        results = [{"role": "tool", "content": "A sea.", "tool_call_id": call["id"]} for call in calls]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        text = self.meter.text([QUESTION, turn, *results])
        return "both written" if all(query in text for query in QUERIES) else "left out"

    def _stream(self) -> str:
        """The loop's tokens of a conversation beside the template's text of it."""
        try:
            from verl_credit.host.process.stream_check import check_stream
        except ImportError:
            return "not compared"
        return "; ".join(check_stream(self.config, self.meter)) or "equal"

    def _before_answer(self) -> str:
        """The text between a question and the gold answer, with the prefix that the template itself would write."""
        try:
            from verl_credit.turns.header import answer_prefix, before_answer
        except ImportError:
            return repr(self.meter.text([QUESTION]).rpartition(QUESTION["content"])[2])
        return repr(before_answer(self.tokenizer)) + " + " + repr(answer_prefix(self.tokenizer))

    def _date(self) -> str:
        text = self.tokenizer.apply_chat_template(
            [QUESTION], tools=self.meter.tools, tokenize=False, strftime_now=lambda form: DATE
        )
        return "today's" if DATE in text else ""


def _tried(part) -> str:
    try:
        return part()
    except Exception as error:  # a template may raise any exception
        return f"refused: {type(error).__name__}: {_short(str(error))}"


def _short(text: str) -> str:
    return " ".join(text.split())[:120]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="a part of the file's name")
    given = parser.parse_args()
    files = [file for file in sorted(given.folder.glob("*.jinja")) if (given.only or "") in file.name]
    if not files:
        parser.error(f"{given.folder} has no file *{given.only or ''}*.jinja")
    from verl.utils.tokenizer import continuous_token_wiring  # noqa: F401  (which makes its logger)

    for name in list(logging.root.manager.loggerDict):  # verl warns of every model type outside its table
        logging.getLogger(name).setLevel(logging.ERROR)
    print(HEAD, "|" + "---|" * (HEAD.count("|") - 1), sep="\n")
    for file in files:
        with tempfile.TemporaryDirectory() as folder:
            cells = Template(file, Path(folder)).cells()
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
