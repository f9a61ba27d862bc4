"""The packages themselves, where they are installed (`make weights`)."""

from importlib import metadata

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_credit.worlds.real.build import write_policy
from verl_credit.worlds.real.packages import ENCODER, POLICY, RealError, folder_of
from verl_credit_retriever.encoder import SentenceEncoder

pytestmark = pytest.mark.slow  # 100 MB of quantised weights are read


@pytest.fixture(scope="module", params=[POLICY, ENCODER], ids=lambda package: package.name)
def installed(request):
    try:
        metadata.distribution(request.param.name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{request.param.name} is not installed: make weights")
    return request.param


def test_the_published_files_are_what_they_were(installed):
    try:
        assert folder_of(installed).is_dir()
    except RealError as error:
        pytest.fail(str(error))


def test_they_work(installed, tmp_path):
    if installed is ENCODER:
        encoder = SentenceEncoder(folder_of(ENCODER), query_prefix="", passage_prefix="")
        river, nile, cake = encoder.encode_queries(
            ["Which river ends in Egypt?", "The Nile", "Bake at 200 degrees"]
        )
        assert river @ nile > 0.4 > 0.2 > river @ cake
        return
    (gguf,) = POLICY.files
    write_policy(folder_of(POLICY) / gguf, tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.inference_mode():
        told = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(told)
    assert told[-1] == tokenizer.eos_token_id  # it ends its turn
