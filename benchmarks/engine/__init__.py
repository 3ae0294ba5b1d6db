"""How fast the native engine is beside transformers and vLLM, and what its memory is for."""
