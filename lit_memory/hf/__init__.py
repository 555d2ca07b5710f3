"""Everything Hugging Face. Importing this package registers our models with the Auto classes of transformers."""

from transformers import AutoConfig, AutoModelForCausalLM

from lit_memory.hf.auto import LitMemoryConfig, LitMemoryForCausalLM

AutoConfig.register(LitMemoryConfig.model_type, LitMemoryConfig, exist_ok=True)
AutoModelForCausalLM.register(LitMemoryConfig, LitMemoryForCausalLM, exist_ok=True)
