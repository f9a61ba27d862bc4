"""What the checks before a start find in chat templates: tools, the format of a call, two calls, stream, prefix, dates.

    python evidence/families/templates.py FOLDER              # files NAME.jinja, or MODEL_TYPE@NAME.jinja
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
from verl_credit.host.process.call_format import CallForm  # noqa: E402
from verl_credit.host.process.stream_check import check_stream  # noqa: E402
from verl_credit.host.process.template_check import check_template  # noqa: E402
from verl_credit.recipe.doctor.lengths import PromptMeter  # noqa: E402
from verl_credit.turns.header import answer_prefix, before_answer  # noqa: E402

QUESTION = {"role": "user", "content": "Where does the Nile end?"}
QUERIES = ("mouth of the river Nile", "delta of the Nile")
BAR = "[|\uff5c]"  # DeepSeek's is the wide one
CONTROL = re.compile(
    rf"<{BAR}[^<>|\uff5c]{{1,40}}{BAR}>|<\|[a-z_]{{1,40}}>|<[a-z_]{{1,40}}\|>|</?[a-z]+_of_[a-z]+>|\[/?[A-Z_]{{3,24}}\]"
    r"|\[e~\[|\]~!?b[\[\]]"  # MiniMax
)
DATE = "@date@"
TYPES = {
    "DeepSeek-R1-Distill-Qwen": "qwen2", "DeepSeek-V3": "deepseek_v3", "deepseek-r1": "deepseek_v3",
    "GigaChat3": "deepseek_v3", "Qwen2.5": "qwen2", "QwQ": "qwen2", "Qwen3.5": "qwen3_5", "Qwen3-Coder": "qwen3_moe",
    "Qwen3": "qwen3", "GLM-4.7-Flash": "glm4_moe_lite", "GLM-4": "glm4_moe", "Kimi-K2": "kimi_k2",
    "MiniMax-M2": "minimax_m2", "Mistral-Small-3.2": "mistral3", "Ministral-3": "mistral3", "Devstral": "mistral",
    "Mistral": "mistral", "mistral": "mistral", "Bielik": "mistral", "Nemotron": "nemotron_h", "Step": "step3p5",
    "Seed-OSS": "seed_oss", "Solar": "solar_open", "SmolLM3": "smollm3", "LFM2-8B": "lfm2_moe",
    "LFM2.5-8B": "lfm2_moe", "LFM2": "lfm2", "gpt-oss": "gpt_oss", "gemma-2": "gemma2", "gemma-4": "gemma4",
    "granite-4": "granitemoehybrid", "granite": "granite", "Phi": "phi3", "command-r7b": "cohere2",
    "command-r": "cohere", "Apertus": "apertus", "Apriel": "llava", "MiMo-VL": "qwen2_5_vl", "rwkv": "rwkv7",
}  # fmt: skip
"""The model_type of a file whose name has this part, the first that fits; llama without any."""
HEAD = "| template | model_type | tools | formats that read its call | two calls | stream | before an answer | date |"


class Template:
    """A template file with a tokenizer, and a recipe that has its model_type."""

    def __init__(self, file: Path, folder: Path):
        kind, _, self.name = file.stem.rpartition("@")
        self.model_type = kind or next((TYPES[part] for part in TYPES if part in self.name), "llama")
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
        starts = formats not in ("", "none")
        return [
            self.name,
            self.model_type,
            tools,
            formats,
            *(_tried(part) if starts else "" for part in parts),
        ]

    def _formats(self) -> tuple[str, str]:
        """What `check_template` says of the tools, and the formats that read the template's call, that of ``auto`` first."""
        try:
            check_template(self.config, self.meter)
        except PreflightError as error:
            why = re.sub(r"^.*?the chat template \(.*?\) ", "", str(error))
            return ("written", "none") if "which no parser" in why else (f"refused: {_short(why)}", "")
        chosen = self.config.actor_rollout_ref.rollout.multi_turn.format
        return "written", ", ".join(dict.fromkeys((chosen, *CallForm(self.meter).readers)))

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
        lines = check_stream(self.config, self.meter)
        return _short("; ".join(line.removeprefix("the agent loop's tokens ") for line in lines)) or "equal"

    def _before_answer(self) -> str:
        """The text between a question and the gold answer, with the prefix that the template itself would write."""
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
